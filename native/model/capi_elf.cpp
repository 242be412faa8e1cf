// capi.h, the part that reads shared libraries.
#include "model/capi.h"

#include <cstring>
#include <memory>
#include <vector>

#include "model/capi_handles.h"
#include "model/elf.h"

namespace {

// What the C struct points to; its first base, so that a pointer to one is a pointer to the other.
struct ReadElf : untorch_elf {
  explicit ReadElf(const untorch::ElfImage& elf)
      : untorch_elf{}, machine_text(untorch::elf_machine_name(elf.header().e_machine)) {
    machine = machine_text.c_str();
    if (elf.has(DT_SONAME)) soname = elf.string(elf.tag(DT_SONAME));
    // Names may overlap in the string table, so a small file can give much text.
    std::uint64_t left = 4 * elf.bytes().size();
    const auto take = [&](const char* text) {
      const std::size_t length = text != nullptr ? std::strlen(text) : 0;
      elf.require(length <= left, "its names overlap");
      left -= length;
    };
    take(soname);
    for (const untorch::ElfImage::Needed& library : elf.needed()) {
      take(library.name);
      needed_list.push_back(library.name);
    }
    needed = needed_list.data();
    num_needed = needed_list.size();
    for (const untorch::ElfSymbol& s : elf.symbols()) {
      take(s.version);
      take(s.version_file);
      symbol_list.push_back({s.name.data(), s.version, s.version_file, s.is_defined ? 1 : 0, s.is_weak ? 1 : 0});
    }
    symbols = symbol_list.data();
    num_symbols = symbol_list.size();
    for (const untorch::ElfVersionNeed& need : elf.version_needs()) {
      take(need.file);
      take(need.name);
      version_list.push_back({need.file, need.name});
    }
    versions = version_list.data();
    num_versions = version_list.size();
  }

  std::string machine_text;
  std::vector<const char*> needed_list;
  std::vector<untorch_elf_symbol> symbol_list;
  std::vector<untorch_elf_version> version_list;
};

}  // namespace

extern "C" {

untorch_status untorch_elf_read(const void* bytes, size_t length, const char* name, const untorch_elf** out) {
  return untorch::capi::guarded([&] {
    untorch::check(name != nullptr && out != nullptr, "untorch_elf_read: name and out must not be null");
    const untorch::ElfImage elf({static_cast<const std::byte*>(bytes), length}, name);
    *out = std::make_unique<ReadElf>(elf).release();
  });
}

void untorch_elf_free(const untorch_elf* elf) { delete static_cast<const ReadElf*>(elf); }

}  // extern "C"
