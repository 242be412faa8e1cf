// The .pt2 file, read: a zip archive of stored entries, mapped into memory. Nothing in it is trusted.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace untorch {

// A whole file, mapped read-only. Shared by everything that points into it.
class MappedFile {
 public:
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  const std::string& path() const noexcept { return path_; }
  // Device, inode and time of change: the same text for the same contents.
  const std::string& identity() const noexcept { return identity_; }

 private:
  MappedFile(std::string path, std::string identity, const std::byte* data, std::size_t size)
      : path_(std::move(path)), identity_(std::move(identity)), data_(data), size_(size) {}
  std::string path_, identity_;
  const std::byte* data_;
  std::size_t size_;
};

class Archive {
 public:
  // Reads the directory of the archive. Refuses compressed or encrypted entries, names that leave the archive,
  // duplicate names, overlapping entries, and offsets and sizes that do not fit the file (kInvalidFile, naming the file
  // and the entry).
  explicit Archive(std::shared_ptr<const MappedFile> file);

  const std::shared_ptr<const MappedFile>& file() const noexcept { return file_; }
  // Names without the archive's top folder.
  std::vector<std::string> names() const;
  bool contains(std::string_view name) const noexcept { return entries_.find(name) != entries_.end(); }
  // Bytes of an entry; kInvalidFile when there is none.
  std::span<const std::byte> read(std::string_view name) const;
  // The same, with the checksum compared: for what is read whole anyway. Weights are not, they are used in place.
  std::span<const std::byte> read_checked(std::string_view name) const;
  std::string_view text(std::string_view name) const;  // checked

 private:
  struct Entry {
    std::uint64_t header_offset, size;
    std::uint32_t checksum;
  };
  std::shared_ptr<const MappedFile> file_;
  std::uint64_t directory_offset_ = 0;
  std::string prefix_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace untorch
