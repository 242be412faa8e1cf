// ElfImage: the reader of ELF shared libraries. Bounds-checked views of segments, dynamic section, symbols, versions.
#pragma once

#include <elf.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace untorch {

// A global or weak symbol of the dynamic symbol table.
struct ElfSymbol {
  std::string_view name;
  std::uint64_t name_offset;  // in the file
  bool is_defined, is_weak;
  const char* version = nullptr;  // of an undefined, versioned symbol
  const char* version_file = nullptr;
  std::uint64_t version_offset = 0;  // of its entry in DT_VERSYM, in the file; 0: none
};

// A version that the library needs of another one.
struct ElfVersionNeed {
  std::uint16_t index;  // in DT_VERSYM
  const char* file;
  const char* name;
};

// A 64-bit little-endian shared library of any machine, as the dynamic linker sees it: program headers and dynamic
// section, so that a stripped library is read, too. What it takes for granted beyond that is checked by
// check_elf_image. Layouts: System V gABI chapters 4 and 5, GNU symbol versioning (Linux Standard Base).
class ElfImage {
 public:
  // Throws kInvalidFile, naming `name`, where an offset leaves the file. `bytes` must outlive it.
  ElfImage(std::span<const std::byte> bytes, std::string name);

  const std::string& name() const noexcept { return name_; }
  std::span<const std::byte> bytes() const noexcept { return bytes_; }
  const Elf64_Ehdr& header() const noexcept { return header_; }

  [[noreturn]] void damaged(const std::string& why) const {
    throw_error(ErrorKind::kInvalidFile, name_, " is no usable shared library: ", why);
  }
  void require(bool condition, const char* why) const {
    if (!condition) [[unlikely]]
      damaged(why);
  }
  template <class T>
  T at(std::uint64_t offset) const {
    require(offset <= bytes_.size() && sizeof(T) <= bytes_.size() - offset, "an offset points outside of the file");
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof value);
    return value;
  }

  // Segments in the order of the program headers, and the first of a type (null: none).
  const std::vector<Elf64_Phdr>& segments() const noexcept { return segments_; }
  const Elf64_Phdr* segment(std::uint32_t type) const noexcept;
  // The loadable segment that holds [address, address + size) with these PF_ flags; null when there is none. in_file:
  // all of it must come from the file, not from the zeroed rest.
  const Elf64_Phdr* find(std::uint64_t address, std::uint64_t size, std::uint32_t flags, bool in_file) const noexcept;
  // File offset of readable bytes at an address.
  std::uint64_t offset_of(std::uint64_t address, std::uint64_t size, const char* what) const;
  template <class T>
  T value_at(std::uint64_t address, const char* what) const {
    return at<T>(offset_of(address, sizeof(T), what));
  }
  bool executable(std::uint64_t address) const noexcept { return find(address, 1, PF_X, true) != nullptr; }

  bool has(std::int64_t tag) const noexcept { return dynamic_.count(tag) != 0; }
  // The last entry of that tag, as the dynamic linker takes it; 0 when there is none.
  std::uint64_t tag(std::int64_t tag) const noexcept {
    const auto it = dynamic_.find(tag);
    return it == dynamic_.end() ? 0 : it->second;
  }
  // A string of the dynamic string table, which ends in the table.
  const char* string(std::uint64_t offset) const;

  struct Needed {
    std::uint64_t entry_offset;   // of the dynamic entry, in the file
    std::uint64_t string_offset;  // of the name, in the file
    const char* name;
  };
  const std::vector<Needed>& needed() const noexcept { return needed_; }
  bool needs(std::string_view soname) const noexcept;

  // Entries of the dynamic symbol table; the first is unused. The hash tables tell their number.
  std::uint64_t num_symbols() const noexcept { return num_symbols_; }
  // The symbol of that name that the library defines for others; none if there is no such symbol.
  std::optional<Elf64_Sym> find_defined(std::string_view name) const;
  std::uint64_t symbol_offset(std::uint64_t index) const noexcept { return symbols_ + index * sizeof(Elf64_Sym); }
  Elf64_Sym symbol(std::uint64_t index) const { return at<Elf64_Sym>(symbol_offset(index)); }
  // Those that other libraries can see, or that other libraries have to give.
  std::vector<ElfSymbol> symbols() const;
  std::vector<ElfVersionNeed> version_needs() const;

 private:
  void read_segments();
  void read_dynamic();
  void read_symbols();
  std::uint64_t gnu_hash_symbols(std::uint64_t address) const;

  std::span<const std::byte> bytes_;
  std::string name_;
  Elf64_Ehdr header_{};
  std::vector<Elf64_Phdr> segments_, loads_;
  std::map<std::int64_t, std::uint64_t> dynamic_;
  std::vector<Needed> needed_;
  std::uint64_t strings_ = 0, strings_size_ = 0;
  std::uint64_t symbols_ = 0, num_symbols_ = 0;
};

// e_machine codes by name: "x86_64", "aarch64", "machine 999".
std::string elf_machine_name(std::uint16_t machine);
// Throws kUnsupported for a library of another machine than this one.
void check_elf_machine(const ElfImage& elf);

}  // namespace untorch
