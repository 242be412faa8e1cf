// Mapping and the zip directory (APPNOTE 6.3.10: end record, its zip64 form, central and local headers).
#include "model/archive.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "model/bytes.h"

namespace untorch {
namespace {

constexpr std::uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEndRecord = 0x06054b50,
                        kEnd64Record = 0x06064b50, kEnd64Locator = 0x07064b50;
constexpr std::size_t kEndSize = 22, kCentralSize = 46, kLocalSize = 30, kEnd64Size = 56, kLocatorSize = 20;

// Little-endian reads with the bounds checked.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, const std::string& path) : bytes_(bytes), path_(path) {}
  std::uint64_t size() const noexcept { return bytes_.size(); }

  template <class T>
  T at(std::uint64_t offset) const {
    require(offset, sizeof(T));
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof value);
    return value;
  }

  std::string_view text(std::uint64_t offset, std::size_t length) const {
    require(offset, length);
    return {reinterpret_cast<const char*>(bytes_.data() + offset), length};
  }

  void require(std::uint64_t offset, std::uint64_t length) const {
    if (offset > size() || length > size() - offset) {
      throw_error(ErrorKind::kInvalidFile, path_, " is damaged: its zip directory points outside of the file (offset ",
                  offset, ", length ", length, ", file size ", size(), ")");
    }
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& path_;
};

struct Directory {
  std::uint64_t offset, size, entries;
};

Directory find_directory(const Reader& reader, const std::string& path) {
  if (reader.size() < kEndSize) {
    throw_error(ErrorKind::kInvalidFile, path, " is no .pt2 file: ", reader.size(),
                " bytes are too few for a zip archive");
  }
  // The end record lies before a comment of up to 65,535 bytes.
  const std::uint64_t last = reader.size() - kEndSize;
  const std::uint64_t first = last > 0xffff ? last - 0xffff : 0;
  for (std::uint64_t at = last + 1; at-- > first;) {
    if (reader.at<std::uint32_t>(at) != kEndRecord) continue;
    if (at + kEndSize + reader.at<std::uint16_t>(at + 20) != reader.size()) continue;
    Directory directory{reader.at<std::uint32_t>(at + 16), reader.at<std::uint32_t>(at + 12),
                        reader.at<std::uint16_t>(at + 10)};
    const bool wide = directory.offset == 0xffffffff || directory.size == 0xffffffff || directory.entries == 0xffff;
    if (at >= kLocatorSize && reader.at<std::uint32_t>(at - kLocatorSize) == kEnd64Locator) {
      const auto end64 = reader.at<std::uint64_t>(at - kLocatorSize + 8);
      reader.require(end64, kEnd64Size);
      if (reader.at<std::uint32_t>(end64) != kEnd64Record) {
        throw_error(ErrorKind::kInvalidFile, path, " is damaged: its zip64 end record is missing");
      }
      directory = {reader.at<std::uint64_t>(end64 + 48), reader.at<std::uint64_t>(end64 + 40),
                   reader.at<std::uint64_t>(end64 + 32)};
    } else if (wide) {
      throw_error(ErrorKind::kInvalidFile, path, " is damaged: its zip64 locator is missing");
    }
    reader.require(directory.offset, directory.size);
    if (directory.entries > directory.size / kCentralSize) {
      throw_error(ErrorKind::kInvalidFile, path, " is damaged: its zip directory claims ", directory.entries,
                  " entries in ", directory.size, " bytes");
    }
    return directory;
  }
  throw_error(ErrorKind::kInvalidFile, path, " is no .pt2 file, or is cut off: it has no zip directory at its end");
}

// A hostile name as it can be shown: bytes that are no printable ASCII as question marks.
std::string printable(std::string_view name) {
  std::string text(name.substr(0, 200));
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return text;
}

void check_name(std::string_view name, const std::string& path) {
  bool bad = name.empty() || name.front() == '/' || name.find('\\') != std::string_view::npos ||
             name.find('\0') != std::string_view::npos || !is_utf8(name);
  for (std::size_t start = 0; start <= name.size() && !bad;) {
    const std::size_t end = std::min(name.find('/', start), name.size());
    const std::string_view part = name.substr(start, end - start);
    bad = part == ".." || part == "." || (part.empty() && end != name.size());
    start = end + 1;
  }
  if (bad)
    throw_error(ErrorKind::kInvalidFile, path, " is refused: entry name '", printable(name),
                "' leaves the archive or is no "
                "plain UTF-8 text");
}

// The zip64 extra field replaces each 32-bit value that is all ones, in this order.
void widen(const Reader& reader, std::uint64_t extra, std::uint16_t length, std::uint64_t& size, std::uint64_t& packed,
           std::uint64_t& offset) {
  const std::uint64_t end = extra + length;
  while (extra + 4 <= end) {
    const auto id = reader.at<std::uint16_t>(extra), bytes = reader.at<std::uint16_t>(extra + 2);
    std::uint64_t at = extra + 4;
    const std::uint64_t field_end = at + bytes;
    if (field_end > end) return;
    if (id == 1) {
      for (std::uint64_t* value : {&size, &packed, &offset}) {
        if (*value != 0xffffffff || at + 8 > field_end) continue;
        *value = reader.at<std::uint64_t>(at);
        at += 8;
      }
    }
    extra = field_end;
  }
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw_error(ErrorKind::kInvalidFile, "cannot open ", path, ": ", std::strerror(errno));
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0) {
    const bool regular = S_ISREG(info.st_mode), directory = S_ISDIR(info.st_mode);
    ::close(fd);
    if (directory) throw_error(ErrorKind::kInvalidFile, "cannot open ", path, ": ", std::strerror(EISDIR));
    throw_error(ErrorKind::kInvalidFile, path, regular ? " is empty" : " is no regular file");
  }
  const auto size = static_cast<std::size_t>(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (data == MAP_FAILED) throw_error(ErrorKind::kInvalidFile, "cannot map ", path, ": ", std::strerror(error));
  std::string identity = std::to_string(info.st_dev) + ":" + std::to_string(info.st_ino) + ":" + std::to_string(size) +
                         ":" + std::to_string(info.st_mtim.tv_sec) + "." + std::to_string(info.st_mtim.tv_nsec);
  return std::shared_ptr<const MappedFile>(
      new MappedFile(path, std::move(identity), static_cast<const std::byte*>(data), size));
}

MappedFile::~MappedFile() { munmap(const_cast<std::byte*>(data_), size_); }

Archive::Archive(std::shared_ptr<const MappedFile> file) : file_(std::move(file)) {
  const std::string& path = file_->path();
  const Reader reader(file_->bytes(), path);
  const Directory directory = find_directory(reader, path);
  directory_offset_ = directory.offset;
  std::map<std::string, Entry, std::less<>> all;
  struct Extent {
    std::uint64_t start, data, size;
    std::string name;
  };
  std::vector<Extent> extents;
  std::uint64_t at = directory.offset;
  for (std::uint64_t i = 0; i < directory.entries; ++i) {
    if (reader.at<std::uint32_t>(at) != kCentralHeader) {
      throw_error(ErrorKind::kInvalidFile, path, " is damaged: entry ", i, " of its zip directory has no header");
    }
    const auto flags = reader.at<std::uint16_t>(at + 8), method = reader.at<std::uint16_t>(at + 10);
    std::uint64_t packed = reader.at<std::uint32_t>(at + 20), size = reader.at<std::uint32_t>(at + 24),
                  offset = reader.at<std::uint32_t>(at + 42);
    const auto name_length = reader.at<std::uint16_t>(at + 28), extra_length = reader.at<std::uint16_t>(at + 30),
               comment_length = reader.at<std::uint16_t>(at + 32);
    const std::string name(reader.text(at + kCentralSize, name_length));
    reader.require(at + kCentralSize + name_length, extra_length);
    widen(reader, at + kCentralSize + name_length, extra_length, size, packed, offset);
    check_name(name, path);
    if ((flags & 1u) != 0) throw_error(ErrorKind::kInvalidFile, path, " is refused: entry '", name, "' is encrypted");
    if (method != 0 || packed != size) {
      throw_error(ErrorKind::kInvalidFile, path, " is refused: entry '", name,
                  "' is compressed; weights are used in place, so store entries without compression (zip -0)");
    }
    reader.require(offset, kLocalSize);
    if (!all.emplace(name, Entry{offset, size, reader.at<std::uint32_t>(at + 16)}).second) {
      throw_error(ErrorKind::kInvalidFile, path, " is refused: two entries are named '", name, "'");
    }
    at += kCentralSize + name_length + extra_length + comment_length;
    if (at - directory.offset > directory.size) {
      throw_error(ErrorKind::kInvalidFile, path, " is damaged: its zip directory is longer than its end record says");
    }
    extents.push_back({offset, offset + kLocalSize + name_length, size, name});
  }
  // Two names for the same bytes: nobody writes that by accident, and nobody may read it.
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.start < b.start; });
  for (std::size_t i = 0; i < extents.size(); ++i) {
    const std::uint64_t next = i + 1 < extents.size() ? extents[i + 1].start : directory.offset;
    if (extents[i].data > next || extents[i].size > next - extents[i].data) {
      throw_error(ErrorKind::kInvalidFile, path, " is damaged: entry '", extents[i].name, "' claims ", extents[i].size,
                  " bytes at offset ", extents[i].data, ", but ",
                  i + 1 < extents.size() ? "the next entry" : "the zip directory", " starts at ", next);
    }
  }
  // Everything lies in one top folder, whatever its name is.
  for (const auto& [name, entry] : all) {
    const std::size_t slash = name.find('/');
    if (slash == std::string::npos || (!prefix_.empty() && name.compare(0, prefix_.size(), prefix_) != 0)) {
      throw_error(ErrorKind::kInvalidFile, path, " is no .pt2 file: entry '", name,
                  "' is not in one top folder with the others");
    }
    if (prefix_.empty()) prefix_ = name.substr(0, slash + 1);
  }
  for (const auto& [name, entry] : all) {
    if (name.size() <= prefix_.size()) continue;
    const std::string inner = name.substr(prefix_.size());
    entries_.emplace(inner, entry);
    // Compares both headers: a damaged name in one of them must not make an entry, such as the manifest, another one.
    (void)read(inner);
  }
}

