// Operands of bfloat16 and float16 as the microkernels read them: rows of A, panels of pairs of B. Included by
// *.isa.cpp files only.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm_pack.h"
#include "kernels/cpu/gemm/half_vector.h"

namespace untorch::kernels::UNTORCH_ISA {

// `count` elements of A as float32, the padding 0.
template <HalfType H>
void widen_row(const std::uint16_t* from, std::int64_t stride, std::int64_t count, std::int64_t padded, float* to) {
  std::int64_t j = 0;
  if (stride == 1) {
    for (; j + kLanes<float> <= count; j += kLanes<float>) store(to + j, load_half<H>(from + j));
    if (j < count) {
      const Vector<float> part = load_half_part<H>(from + j, count - j);
      for (std::int64_t x = j; x < count; ++x) to[x] = part[x - j];
    }
  } else {
    for (; j < count; j += kLanes<float>) {
      std::uint16_t part[kLanes<float>] = {};
      const std::int64_t left = count - j < kLanes<float> ? count - j : kLanes<float>;
      for (std::int64_t x = 0; x < left; ++x) part[x] = from[(j + x) * stride];
      const Vector<float> wide = load_half<H>(part);
      for (std::int64_t x = 0; x < left; ++x) to[j + x] = wide[x];
    }
  }
  for (j = count; j < padded; ++j) to[j] = 0.0f;
}

inline void copy_row(const std::uint16_t* from, std::int64_t stride, std::int64_t count, std::int64_t padded,
                     std::uint16_t* to) {
  if (stride == 1) {
    for (std::int64_t j = 0; j < count; ++j) to[j] = from[j];
  } else {
    for (std::int64_t j = 0; j < count; ++j) to[j] = from[j * stride];
  }
  for (std::int64_t j = count; j < padded; ++j) to[j] = 0;
}

// B [k, n] into panels of so many pairs, zeros behind k; panel_step: pairs from a panel to the next.
inline void pack_pairs(std::int64_t k, std::int64_t n, MatrixRef<const std::uint16_t> b, std::uint32_t* packed,
                       std::int64_t pairs, std::int64_t panel_step) {
  const bool words = b.row_stride == 1 && b.col_stride % 2 == 0 && reinterpret_cast<std::uintptr_t>(b.data) % 4 == 0;
  const std::int64_t whole = words ? k / 2 : 0;
  if (words) {  // pairs are 32-bit elements of Bᵀ, transposed in registers
    for (std::int64_t j = 0; j < n; j += kPackWidth) {
      pack_panel(whole, n - j < kPackWidth ? n - j : kPackWidth,
                 reinterpret_cast<const float*>(b.data) + j * (b.col_stride / 2), 1, b.col_stride / 2,
                 reinterpret_cast<float*>(packed) + j * panel_step);
    }
  }
  const auto bits = [&](std::int64_t row, std::int64_t col) -> std::uint32_t {
    return row < k && col < n ? b.data[row * b.row_stride + col * b.col_stride] : 0;
  };
  for (std::int64_t p = whole; p < pairs; ++p) {
    for (std::int64_t j = 0; j < n; j += kPackWidth) {
      std::uint32_t* const to = packed + j * panel_step + p * kPackWidth;
      if (b.col_stride == 1 && j + kPackWidth <= n && 2 * p + 1 < k) {
        const std::uint16_t* const low = b.data + 2 * p * b.row_stride + j;
        const std::uint16_t* const high = low + b.row_stride;
        for (int x = 0; x < kPackWidth; ++x) to[x] = low[x] | static_cast<std::uint32_t>(high[x]) << 16;
      } else {
        for (int x = 0; x < kPackWidth; ++x) to[x] = bits(2 * p, j + x) | bits(2 * p + 1, j + x) << 16;
      }
    }
  }
}
inline void pack_pairs(std::int64_t k, std::int64_t n, MatrixRef<const std::uint16_t> b, std::uint32_t* packed) {
  pack_pairs(k, n, b, packed, (k + 1) / 2, (k + 1) / 2);
}

// Panels of pairs as panels of float32, [panel][2·pairs][16].
template <HalfType H>
void widen_panels(const std::uint32_t* from, std::int64_t panels, std::int64_t panel_step, std::int64_t pairs,
                  float* to) {
  for (std::int64_t v = 0; v < panels; ++v) {
    for (std::int64_t p = 0; p < pairs; ++p) {
      for (std::int64_t x = 0; x < kPackWidth; x += kLanes<float>) {
        Vector<float> even, odd;
        widen_pairs<H>(load_words<Vector<float>>(from + v * panel_step + p * kPackWidth + x), even, odd);
        store(to + (v * 2 * pairs + 2 * p) * kPackWidth + x, even);
        store(to + (v * 2 * pairs + 2 * p + 1) * kPackWidth + x, odd);
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
