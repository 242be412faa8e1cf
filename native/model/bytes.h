// What the readers of a file share: its checksum and whether text is text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace untorch {

// The CRC-32 of zip archives (polynomial 0x04c11db7, reflected).
std::uint32_t crc32(std::span<const std::byte> bytes) noexcept;

// True for well-formed UTF-8 (RFC 3629: shortest forms, no surrogates).
bool is_utf8(std::string_view text) noexcept;

}  // namespace untorch
