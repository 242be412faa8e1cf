// Binds a model library's OpenMP calls to our thread pool (threads/gomp.cpp) in place of an OpenMP runtime.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "model/elf.h"

namespace untorch {

// Our name for an entry point of OpenMP, of the same length: UTMP_parallel for GOMP_parallel. Empty for other symbols.
std::string own_openmp_name(std::string_view symbol);

// True when the library needs libgomp, LLVM's libomp or Intel's libiomp5.
bool needs_openmp(const ElfImage& elf) noexcept;

// Takes what is left of the runtime out of a copy whose symbols are renamed already: the calls lose the versions that
// the runtime's had, the requirement of those versions is unlinked, and DT_NEEDED names `soname`, whose name must be
// needed by the copy (otherwise the entry stays).
void rebind_openmp(const ElfImage& elf, std::span<std::byte> copy, const std::string& soname);

}  // namespace untorch