std::vector<std::string> Archive::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

std::span<const std::byte> Archive::read(std::string_view name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end())
    throw_error(ErrorKind::kInvalidFile, file_->path(), " has no entry '", std::string(name), "'");
  const Reader reader(file_->bytes(), file_->path());
  const Entry& entry = it->second;
  if (reader.at<std::uint32_t>(entry.header_offset) != kLocalHeader) {
    throw_error(ErrorKind::kInvalidFile, file_->path(), " is damaged: entry '", std::string(name),
                "' has no header at offset ", entry.header_offset);
  }
  const auto name_length = reader.at<std::uint16_t>(entry.header_offset + 26);
  const auto extra_length = reader.at<std::uint16_t>(entry.header_offset + 28);
  if (reader.text(entry.header_offset + kLocalSize, name_length) != prefix_ + std::string(name)) {
    throw_error(ErrorKind::kInvalidFile, file_->path(), " is damaged: the header at offset ", entry.header_offset,
                " is not that of entry '", std::string(name), "'");
  }
  const std::uint64_t data = entry.header_offset + kLocalSize + name_length + extra_length;
  if (data > directory_offset_ || entry.size > directory_offset_ - data) {
    throw_error(ErrorKind::kInvalidFile, file_->path(), " is damaged: entry '", std::string(name), "' claims ",
                entry.size, " bytes at offset ", data, ", past the zip directory at ", directory_offset_);
  }
  return file_->bytes().subspan(data, entry.size);
}

std::span<const std::byte> Archive::read_checked(std::string_view name) const {
  const auto bytes = read(name);
  const std::uint32_t expected = entries_.find(name)->second.checksum, found = crc32(bytes);
  if (found != expected) {
    throw_error(ErrorKind::kInvalidFile, file_->path(), " is damaged: the bytes of entry '", std::string(name),
                "' have another checksum than the archive says");
  }
  return bytes;
}

std::string_view Archive::text(std::string_view name) const {
  const auto bytes = read_checked(name);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace untorch
