// The bytes of a .pt2 file: mapped, copied into memory, or lent by the caller.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/watched_mapping.h"

namespace untorch {

// Read-only, shared by everything that points into it.
class MappedFile {
 public:
  // Maps the file, or with `copy` reads it into memory, which nothing that happens to the file changes. Opens regular
  // files only and never waits. kInvalidFile with the errno where the system refuses; kOutOfMemory.
  static std::shared_ptr<const MappedFile> open(const std::string& path, bool copy = false);
  // The contents of a file that the caller holds: in place, until `release` is called, or copied (then it is called
  // before this returns). In place only for bytes that nobody changes.
  static std::shared_ptr<const MappedFile> of_memory(std::span<const std::byte> bytes, bool copy,
                                                     std::function<void()> release);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  // For messages; "<memory>" where there is none.
  const std::string& path() const noexcept { return path_; }
  // Device, inode and time of change: the same text for the same contents.
  const std::string& identity() const noexcept { return identity_; }
  // Throws kInvalidFile if reads found that the file was truncated. Readers ask afterwards.
  void check_whole() const {
    if (watch_ && watch_->truncated()) [[unlikely]]
      fail_truncated();
  }

 private:
  MappedFile(std::string path, std::string identity) : path_(std::move(path)), identity_(std::move(identity)) {}
  [[noreturn]] void fail_truncated() const;
  // Memory of its own, to be filled.
  std::byte* allocate(std::size_t size);
  void protect() const noexcept;

  std::string path_, identity_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  bool mapped_ = false;  // to be unmapped
  std::unique_ptr<WatchedMapping> watch_;
  std::function<void()> release_;
};

}  // namespace untorch
