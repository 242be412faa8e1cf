// A model library before the dynamic linker sees it: the ELF reader, all checks, and the changes to the copy that is
// opened. Nothing is opened here.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "input_limits.h"
#include "model/elf.h"
#include "model/elf_check.h"
#include "model/elf_openmp.h"
#include "model/elf_rewrite.h"
#include "model/own_names.h"

namespace {

using namespace untorch;

// As model/library.cpp does it: `elf` is a view of the copy that is changed.
void rewrite(const ElfImage& elf, const std::vector<ElfSymbol>& symbols, std::span<std::byte> copy) {
  clear_executable_stack(elf, copy);
  make_closable(elf, copy);
  for (const ElfSymbol& symbol : symbols) {
    const std::string own = symbol.is_defined ? std::string() : own_name(symbol.name);
    if (!own.empty()) rename_symbol(copy, symbol, own);
  }
  if (needs_libtorch(elf)) rebind_libtorch(elf, copy, "libuntorch.so");
  if (needs_openmp(elf)) rebind_openmp(elf, copy, "libuntorch.so");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::Limits limits;
  std::vector<std::byte> copy(reinterpret_cast<const std::byte*>(data),
                              reinterpret_cast<const std::byte*>(data) + size);
  try {
    const ElfImage elf(copy, "input");
    check_elf_machine(elf);
    (void)elf.version_needs();
    const std::vector<ElfSymbol> symbols = elf.symbols();
    (void)check_elf_image(elf);
    rewrite(elf, symbols, copy);
  } catch (const Error&) {
    return 0;
  }
  // What is opened must be as sound as what was checked. Section headers are not rewritten, and the dynamic linker does
  // not look at them.
  try {
    constexpr Elf64_Off kNone = 0;
    std::memcpy(copy.data() + offsetof(Elf64_Ehdr, e_shoff), &kNone, sizeof kNone);
    const ElfImage elf(copy, "copy");
    (void)check_elf_image(elf);
    if (needs_libtorch(elf)) fuzz::finding("a copy needs libtorch");
    if (needs_openmp(elf) && elf.needs("libuntorch.so")) fuzz::finding("a copy needs another OpenMP library");
    if (asks_for_executable_stack(elf)) fuzz::finding("a copy asks for an executable stack");
  } catch (const Error& error) {
    // A DT_HASH table has undefined symbols, too, and is not made anew for those that were renamed: nobody finds them.
    if (std::string_view(error.what()).find("hash table") == std::string_view::npos) fuzz::finding(error.what());
  }
  return 0;
}
