// Rewrites DT_NEEDED, DT_VERSYM and the chain of DT_VERNEED.
#include "model/elf_openmp.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace untorch {
namespace {

constexpr std::pair<std::string_view, std::string_view> kPrefixes[] = {
    {"GOMP_", "UTMP_"}, {"GOACC_", "UTACC_"}, {"omp_", "utp_"}, {"__kmpc_", "utkmpc_"}, {"kmp_", "utk_"}};

bool is_openmp_library(std::string_view name) noexcept {
  return name.starts_with("libgomp") || name.starts_with("libomp.") || name.starts_with("libomp-") ||
         name.starts_with("libiomp");
}

template <class T>
void put(std::span<std::byte> copy, std::uint64_t offset, const T& value) {
  std::memcpy(copy.data() + offset, &value, sizeof value);
}

// A symbol's version becomes "any" where it is one of the runtime's.
void clear_versions(const ElfImage& elf, std::span<std::byte> copy) {
  std::vector<std::uint16_t> of_runtime;
  for (const ElfVersionNeed& need : elf.version_needs()) {
    if (is_openmp_library(need.file)) of_runtime.push_back(need.index);
  }
  const std::uint64_t indices = elf.offset_of(elf.tag(DT_VERSYM), 2 * elf.num_symbols(), "a symbol version");
  for (std::uint64_t i = 1; i < elf.num_symbols(); ++i) {
    const Elf64_Sym symbol = elf.symbol(i);
    const auto version = static_cast<std::uint16_t>(elf.at<std::uint16_t>(indices + 2 * i) & 0x7fffu);
    if (symbol.st_shndx != SHN_UNDEF || version <= VER_NDX_GLOBAL) continue;
    if (std::ranges::find(of_runtime, version) == of_runtime.end()) continue;
    put(copy, indices + 2 * i, static_cast<std::uint16_t>(VER_NDX_GLOBAL));
  }
}

// The dynamic linker would look for the versions in the library of that name.
void unlink_version_needs(const ElfImage& elf, std::span<std::byte> copy) {
  struct Record {
    std::uint64_t address, offset;
    Elf64_Verneed need;
  };
  std::vector<Record> kept;
  std::size_t removed = 0;
  for (std::uint64_t address = elf.tag(DT_VERNEED);;) {
    const std::uint64_t offset = elf.offset_of(address, sizeof(Elf64_Verneed), "a symbol version");
    const auto need = elf.at<Elf64_Verneed>(offset);
    if (is_openmp_library(elf.string(need.vn_file))) {
      ++removed;
    } else {
      kept.push_back({address, offset, need});
    }
    if (need.vn_next == 0) break;
    address += need.vn_next;
  }
  if (removed == 0) return;
  if (kept.empty()) {
    throw_error(ErrorKind::kUnsupported, elf.name(), " takes nothing with a version but from an OpenMP library");
  }
  for (std::size_t i = 0; i < kept.size(); ++i) {
    Elf64_Verneed need = kept[i].need;
    need.vn_next = i + 1 < kept.size() ? static_cast<Elf64_Word>(kept[i + 1].address - kept[i].address) : 0;
    put(copy, kept[i].offset, need);
  }
  const Elf64_Phdr& section = *elf.segment(PT_DYNAMIC);
  for (std::uint64_t i = 0; i < section.p_filesz / sizeof(Elf64_Dyn); ++i) {
    const std::uint64_t offset = section.p_offset + i * sizeof(Elf64_Dyn);
    auto entry = elf.at<Elf64_Dyn>(offset);
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag == DT_VERNEED) {
      entry.d_un.d_ptr = kept.front().address;
    } else if (entry.d_tag == DT_VERNEEDNUM) {
      entry.d_un.d_val = kept.size();
    } else {
      continue;
    }
    put(copy, offset, entry);
  }
}

}  // namespace

std::string own_openmp_name(std::string_view symbol) {
  for (const auto& [theirs, ours] : kPrefixes) {
    if (symbol.starts_with(theirs)) return std::string(ours) + std::string(symbol.substr(theirs.size()));
  }
  return {};
}

bool needs_openmp(const ElfImage& elf) noexcept {
  return std::ranges::any_of(elf.needed(),
                             [](const ElfImage::Needed& needed) { return is_openmp_library(needed.name); });
}

void rebind_openmp(const ElfImage& elf, std::span<std::byte> copy, const std::string& soname) {
  if (elf.has(DT_VERSYM) && elf.has(DT_VERNEED)) {
    clear_versions(elf, copy);
    unlink_version_needs(elf, copy);
  }
  const auto value_of = [](std::span<const std::byte> bytes, const ElfImage::Needed& needed) {
    std::uint64_t value = 0;  // the name's offset in the string table
    std::memcpy(&value, bytes.data() + needed.entry_offset + offsetof(Elf64_Dyn, d_un), sizeof value);
    return value;
  };
  std::optional<std::uint64_t> host;
  for (const ElfImage::Needed& needed : elf.needed()) {
    const std::uint64_t strings = needed.string_offset - value_of(elf.bytes(), needed), value = value_of(copy, needed);
    const char* const name = reinterpret_cast<const char*>(copy.data()) + strings + value;
    if (soname == name) host = value;
  }
  if (!host) return;
  for (const ElfImage::Needed& needed : elf.needed()) {
    if (is_openmp_library(needed.name)) put(copy, needed.entry_offset + offsetof(Elf64_Dyn, d_un), *host);
  }
}

}  // namespace untorch
