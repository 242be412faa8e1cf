// Checks everything that the dynamic linker follows blindly, before it sees a library.
#pragma once

#include <string_view>
#include <vector>

#include "model/elf.h"

namespace untorch {

// Throws kInvalidFile when headers, dynamic section, hash tables, symbols, versions, relocations or
// initialisers of a shared library point outside of its image or contradict each other: on such a file dlopen reads and
// writes wherever the file says, or ends the process by an assertion.
//
// This protects against damage, not against malice: a model library is code, and opening it runs it.
//
// Returns the names of the functions that the library defines.
std::vector<std::string_view> check_elf_image(const ElfImage& elf);

}  // namespace untorch
