// CRC-32 eight bytes at a time with eight tables, and a UTF-8 validator.
#include "model/bytes.h"

#include <array>
#include <bit>
#include <cstring>

namespace untorch {
namespace {

using Table = std::array<std::uint32_t, 256>;

// tables[k][b] is the remainder of byte b followed by k zero bytes.
constexpr std::array<Table, 8> make_tables() {
  std::array<Table, 8> tables{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t r = b;
    for (int bit = 0; bit < 8; ++bit) r = (r & 1u) != 0 ? (r >> 1) ^ 0xedb88320u : r >> 1;
    tables[0][b] = r;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t b = 0; b < 256; ++b) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xffu];
  }
  return tables;
}

constexpr std::array<Table, 8> kTables = make_tables();
static_assert(std::endian::native == std::endian::little);

}  // namespace

std::uint32_t crc32(std::span<const std::byte> bytes) noexcept {
  std::uint32_t crc = 0xffffffffu;
  const std::byte* p = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, p += 8) {
    std::uint64_t word;
    std::memcpy(&word, p, sizeof word);
    word ^= crc;
    crc = 0;
    for (unsigned k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 0xffu];
  }
  for (; left != 0; --left, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<std::uint32_t>(*p)) & 0xffu];
  return ~crc;
}

bool is_utf8(std::string_view text) noexcept {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const std::size_t length = lead < 0x80                   ? 1
                               : lead >= 0xc2 && lead < 0xe0 ? 2
                               : (lead & 0xf0) == 0xe0       ? 3
                               : lead >= 0xf0 && lead < 0xf5 ? 4
                                                             : 0;
    if (length == 0 || length > text.size() - i) return false;
    for (std::size_t k = 1; k < length; ++k) {
      if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return false;
    }
    if (length > 2) {
      const auto second = static_cast<unsigned char>(text[i + 1]);
      const bool overlong = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90);
      const bool outside = (lead == 0xed && second >= 0xa0) || (lead == 0xf4 && second >= 0x90);
      if (overlong || outside) return false;
    }
    i += length;
  }
  return true;
}

}  // namespace untorch
