// The .pt2 file, read: a zip archive of stored entries. The one reader of it; nothing in it is trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fork.h"
#include "base/sha256.h"
#include "model/mapped_file.h"

namespace untorch {

struct ArchiveEntry {
  std::uint64_t offset = 0, size = 0;  // of its bytes, in the file
  std::uint32_t crc = 0;
};

// The expected SHA-256 of an entry: of all of it, or of each block of `block_bytes` (the last one may be shorter).
struct EntryDigest {
  std::uint64_t block_bytes = 0;  // 0: of all of it
  std::vector<Sha256Digest> digests;
  const char* source = "";  // who says so, for messages: "the manifest"
  bool trusted = false;     // a trust policy says so: another digest is kUntrusted
};

class Archive {
 public:
  // Reads the whole directory. Every byte of the file is accounted for once: entries one after the other from the first
  // byte on, the directory behind the last one, the end record behind it. Each local header says what the directory
  // says. Names are plain UTF-8 in one top folder, and no two are equal. Throws kInvalidFile, naming file and entry.
  explicit Archive(std::shared_ptr<const MappedFile> file);

  const std::shared_ptr<const MappedFile>& file() const noexcept { return file_; }
  const std::string& root() const noexcept { return root_; }
  // By name, without the top folder.
  const std::map<std::string, ArchiveEntry, std::less<>>& entries() const noexcept { return entries_; }
  bool contains(std::string_view name) const noexcept { return entries_.find(name) != entries_.end(); }
  // kInvalidFile when there is none.
  const ArchiveEntry& entry(std::string_view name) const;

  // The bytes in place, not compared with anything; the file's check_whole() says afterwards whether they were there.
  std::span<const std::byte> read(std::string_view name) const;
  // A copy that nothing changes, compared with the checksums and kept as long as the archive: for descriptions.
  std::string_view text(std::string_view name) const;

  // What the entry's bytes must be when they are next compared, beside what is expected already. Thread-safe.
  void expect(std::string_view name, EntryDigest digest) const;
  // Compares all of an entry's bytes, as somebody took them from the file: with its digests, or with its CRC-32 where
  // there are none. Throws kInvalidFile.
  void check(std::string_view name, std::span<const std::byte> bytes) const;
  // The same for block `index` of an entry that has digests of blocks: for who copies a weight block by block.
  void check_block(std::string_view name, const EntryDigest& digest, std::size_t index,
                   std::span<const std::byte> block) const;
  // All entries, on several threads (0: as many as there are cores, at most eight).
  void verify(unsigned threads) const;
  // The SHA-256 of every entry as it is now, in the order of entries(), on several threads.
  std::vector<Sha256Digest> digests(unsigned threads) const;

 private:
  std::vector<EntryDigest> expected_of(std::string_view name) const;
  [[noreturn]] void damaged(std::string_view name, const std::string& why) const;

  std::shared_ptr<const MappedFile> file_;
  std::string root_;
  std::map<std::string, ArchiveEntry, std::less<>> entries_;
  mutable fork::Mutex expected_mutex_, texts_mutex_;
  mutable std::map<std::string, std::vector<EntryDigest>, std::less<>> expected_;
  mutable std::map<std::string, std::string, std::less<>> texts_;
};

}  // namespace untorch
