// Changes to a copy of a model library before it is opened. No byte moves.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "model/elf.h"

namespace untorch {

// True when it needs one of libtorch's libraries: libtorch.so, libtorch_cpu.so, libtorch_cuda.so, libc10.so …
bool needs_libtorch(const ElfImage& elf) noexcept;
// Makes the needed libtorch libraries `soname`: it overwrites one of the old names in the string table, and the other
// entries are pointed to the same place.
void rebind_libtorch(const ElfImage& elf, std::span<std::byte> copy, const std::string& soname);

// Renames an undefined symbol; both names have the same length. Undefined symbols are in no hash table, so nothing else
// has to change but its version, which is that of the other library.
void rename_symbol(std::span<std::byte> copy, const ElfSymbol& symbol, const std::string& name);

// Clears what keeps a library in the process after dlclose: DF_1_NODELETE, and STB_GNU_UNIQUE symbols (static variables
// of templates and inline functions), which become weak ones. A model library shares them with nobody.
void make_closable(const ElfImage& elf, std::span<std::byte> copy);

// True when a program header asks for an executable stack. Weights that were assembled into a library ask for one by
// accident, and newer C libraries then refuse to open it.
bool asks_for_executable_stack(const ElfImage& elf) noexcept;
void clear_executable_stack(const ElfImage& elf, std::span<std::byte> copy);

}  // namespace untorch
