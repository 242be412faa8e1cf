// Size classes of cached blocks, and byte counts as text.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdio>
#include <string>

namespace untorch::cuda {

inline constexpr std::size_t kUnit = 512;  // smallest block and alignment

// The class that holds `nbytes`, and the size of its blocks.
struct SizeClass {
  std::size_t index, bytes;
};

inline SizeClass size_class(std::size_t nbytes) {
  const std::size_t units = std::max<std::size_t>((nbytes + kUnit - 1) / kUnit, 1);
  if (units <= 8) return {units - 1, units * kUnit};
  // units lies in (2^e, 2^(e+1)]: eight steps of 2^(e-3).
  const auto exponent = static_cast<std::size_t>(std::bit_width(units - 1)) - 1;
  const std::size_t step = std::size_t{1} << (exponent - 3);
  const std::size_t eighths = (units - (std::size_t{1} << exponent) + step - 1) / step;  // 1 … 8
  return {(exponent - 2) * 8 + eighths - 1, ((std::size_t{1} << exponent) + eighths * step) * kUnit};
}

// In bytes, MiB or GiB.
inline std::string gib(std::size_t bytes) {
  char text[64];
  if (bytes < std::size_t{1} << 20) {
    std::snprintf(text, sizeof text, "%zu bytes", bytes);
  } else if (bytes < std::size_t{1} << 30) {
    std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  } else {
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  }
  return text;
}

}  // namespace untorch::cuda
