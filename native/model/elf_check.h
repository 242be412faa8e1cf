// Checks everything that the dynamic linker follows blindly, before it sees a library.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "model/elf.h"

namespace untorch {

// Throws kInvalidFile when headers, dynamic section, hash tables, symbols, versions, relocations or
// initialisers of a shared library point outside of its image or contradict each other: on such a file dlopen reads and
// writes wherever the file says, or ends the process by an assertion.
//
// This protects against damage, not against malice: a model library is code, and opening it runs it.
//
// Returns the functions that the library defines, with their addresses.
std::unordered_map<std::string_view, std::uint64_t> check_elf_image(const ElfImage& elf);

}  // namespace untorch
