// Philox4x32-10 and the values that are made of its words, in device code. Thread t of a launch is subsequence t; its
// k-th block of four words is number offset / 4 + k of it. Ten rounds of two 32 × 32 multiplications each.
#pragma once

#include <cstdint>

#include "kernels/random.h"

namespace untorch::kernels::cuda {

struct Words {
  std::uint32_t w[4];
};

class Philox {
 public:
  __device__ __forceinline__ Philox(const PhiloxState& state, std::uint64_t subsequence) : subsequence_(subsequence) {
    const std::uint64_t seed = state.cell == nullptr ? state.seed : state.cell[0];
    const std::uint64_t offset = state.cell == nullptr ? state.offset : state.cell[1] + state.offset;
    key_[0] = static_cast<std::uint32_t>(seed);
    key_[1] = static_cast<std::uint32_t>(seed >> 32);
    block_ = offset / 4;
  }

  __device__ __forceinline__ Words next() {
    std::uint32_t c0 = static_cast<std::uint32_t>(block_), c1 = static_cast<std::uint32_t>(block_ >> 32),
                  c2 = static_cast<std::uint32_t>(subsequence_), c3 = static_cast<std::uint32_t>(subsequence_ >> 32);
    std::uint32_t k0 = key_[0], k1 = key_[1];
    ++block_;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0, p1 = std::uint64_t{0xCD9E8D57u} * c2;
      const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0,
                          n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<std::uint32_t>(p1);
      c3 = static_cast<std::uint32_t>(p0);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
  }

 private:
  std::uint32_t key_[2];
  std::uint64_t block_, subsequence_;
};

// (0, 1]: the middle of one of 2^32 or 2^53 equal parts.
__device__ __forceinline__ float unit_float(std::uint32_t w) { return static_cast<float>(w) * 0x1p-32f + 0x1p-33f; }
__device__ __forceinline__ double unit_double(std::uint32_t low, std::uint32_t high) {
  const std::uint64_t bits = std::uint64_t{low} ^ (std::uint64_t{high} << 21);
  return static_cast<double>(bits) * 0x1p-53 + 0x1p-54;
}

// What one block gives: four uniform floats or two uniform doubles.
template <class T>
struct Draw {
  static constexpr int kCount = 4;
  T value[4];
};
template <>
struct Draw<double> {
  static constexpr int kCount = 2;
  double value[2];
};

template <class T>
__device__ __forceinline__ Draw<T> uniform_draw(const Words& words) {
  if constexpr (sizeof(T) == 8) {
    return {{unit_double(words.w[0], words.w[1]), unit_double(words.w[2], words.w[3])}};
  } else {
    return {{unit_float(words.w[0]), unit_float(words.w[1]), unit_float(words.w[2]), unit_float(words.w[3])}};
  }
}

// Standard normals, in pairs by Box and Muller.
template <class T>
__device__ __forceinline__ Draw<T> normal_draw(const Words& words) {
  if constexpr (sizeof(T) == 8) {
    const double u = unit_double(words.w[0], words.w[1]);
    const double turn = unit_double(words.w[2], words.w[3]) * 2.0;  // times pi
    const double radius = sqrt(-2.0 * log(u));
    double s, c;
    sincospi(turn, &s, &c);
    return {{radius * s, radius * c}};
  } else {
    Draw<float> out;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      constexpr float kTurn = 6.2831855f;
      const float u = unit_float(words.w[i]);
      const float angle = static_cast<float>(words.w[i + 1]) * (0x1p-32f * kTurn) + 0x1p-33f * kTurn;
      const float radius = sqrtf(-2.0f * logf(u));
      float s, c;
      sincosf(angle, &s, &c);
      out.value[i] = radius * s;
      out.value[i + 1] = radius * c;
    }
    return out;
  }
}

}  // namespace untorch::kernels::cuda
