// Decodes UTF-8 as far as control characters need it.
#include "base/text.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace untorch {
namespace {

bool is_control(std::uint32_t c) noexcept {
  return c < 0x20 || (c >= 0x7f && c <= 0x9f) || c == 0x61c || (c >= 0x200b && c <= 0x200f) ||
         (c >= 0x2028 && c <= 0x202e) || (c >= 0x2060 && c <= 0x206f) || c == 0xfeff || (c >= 0xfff9 && c <= 0xfffb) ||
         (c >= 0xe0000 && c <= 0xe007f);
}

// The code point at `at` and its length; length 1 for a byte that begins none.
std::uint32_t decode(std::string_view text, std::size_t at, std::size_t& length) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const unsigned lead = byte(0);
  length = lead >= 0xf0 && lead < 0xf5 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc2 ? 2 : 1;
  if (lead >= 0xf5 || length > text.size() - at) length = 1;
  std::uint32_t code = length == 1 ? lead : lead & (0xffu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0u) != 0x80) {
      length = 1;
      return lead;
    }
    code = (code << 6) | (byte(i) & 0x3fu);
  }
  return code;
}

}  // namespace

std::string escape_controls(std::string_view text, bool keep_lines) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0, length = 0; at < text.size(); at += length) {
    const std::uint32_t code = decode(text, at, length);
    const bool raw = length == 1 && code >= 0x80;
    if (raw || !is_control(code) || (keep_lines && (code == '\n' || code == '\t'))) {
      out += text.substr(at, length);
      continue;
    }
    char escape[16];
    (void)std::snprintf(escape, sizeof escape, code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x", code);
    out += escape;
  }
  return out;
}

}  // namespace untorch
