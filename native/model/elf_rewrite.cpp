// Overwrites names, dynamic entries and flags in place.
#include "model/elf_rewrite.h"

#include <algorithm>
#include <cstring>

namespace untorch {
namespace {

bool is_libtorch(std::string_view name) { return name.starts_with("libtorch") || name.starts_with("libc10"); }

bool is_executable_stack(const Elf64_Phdr& segment) noexcept {
  return segment.p_type == PT_GNU_STACK && (segment.p_flags & PF_X) != 0;
}

}  // namespace

bool needs_libtorch(const ElfImage& elf) noexcept {
  return std::ranges::any_of(elf.needed(), [](const ElfImage::Needed& needed) { return is_libtorch(needed.name); });
}

void rebind_libtorch(const ElfImage& elf, std::span<std::byte> copy, const std::string& soname) {
  const ElfImage::Needed* host = nullptr;
  for (const ElfImage::Needed& entry : elf.needed()) {
    if (is_libtorch(entry.name) && std::strlen(entry.name) >= soname.size()) host = &entry;
  }
  if (host == nullptr) {
    throw_error(ErrorKind::kUnsupported, elf.name(),
                " needs libtorch under a name that is too short to be replaced by ", soname);
  }
  std::uint64_t value = 0;  // of the dynamic entry: the name's offset in the string table
  std::memcpy(&value, copy.data() + host->entry_offset + offsetof(Elf64_Dyn, d_un), sizeof value);
  for (const ElfImage::Needed& entry : elf.needed()) {
    if (!is_libtorch(entry.name)) continue;
    std::memcpy(copy.data() + entry.entry_offset + offsetof(Elf64_Dyn, d_un), &value, sizeof value);
  }
  // Last: `elf` may be a view of `copy`.
  std::memcpy(copy.data() + host->string_offset, soname.c_str(), soname.size() + 1);
}

void rename_symbol(std::span<std::byte> copy, const ElfSymbol& symbol, const std::string& name) {
  check(name.size() == symbol.name.size(), "cannot rename ", symbol.name, " to ", name);
  std::memcpy(copy.data() + symbol.name_offset, name.data(), name.size());
  constexpr std::uint16_t kUnversioned = VER_NDX_GLOBAL;
  if (symbol.version_offset != 0) std::memcpy(copy.data() + symbol.version_offset, &kUnversioned, sizeof kUnversioned);
}

void make_closable(const ElfImage& elf, std::span<std::byte> copy) {
  for (std::uint64_t i = 1; i < elf.num_symbols(); ++i) {
    const Elf64_Sym symbol = elf.symbol(i);
    if (ELF64_ST_BIND(symbol.st_info) != STB_GNU_UNIQUE) continue;
    const unsigned char info = ELF64_ST_INFO(STB_WEAK, ELF64_ST_TYPE(symbol.st_info));
    std::memcpy(copy.data() + elf.symbol_offset(i) + offsetof(Elf64_Sym, st_info), &info, sizeof info);
  }
  const Elf64_Phdr& section = *elf.segment(PT_DYNAMIC);
  for (std::uint64_t at = section.p_offset;; at += sizeof(Elf64_Dyn)) {
    auto entry = elf.at<Elf64_Dyn>(at);
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag != DT_FLAGS_1) continue;
    entry.d_un.d_val &= ~std::uint64_t{DF_1_NODELETE};
    std::memcpy(copy.data() + at, &entry, sizeof entry);
  }
}

bool asks_for_executable_stack(const ElfImage& elf) noexcept {
  return std::ranges::any_of(elf.segments(), is_executable_stack);
}

void clear_executable_stack(const ElfImage& elf, std::span<std::byte> copy) {
  for (std::size_t i = 0; i < elf.segments().size(); ++i) {
    Elf64_Phdr segment = elf.segments()[i];
    if (!is_executable_stack(segment)) continue;
    segment.p_flags &= ~static_cast<Elf64_Word>(PF_X);
    std::memcpy(copy.data() + elf.header().e_phoff + i * sizeof segment, &segment, sizeof segment);
  }
}

}  // namespace untorch
