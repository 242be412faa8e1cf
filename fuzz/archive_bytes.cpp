// Writes and patches local headers, central headers and the end record (APPNOTE 6.3.10).
#include "archive_bytes.h"

#include <cstring>

#include "model/bytes.h"

namespace untorch::fuzz {
namespace {

constexpr std::uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEndRecord = 0x06054b50;
constexpr std::size_t kEndSize = 22, kCentralSize = 46, kLocalSize = 30;
constexpr std::uint16_t kVersion = 20, kUtf8 = 1u << 11;

template <class... Fields>
void append(Bytes& out, Fields... fields) {
  const auto one = [&](auto field) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&field);
    out.insert(out.end(), bytes, bytes + sizeof field);
  };
  (one(fields), ...);
}

void append_text(Bytes& out, std::string_view text) {
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  out.insert(out.end(), bytes, bytes + text.size());
}

std::uint16_t u16(std::size_t n) { return static_cast<std::uint16_t>(n); }
std::uint32_t u32(std::size_t n) { return static_cast<std::uint32_t>(n); }

template <class T>
T load(std::span<const std::byte> bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

Bytes zip(std::span<const std::pair<std::string, std::string_view>> entries) {
  constexpr std::uint16_t kNone16 = 0;
  Bytes out, directory;
  for (const auto& entry : entries) {
    const std::string_view name = entry.first, data = entry.second;
    const std::size_t start = out.size();
    const std::uint32_t crc = crc32(std::as_bytes(std::span(data)));
    const auto fields = [&](Bytes& to) {  // those that both headers have
      append(to, kVersion, kUtf8, kNone16, kNone16, std::uint16_t{0x21}, crc, u32(data.size()), u32(data.size()),
             u16(name.size()), kNone16);
    };
    append(out, kLocalHeader);
    fields(out);
    append_text(out, name);
    append_text(out, data);
    append(directory, kCentralHeader, kVersion);
    fields(directory);
    append(directory, kNone16, kNone16, kNone16, std::uint32_t{0}, u32(start));
    append_text(directory, name);
  }
  const std::size_t start = out.size();
  out.insert(out.end(), directory.begin(), directory.end());
  append(out, kEndRecord, kNone16, kNone16, u16(entries.size()), u16(entries.size()), u32(directory.size()), u32(start),
         kNone16);
  return out;
}

void fix_checksums(std::span<std::byte> archive) noexcept {
  if (archive.size() < kEndSize) return;
  const std::size_t end = archive.size() - kEndSize;
  if (load<std::uint32_t>(archive, end) != kEndRecord) return;
  std::size_t at = load<std::uint32_t>(archive, end + 16);
  while (at <= end && end - at >= kCentralSize && load<std::uint32_t>(archive, at) == kCentralHeader) {
    const std::size_t size = load<std::uint32_t>(archive, at + 24), offset = load<std::uint32_t>(archive, at + 42);
    if (offset <= end && end - offset >= kLocalSize) {
      const std::size_t data =
          offset + kLocalSize + load<std::uint16_t>(archive, offset + 26) + load<std::uint16_t>(archive, offset + 28);
      if (data <= end && size <= end - data) {
        const std::uint32_t crc = crc32(archive.subspan(data, size));
        std::memcpy(archive.data() + at + 16, &crc, sizeof crc);
        // PyTorch's packages have zeros there: see the flag for data descriptors.
        if (load<std::uint32_t>(archive, offset + 14) != 0) {
          std::memcpy(archive.data() + offset + 14, &crc, sizeof crc);
        }
      }
    }
    at += kCentralSize + load<std::uint16_t>(archive, at + 28) + load<std::uint16_t>(archive, at + 30) +
          load<std::uint16_t>(archive, at + 32);
  }
}

std::shared_ptr<const MappedFile> file_of(std::span<const std::byte> bytes) {
  return MappedFile::of_memory(bytes, false, nullptr);
}

}  // namespace untorch::fuzz
