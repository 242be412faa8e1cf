// End records first, then the directory from its start to its end, with the local headers beside it.
#include "model/zip_directory.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/text.h"

namespace untorch {
namespace {

constexpr std::uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEndRecord = 0x06054b50,
                        kEnd64Record = 0x06064b50, kEnd64Locator = 0x07064b50, kDescriptor = 0x08074b50;
constexpr std::size_t kEndSize = 22, kCentralSize = 46, kLocalSize = 30, kEnd64Size = 56, kLocatorSize = 20;
constexpr std::uint16_t kEncrypted = 1u << 0, kHasDescriptor = 1u << 3, kUtf8 = 1u << 11;
constexpr std::uint16_t kZip64Extra = 0x0001, kPaddingExtra = 0x4246;  // "FB": PyTorch's, and ours
constexpr std::uint16_t kZip64Version = 45;
constexpr std::uint32_t kElsewhere = 0xffffffff;  // in the zip64 field
constexpr std::uint64_t kMaxEntries = 1u << 20;

class Reader {
 public:
  explicit Reader(const MappedFile& file) : bytes_(file.bytes()), path_(file.path()) {}
  std::uint64_t size() const noexcept { return bytes_.size(); }

  // Little-endian, with the bounds checked.
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
    if (offset > size() || length > size() - offset) [[unlikely]] {
      damaged("its zip directory points outside of the file (offset ", offset, ", length ", length, ", file size ",
              size(), ")");
    }
  }
  template <class... Parts>
  [[noreturn]] void damaged(Parts&&... parts) const {
    throw_error(ErrorKind::kInvalidFile, path_, " is damaged: ", std::forward<Parts>(parts)...);
  }
  const std::string& path() const noexcept { return path_; }

