// A copy of a library in an anonymous memory file, which the dynamic linker opens.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace untorch {

// Filled, checked and rewritten through bytes(), then sealed: nobody changes it afterwards.
class MemoryFile {
 public:
  // A copy of `contents`; `name` is for messages. kOutOfMemory, or kSystem where no file can be
  // opened.
  MemoryFile(std::span<const std::byte> contents, std::string name);
  ~MemoryFile();
  MemoryFile(MemoryFile&& other) noexcept;
  MemoryFile& operator=(MemoryFile&&) = delete;

  const std::string& name() const noexcept { return name_; }
  int descriptor() const noexcept { return fd_; }
  std::span<std::byte> bytes() noexcept { return {data_, size_}; }
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  // From now on bytes() must not be written, at the same address; the file cannot be.
  void seal();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::string name_;
  int fd_ = -1;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace untorch
