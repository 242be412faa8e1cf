// Checks the tables by which the unwinder finds a function's frame description: .eh_frame_hdr and .eh_frame (Linux
// Standard Base 5.0, chapter 10.6; DWARF 5, section 6.4).
#pragma once

#include "model/elf.h"

namespace untorch {

// Throws kInvalidFile when the sorted table, the frame descriptions or the pointers in them contradict each other or
// leave the image: on such a library an exception ends the process. The instructions that restore registers, and the
// tables of handlers that the descriptions point to, are taken as code: they are not looked at.
void check_unwind_tables(const ElfImage& elf);

}  // namespace untorch