 private:
  std::span<const std::byte> bytes_;
  const std::string& path_;
};

struct Directory {
  std::uint64_t offset, size, entries;
};

// A value of the end record against the same of the zip64 end record: equal, or said to be there.
bool agrees(std::uint64_t narrow, std::uint64_t wide, std::uint64_t elsewhere) {
  return narrow == wide || narrow == elsewhere;
}

Directory find_directory(const Reader& reader) {
  if (reader.size() < kEndSize) {
    throw_error(ErrorKind::kInvalidFile, reader.path(), " is no .pt2 file: ", reader.size(),
                " bytes are too few for a zip archive");
  }
  const std::uint64_t end = reader.size() - kEndSize;
  if (reader.at<std::uint32_t>(end) != kEndRecord || reader.at<std::uint16_t>(end + 20) != 0) {
    throw_error(ErrorKind::kInvalidFile, reader.path(),
                " is no .pt2 file, or is cut off: it does not end with a zip directory without a comment");
  }
  const auto disk = reader.at<std::uint16_t>(end + 4), first_disk = reader.at<std::uint16_t>(end + 6);
  const auto here = reader.at<std::uint16_t>(end + 8);
  Directory directory{reader.at<std::uint32_t>(end + 16), reader.at<std::uint32_t>(end + 12),
                      reader.at<std::uint16_t>(end + 10)};
  if (disk != 0 || first_disk != 0 || here != directory.entries) reader.damaged("it is a part of a split zip archive");
  const Directory narrow = directory;
  std::uint64_t end_of_directory = end;
  if (end >= kLocatorSize && reader.at<std::uint32_t>(end - kLocatorSize) == kEnd64Locator) {
    const std::uint64_t locator = end - kLocatorSize;
    const auto record = reader.at<std::uint64_t>(locator + 8);
    if (reader.at<std::uint32_t>(locator + 4) != 0 || reader.at<std::uint32_t>(locator + 16) != 1) {
      reader.damaged("it is a part of a split zip archive");
    }
    if (locator < kEnd64Size || record != locator - kEnd64Size || reader.at<std::uint32_t>(record) != kEnd64Record ||
        reader.at<std::uint64_t>(record + 4) != kEnd64Size - 12) {
      reader.damaged("its zip64 end record is not right before the zip64 locator");
    }
    directory = {reader.at<std::uint64_t>(record + 48), reader.at<std::uint64_t>(record + 40),
                 reader.at<std::uint64_t>(record + 32)};
    if (reader.at<std::uint32_t>(record + 16) != 0 || reader.at<std::uint32_t>(record + 20) != 0 ||
        reader.at<std::uint64_t>(record + 24) != directory.entries) {
      reader.damaged("it is a part of a split zip archive");
    }
    if (!agrees(narrow.offset, directory.offset, kElsewhere) || !agrees(narrow.size, directory.size, kElsewhere) ||
        !agrees(narrow.entries, directory.entries, 0xffff)) {
      reader.damaged("its end record and its zip64 end record differ");
    }
    end_of_directory = record;
  } else if (narrow.offset == kElsewhere || narrow.size == kElsewhere || narrow.entries == 0xffff) {
    reader.damaged("its zip64 locator is missing");
  }
  if (directory.offset > end_of_directory || directory.size != end_of_directory - directory.offset) {
    reader.damaged("its zip directory (", directory.size, " bytes at offset ", directory.offset,
                   ") does not end at its end record at ", end_of_directory);
  }
  if (directory.entries > directory.size / kCentralSize || directory.entries > kMaxEntries) {
    reader.damaged("its zip directory claims ", directory.entries, " entries in ", directory.size, " bytes");
  }
  return directory;
}

// What one of an entry's two headers says; both have these fields, at other places.
struct Header {
  std::uint16_t needed, flags, method, time, date;
  std::uint32_t crc;
  std::uint64_t packed, size;
};

Header read_header(const Reader& reader, std::uint64_t at) {
  return {reader.at<std::uint16_t>(at),      reader.at<std::uint16_t>(at + 2), reader.at<std::uint16_t>(at + 4),
          reader.at<std::uint16_t>(at + 6),  reader.at<std::uint16_t>(at + 8), reader.at<std::uint32_t>(at + 10),
          reader.at<std::uint32_t>(at + 14), reader.at<std::uint32_t>(at + 18)};
}

class EntryReader {
 public:
  EntryReader(const Reader& reader, std::uint64_t at, std::uint64_t start) : reader_(reader), at_(at), start_(start) {}

  // The entry whose directory header is at `at` and whose local header is at `start`.
  ZipEntry read() {
    if (reader_.at<std::uint32_t>(at_) != kCentralHeader) {
      reader_.damaged("its zip directory has no header at offset ", at_);
    }
    const auto name_length = reader_.at<std::uint16_t>(at_ + 28), extra_length = reader_.at<std::uint16_t>(at_ + 30);
    entry_.name = reader_.text(at_ + kCentralSize, name_length);
    central_ = read_header(reader_, at_ + 6);
    check_kind();
    if (reader_.at<std::uint16_t>(at_ + 32) != 0) fail("has a comment");
    if (reader_.at<std::uint16_t>(at_ + 34) != 0) fail("is on another disk");
    std::uint64_t offset = reader_.at<std::uint32_t>(at_ + 42);
    const Extra extra = read_extra(at_ + kCentralSize + name_length, extra_length);
    // What a header leaves to the zip64 field, in this order.
    std::size_t taken = 0;
    for (std::uint64_t* value : {&central_.size, &central_.packed, &offset}) {
      if (*value != kElsewhere) continue;
      if (taken == extra.count) fail("lacks its zip64 field");
      *value = extra.values[taken++];
    }
    if (taken != extra.count) fail("has a zip64 field that does not fit its header");
    if (central_.packed != central_.size) fail_compressed();
    if (offset != start_) fail("has its header at offset ", offset, ", expected it at ", start_, ": gap or overlap");
    central_end_ = at_ + kCentralSize + name_length + extra_length;
    read_local(extra);
    return entry_;
  }
  std::uint64_t central_end() const noexcept { return central_end_; }
  std::uint64_t local_end() const noexcept { return local_end_; }

