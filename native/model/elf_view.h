// The image of a shared library as the dynamic linker will see it: addresses, segments, the dynamic section.
#pragma once

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace untorch {

class ElfView {
 public:
  // Reads and checks the program headers and the dynamic section.
  ElfView(std::span<const std::byte> bytes, const std::string& name);

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
  // A string of the dynamic string table; its end was checked.
  const char* string(std::uint64_t offset) const;

  std::span<const std::byte> bytes() const noexcept { return bytes_; }
  const Elf64_Ehdr& header() const noexcept { return header_; }
  const std::vector<Elf64_Phdr>& segments() const noexcept { return segments_; }
  const std::vector<std::uint64_t>& needed() const noexcept { return needed_; }
  const Elf64_Phdr* segment(std::uint32_t type) const noexcept;

 private:
  void read_segments();
  void read_dynamic();

  std::span<const std::byte> bytes_;
  const std::string& name_;
  Elf64_Ehdr header_{};
  std::vector<Elf64_Phdr> segments_, loads_;
  std::map<std::int64_t, std::uint64_t> dynamic_;
  std::vector<std::uint64_t> needed_;  // string offsets
  std::uint64_t strings_ = 0, strings_size_ = 0;
};

}  // namespace untorch
