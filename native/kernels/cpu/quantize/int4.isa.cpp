// Rounding to int4, group by group, and packing, tile by tile. The values are those of torch's operators one after the
// other: a scale and a zero as they are stored, a division, and rounding to nearest even.
//
// Roofline: the weight is read once; a group lies in L1. A division a vector is what costs most.
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/half.h"
#include "kernels/cpu/quantize/int4_levels.h"
#include "kernels/cpu/quantize/vectors.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

typedef std::uint8_t Bytes __attribute__((vector_size(N)));

constexpr float kLevels = 15.0f, kMiddle = 8.0f;
constexpr std::int64_t kWords = kInt4Columns / 32;

// A group's values, and the squares of its errors and weights. `w` has zeros behind `count`, up to `group`.
void round_group(const float* w, std::int64_t count, std::int64_t group, float scale, float zero, std::uint8_t* q,
                 double* sums) {
  V wrong{}, whole{};
  for (std::int64_t j = 0; j < group; j += N) {
    const V x = load(w + j);
    V steps{};
    if (scale != 0.0f) steps = larger(smaller((x - zero) / scale, V{} + (kLevels - kMiddle)), V{} - kMiddle);
    steps = rounded(steps);
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(steps + kMiddle, I), Bytes);
    std::memcpy(q + j, &bytes, sizeof bytes);
    V error = steps * scale + zero - x;
    if (j + N > count) {
      for (int i = 0; i < N; ++i) error[i] = j + i < count ? error[i] : 0.0f;
    }
    wrong += error * error, whole += x * x;
  }
  sums[0] += static_cast<double>(sum_of(wrong)), sums[1] += static_cast<double>(sum_of(whole));
}

template <class E>
struct Stored {
  static void put(void* to, std::int64_t at, float value) { static_cast<float*>(to)[at] = value; }
  static float get(const void* from, std::int64_t at) { return static_cast<const float*>(from)[at]; }
};
template <>
struct Stored<HalfElements<HalfType::kBFloat16>> {
  static void put(void* to, std::int64_t at, float value) { static_cast<BFloat16*>(to)[at] = BFloat16(value); }
  static float get(const void* from, std::int64_t at) { return static_cast<const BFloat16*>(from)[at]; }
};
template <>
struct Stored<HalfElements<HalfType::kFloat16>> {
  static void put(void* to, std::int64_t at, float value) { static_cast<Half*>(to)[at] = Half(value); }
  static float get(const void* from, std::int64_t at) { return static_cast<const Half*>(from)[at]; }
};

template <class E>
void quantize_row(const Int4Quantization& p, std::int64_t row, std::uint8_t* q) {
  alignas(64) float part[kInt4MostGroup + N];
  const auto* const from = static_cast<const typename E::type*>(p.weight) + row * p.stride;
  double* const sums = p.sums + row * 2;
  sums[0] = 0.0, sums[1] = 0.0;
  for (std::int64_t at = 0; at < p.padded_k; at += p.group) {
    const std::int64_t count = p.k - at < p.group ? p.k - at : p.group;
    const std::int64_t place = (at / p.group * p.padded_rows + row) * 2;
    if (count <= 0) {
      Stored<E>::put(p.scale_and_zero, place, 0.0f), Stored<E>::put(p.scale_and_zero, place + 1, 0.0f);
      std::memset(q + at, static_cast<int>(kMiddle), static_cast<std::size_t>(p.group));
      continue;
    }
    std::int64_t j = 0;
    for (; j + N <= count; j += N) store(part + j, E::load(from + at + j));
    if (j < count) store(part + j, E::part(from + at + j, count - j)), j += N;
    for (; j < p.group; j += N) store(part + j, V{});
    if (p.by_range) {
      float low, high;
      find_range(part, count, low, high);
      const float scale = (high - low) / kLevels;
      Stored<E>::put(p.scale_and_zero, place, scale);
      Stored<E>::put(p.scale_and_zero, place + 1, low + kMiddle * scale);
    }
    round_group(part, count, p.group, Stored<E>::get(p.scale_and_zero, place),
                Stored<E>::get(p.scale_and_zero, place + 1), q + at, sums);
  }
}

// A row's values, eight at a time in an integer, become the nibbles of four lanes.
void pack_row(const std::uint8_t* q, std::int64_t row, std::int64_t blocks, std::int32_t* packed) {
  for (std::int64_t o = 0; o < blocks; ++o) {
    for (std::int64_t j = 0; j < kWords; ++j) {
      std::uint64_t eights[4];
      std::memcpy(eights, q + o * kInt4Columns + j * 32, sizeof eights);
      const std::uint64_t low = eights[0] | eights[1] << 4, high = eights[2] | eights[3] << 4;
      for (int lane = 0; lane < 4; ++lane) {
        const auto l = static_cast<std::uint32_t>(low >> (16 * lane)),
                   h = static_cast<std::uint32_t>(high >> (16 * lane));
        const std::uint32_t word = (l & 0xff) | (h & 0xff) << 8 | (l & 0xff00) << 8 | (h & 0xff00) << 16;
        packed[(o * 32 + row * 4 + lane) * kWords + j] = static_cast<std::int32_t>(word);
      }
    }
  }
}

}  // namespace

void int4_tiles(const Int4Quantization& p, std::int64_t tile, std::int64_t tile_end) {
  std::vector<std::uint8_t> q(static_cast<std::size_t>(p.padded_k));
  const std::int64_t blocks = p.padded_k / kInt4Columns;
  with_elements(p.dtype, [&](auto elements) {
    using E = decltype(elements);
    for (std::int64_t row = tile * kInt4Rows; row < tile_end * kInt4Rows; ++row) {
      if (row < p.rows) {
        quantize_row<E>(p, row, q.data());
      } else {
        for (std::int64_t g = 0; g < p.padded_k / p.group; ++g) {
          const std::int64_t place = (g * p.padded_rows + row) * 2;
          Stored<E>::put(p.scale_and_zero, place, 0.0f), Stored<E>::put(p.scale_and_zero, place + 1, 0.0f);
        }
        std::memset(q.data(), static_cast<int>(kMiddle), q.size());
      }
      pack_row(q.data(), row % kInt4Rows, blocks, p.packed + row / kInt4Rows * blocks * 32 * kWords);
    }
  });
}

}  // namespace untorch::kernels::UNTORCH_ISA