 private:
  template <class... Parts>
  [[noreturn]] void fail(Parts&&... parts) const {
    reader_.damaged("entry '", escape_controls(entry_.name.substr(0, 200), false), "' ", std::forward<Parts>(parts)...);
  }
  [[noreturn]] void fail_compressed() const {
    throw_error(ErrorKind::kInvalidFile, reader_.path(), " is refused: entry '",
                escape_controls(entry_.name.substr(0, 200), false),
                "' is compressed; weights are used in place, so store entries without compression (zip -0)");
  }

  void check_kind() const {
    if ((central_.flags & kEncrypted) != 0) {
      throw_error(ErrorKind::kInvalidFile, reader_.path(), " is refused: entry '",
                  escape_controls(entry_.name.substr(0, 200), false), "' is encrypted");
    }
    if (central_.method != 0) fail_compressed();
    if ((central_.flags & ~(kHasDescriptor | kUtf8)) != 0) fail("has flags that no .pt2 file has: ", central_.flags);
    const bool ascii = std::ranges::all_of(entry_.name, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
    if (!ascii && (central_.flags & kUtf8) == 0) fail("has a name that is no ASCII, and does not say that it is UTF-8");
  }

  struct Extra {
    std::string_view padding;
    bool has_zip64 = false;
    std::size_t count = 0;  // of the zip64 field's values
    std::uint64_t values[3] = {};
  };

  Extra read_extra(std::uint64_t at, std::uint64_t length) const {
    reader_.require(at, length);
    const std::uint64_t end = at + length;
    Extra extra;
    bool has_padding = false;
    while (at < end) {
      if (end - at < 4) fail("has an extra field that is cut off");
      const auto id = reader_.at<std::uint16_t>(at), bytes = reader_.at<std::uint16_t>(at + 2);
      at += 4;
      if (bytes > end - at) fail("has an extra field that is cut off");
      if (id == kZip64Extra && !extra.has_zip64) {
        extra.has_zip64 = true;
        if (bytes % 8 != 0 || bytes > sizeof extra.values) fail("has a zip64 field that does not fit its header");
        for (; extra.count < bytes / 8; ++extra.count) {
          extra.values[extra.count] = reader_.at<std::uint64_t>(at + 8 * extra.count);
        }
      } else if (id == kPaddingExtra && !has_padding) {
        has_padding = true;
        extra.padding = reader_.text(at, bytes);
        if (extra.padding.find_first_not_of(bytes != 0 ? extra.padding.front() : '\0') != std::string_view::npos) {
          fail("has padding that holds something");
        }
      } else {
        fail("has an extra field that no .pt2 file has: ", id);
      }
      at += bytes;
    }
    return extra;
  }

  void read_local(const Extra& central_extra) {
    if (reader_.at<std::uint32_t>(start_) != kLocalHeader) fail("has no header at offset ", start_);
    Header local = read_header(reader_, start_ + 4);
    const auto name_length = reader_.at<std::uint16_t>(start_ + 26),
               extra_length = reader_.at<std::uint16_t>(start_ + 28);
    if (reader_.text(start_ + kLocalSize, name_length) != entry_.name) fail("has another name in its local header");
    const std::uint64_t extra = start_ + kLocalSize + name_length;
    const Extra fields = read_extra(extra, extra_length);
    // Nothing to pad is written by leaving the field out.
    if (!central_extra.padding.empty() && central_extra.padding != fields.padding)
      fail("has another extra field in its local header");
    const bool has_descriptor = (central_.flags & kHasDescriptor) != 0;
    // An offset beyond 2 GiB is in the directory's zip64 field alone, and only the directory then asks for zip64.
    const bool zip64_for_offset = central_extra.has_zip64 && central_.needed == kZip64Version;
    if ((local.needed != central_.needed && !(zip64_for_offset && local.needed < kZip64Version)) ||
        local.flags != central_.flags || local.method != central_.method || local.time != central_.time ||
        local.date != central_.date) {
      fail("has another version, flag, method or time in its local header");
    }
    const bool left_out = has_descriptor && local.crc == 0 && local.packed == 0 && local.size == 0;
    // The zip64 field: what the header leaves to it (PyTorch also repeats sizes that the descriptor has), and then
    // maybe the offset, which PyTorch writes here, too.
    std::size_t taken = 0;
    const auto take = [&](std::uint64_t& value) {
      if (taken == fields.count) fail("lacks its zip64 field");
      value = fields.values[taken++];
    };
    if (local.size == kElsewhere) take(local.size);
    if (local.packed == kElsewhere) take(local.packed);
    if (left_out && fields.count >= 2) {
      // It writes the header before the bytes, and the packed size as 0.
      if (fields.values[0] != central_.size || (fields.values[1] != central_.packed && fields.values[1] != 0)) {
        fail("has another checksum or size in its local header");
      }
      taken = 2;
    }
    if (taken < fields.count && fields.values[taken] == start_) ++taken;
    if (taken != fields.count) fail("has a zip64 field that does not fit its header");
    if (!left_out && (local.crc != central_.crc || local.packed != central_.packed || local.size != central_.size)) {
      fail("has another checksum or size in its local header");
    }
    entry_.offset = extra + extra_length;
    entry_.size = central_.size;
    entry_.crc = central_.crc;
    if (entry_.offset > reader_.size() || entry_.size > reader_.size() - entry_.offset) {
      fail("claims ", entry_.size, " bytes at offset ", entry_.offset, ", past the end of the file (truncated?)");
    }
    local_end_ = entry_.offset + entry_.size;
    if (has_descriptor) local_end_ += read_descriptor(local_end_, fields.has_zip64);
  }

  // Behind the bytes: a signature, the checksum, and both sizes, in eight bytes each where the local header has a zip64
  // field.
  std::uint64_t read_descriptor(std::uint64_t at, bool wide) const {
    reader_.require(at, wide ? 24 : 16);
    const std::uint64_t packed = wide ? reader_.at<std::uint64_t>(at + 8) : reader_.at<std::uint32_t>(at + 8);
    const std::uint64_t size = wide ? reader_.at<std::uint64_t>(at + 16) : reader_.at<std::uint32_t>(at + 12);
    if (reader_.at<std::uint32_t>(at) != kDescriptor || reader_.at<std::uint32_t>(at + 4) != central_.crc ||
        packed != central_.packed || size != central_.size) {
      fail("has a data descriptor that says something else than the zip directory");
    }
    return wide ? 24 : 16;
  }

  const Reader& reader_;
  const std::uint64_t at_, start_;
  std::uint64_t central_end_ = 0, local_end_ = 0;
  ZipEntry entry_;
  Header central_{};
};

}  // namespace

std::vector<ZipEntry> read_zip_directory(const MappedFile& file) {
  const Reader reader(file);
  const Directory directory = find_directory(reader);
  std::vector<ZipEntry> entries;
  std::uint64_t at = directory.offset, start = 0;
  for (std::uint64_t i = 0; i < directory.entries; ++i) {
    if (at - directory.offset > directory.size) reader.damaged("its zip directory is longer than its end record says");
    EntryReader entry(reader, at, start);
    entries.push_back(entry.read());
    at = entry.central_end();
    start = entry.local_end();
    if (start > directory.offset) {
      reader.damaged("entry '", escape_controls(entries.back().name.substr(0, 200), false), "' claims ",
                     entries.back().size, " bytes at offset ", entries.back().offset, ", past the zip directory at ",
                     directory.offset);
    }
  }
  if (at != directory.offset + directory.size) {
    reader.damaged("its zip directory has ", directory.size, " bytes, its ", directory.entries, " entries take ",
                   at - directory.offset);
  }
  if (start != directory.offset) {
    reader.damaged("its entries end at offset ", start, ", the zip directory is at ", directory.offset);
  }
  file.check_whole();
  return entries;
}

}  // namespace untorch
