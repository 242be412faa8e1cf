// Names and digests; zip_directory.cpp reads the structure.
#include "model/archive.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <list>
#include <mutex>

#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "model/bytes.h"
#include "model/zip_directory.h"

namespace untorch {
namespace {

constexpr std::size_t kMaxName = 1024;

void check_name(std::string_view name, const std::string& path) {
  bool bad = name.empty() || name.size() > kMaxName || name.find('\\') != std::string_view::npos || !is_utf8(name) ||
             escape_controls(name, false) != name;
  for (std::size_t start = 0; start <= name.size() && !bad;) {
    const std::size_t end = std::min(name.find('/', start), name.size());
    const std::string_view part = name.substr(start, end - start);
    bad = part.empty() || part == ".." || part == ".";
    start = end + 1;
  }
  if (bad) {
    std::string shown = escape_controls(name.substr(0, 200), false);
    if (!is_utf8(shown)) std::ranges::replace_if(shown, [](char c) { return c < 0x20 || c > 0x7e; }, '?');
    throw_error(ErrorKind::kInvalidFile, path, " is refused: entry name '", shown,
                "' leaves the archive or is no plain UTF-8 text");
  }
}

std::string hex(std::uint32_t value) {
  char text[9];
  (void)std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

}  // namespace

Archive::Archive(std::shared_ptr<const MappedFile> file) : file_(std::move(file)) {
  const std::string& path = file_->path();
  for (const ZipEntry& entry : read_zip_directory(*file_)) {
    check_name(entry.name, path);
    const std::size_t slash = entry.name.find('/');
    if (slash == std::string_view::npos || (!root_.empty() && entry.name.substr(0, slash) != root_)) {
      throw_error(ErrorKind::kInvalidFile, path, " is no .pt2 file: entry '", entry.name,
                  "' is not in one top folder with the others");
    }
    root_ = entry.name.substr(0, slash);
    if (!entries_.emplace(entry.name.substr(slash + 1), ArchiveEntry{entry.offset, entry.size, entry.crc}).second) {
      throw_error(ErrorKind::kInvalidFile, path, " is refused: two entries are named '", entry.name, "'");
    }
  }
}

const ArchiveEntry& Archive::entry(std::string_view name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) {
    throw_error(ErrorKind::kInvalidFile, file_->path(), " has no entry '", name, "'");
  }
  return it->second;
}

std::span<const std::byte> Archive::read(std::string_view name) const {
  const ArchiveEntry& found = entry(name);
  return file_->bytes().subspan(found.offset, found.size);
}

std::string_view Archive::text(std::string_view name) const {
  const std::lock_guard lock(texts_mutex_);
  const auto it = texts_.find(name);
  if (it != texts_.end()) return it->second;
  const auto bytes = read(name);
  std::string copy(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  file_->check_whole();
  check(name, std::as_bytes(std::span(copy)));
  return texts_.emplace(name, std::move(copy)).first->second;
}

void Archive::expect(std::string_view name, EntryDigest digest) const {
  const std::uint64_t size = entry(name).size;
  const std::uint64_t blocks =
      digest.block_bytes == 0 ? 1 : size / digest.block_bytes + (size % digest.block_bytes != 0 ? 1 : 0);
  if (digest.digests.size() != blocks) {
    throw_error(ErrorKind::kInvalidFile, file_->path(), ": ", digest.source, " has ", digest.digests.size(),
                " digests for the ", blocks, " blocks of entry '", name, "'");
  }
  const std::lock_guard lock(expected_mutex_);
  expected_[std::string(name)].push_back(std::move(digest));
}

std::vector<EntryDigest> Archive::expected_of(std::string_view name) const {
  const std::lock_guard lock(expected_mutex_);
  const auto it = expected_.find(name);
  return it == expected_.end() ? std::vector<EntryDigest>() : it->second;
}

void Archive::damaged(std::string_view name, const std::string& why) const {
  file_->check_whole();  // says more
  throw_error(ErrorKind::kInvalidFile, file_->path(), " is damaged: entry '", name, "' ", why);
}

void Archive::check_block(std::string_view name, const EntryDigest& digest, std::size_t index,
                          std::span<const std::byte> block) const {
  const Sha256Digest found = sha256(block), &expected = digest.digests.at(index);
  if (found == expected) return;
  if (digest.trusted) {
    throw_error(ErrorKind::kUntrusted, file_->path(), ": the bytes of entry '", name,
                "' are not those that a trust policy accepted at load: the file was written to since; they were not "
                "used: write a new file and rename it instead");
  }
  damaged(name, (digest.block_bytes == 0 ? "" : "in block " + std::to_string(index) + " ") + "has the SHA-256 " +
                    to_hex(found) + ", " + digest.source + " says " + to_hex(expected));
}

void Archive::check(std::string_view name, std::span<const std::byte> bytes) const {
  const ArchiveEntry& found = entry(name);
  if (bytes.size() != found.size) damaged(name, "has another size than the zip directory says");
  const std::vector<EntryDigest> expected = expected_of(name);
  if (expected.empty()) {
    const std::uint32_t crc = crc32(bytes);
    if (crc != found.crc) damaged(name, "has the checksum " + hex(crc) + ", the zip directory says " + hex(found.crc));
    return;
  }
  for (const EntryDigest& digest : expected) {
    const std::uint64_t step = digest.block_bytes == 0 ? bytes.size() : digest.block_bytes;
    for (std::size_t i = 0; i < digest.digests.size(); ++i) {
      const std::uint64_t start = i * step;
      check_block(name, digest, i, bytes.subspan(start, std::min<std::uint64_t>(step, bytes.size() - start)));
    }
  }
}

void Archive::verify(unsigned threads) const {
  // A piece is what one thread checks at a time: a block of an entry that has digests of blocks, else an entry.
  struct Piece {
    std::string_view name;
    std::span<const std::byte> bytes;
    const EntryDigest* digest;  // null: all that check() compares
    std::size_t index;
  };
  std::vector<Piece> pieces;
  std::list<EntryDigest> in_blocks;
  for (const auto& [name, found] : entries_) {
    const auto bytes = read(name);
    std::vector<EntryDigest> expected = expected_of(name);
    if (expected.size() != 1 || expected.front().block_bytes == 0) {
      pieces.push_back({name, bytes, nullptr, 0});
      continue;
    }
    const EntryDigest& digest = in_blocks.emplace_back(std::move(expected.front()));
    for (std::size_t i = 0; i < digest.digests.size(); ++i) {
      const std::uint64_t start = i * digest.block_bytes;
      pieces.push_back(
          {name, bytes.subspan(start, std::min<std::uint64_t>(digest.block_bytes, bytes.size() - start)), &digest, i});
    }
  }
  std::ranges::stable_sort(pieces, std::greater<>{}, [](const Piece& piece) { return piece.bytes.size(); });
  for_each_parallel(pieces.size(), threads, [&](std::size_t i) {
    const Piece& piece = pieces[i];
    if (piece.digest != nullptr) {
      check_block(piece.name, *piece.digest, piece.index, piece.bytes);
    } else {
      check(piece.name, piece.bytes);
    }
  });
  file_->check_whole();
}

std::vector<Sha256Digest> Archive::digests(unsigned threads) const {
  std::vector<std::pair<std::size_t, const ArchiveEntry*>> order;
  for (const auto& [name, found] : entries_) order.emplace_back(order.size(), &found);
  std::ranges::stable_sort(order, std::greater<>{}, [](const auto& item) { return item.second->size; });
  std::vector<Sha256Digest> out(order.size());
  for_each_parallel(order.size(), threads, [&](std::size_t i) {
    const auto& [index, found] = order[i];
    out[index] = sha256(file_->bytes().subspan(found->offset, found->size));
  });
  file_->check_whole();
  return out;
}

}  // namespace untorch
