// From a tile's int32 sums to float32 or uint8: scale, bias, residual, activation, requantization. Included by
// *.isa.cpp files only, which are compiled without contraction: a multiplication and the addition behind it are rounded
// apart at every level, so all CPUs give the same bytes.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm_epilogue.h"
#include "kernels/cpu/w8a8/convolution_levels.h"
#include "kernels/cpu/w8a8/int8_round.h"

namespace untorch::kernels::UNTORCH_ISA {

enum class Residual { kNone, kFloat, kBytes };

// Rows of sums with what belongs to their columns.
struct FinishTile {
  std::int64_t rows, columns;
  const std::int32_t* sums;
  std::int64_t lds;
  const float *factor, *bias;
  std::int64_t at, ldc;  // where the first row's result, and its residual, lie in theirs; elements from row to row
};

class Finisher {
 public:
  explicit Finisher(const Int8ConvolutionCall& call)
      : p_(*call.problem),
        residual_(call.residual),
        output_(call.output),
        bytes_(p_.output_scale.scale != 0.0f),
        inside_(tile_epilogue(p_.epilogue, residual_ != nullptr)),
        inverse_(bytes_ ? 1.0f / p_.output_scale.scale : 1.0f),
        residual_factor_(p_.residual_scale.scale == 0.0f ? 1.0f : p_.residual_scale.scale) {
    low_ = inside_.low, high_ = inside_.high;
    if (bytes_ && !inside_.rest) {
      residual_factor_ = residual_factor_ / p_.output_scale.scale;
      high_ = high_ / p_.output_scale.scale;
      low_ = low_ > -512.0f ? low_ : -512.0f, high_ = high_ < 512.0f ? high_ : 512.0f;
    }
    kind_ = residual_ == nullptr              ? Residual::kNone
            : p_.residual_scale.scale == 0.0f ? Residual::kFloat
                                              : Residual::kBytes;
  }

  // Whether the result is bytes of sums with, at most, bytes added and a clamp that the least byte does, or high().
  bool only_clamps_above() const {
    const bool from_zero = inside_.low == -__builtin_inff() || p_.output_scale.zero == 0;
    return bytes_ && !inside_.rest && kind_ != Residual::kFloat && from_zero;
  }
  float high() const { return high_; }
  float residual_factor() const { return residual_factor_; }
  // Where the element `at` of the result and of the residual lies, where both are bytes.
  void place(std::int64_t at, std::uint8_t*& out, const std::uint8_t*& residual) const {
    out = static_cast<std::uint8_t*>(output_) + at;
    residual = residual_ == nullptr ? nullptr : static_cast<const std::uint8_t*>(residual_) + at;
  }

  void operator()(const FinishTile& t) {
    if (inside_.rest && p_.epilogue.activation == Activation::kHardswish && kind_ == Residual::kNone) {
      return bytes_ ? hardswish<true>(t) : hardswish<false>(t);
    }
    if (inside_.rest) return in_memory(t);
    switch (kind_) {
      case Residual::kNone:
        return bytes_ ? finish<Residual::kNone, true>(t) : finish<Residual::kNone, false>(t);
      case Residual::kFloat:
        return bytes_ ? finish<Residual::kFloat, true>(t) : finish<Residual::kFloat, false>(t);
      case Residual::kBytes:
        return bytes_ ? finish<Residual::kBytes, true>(t) : finish<Residual::kBytes, false>(t);
    }
  }

 private:
  using V = Vector<float>;
  static constexpr int N = kByteLanes;

  [[gnu::always_inline]] static Ints widened(const std::uint8_t* from) {
    const Narrow bytes = (Narrow) * reinterpret_cast<const LooseNarrow*>(from);
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32((__m128i)bytes);
#else
    return __builtin_convertvector(bytes, Ints);
#endif
  }

  template <Residual kKind>
  [[gnu::always_inline]] V added(std::int64_t at) const {
    if constexpr (kKind == Residual::kFloat) {
      return load(static_cast<const float*>(residual_) + at) * residual_factor_;
    } else {
      const Ints r = widened(static_cast<const std::uint8_t*>(residual_) + at) - p_.residual_scale.zero;
      return __builtin_convertvector(r, V) * residual_factor_;
    }
  }

  // `count` values where they are less than a vector.
  template <Residual kKind>
  V added_part(std::int64_t at, std::int64_t count) const {
    V some{};
    for (std::int64_t x = 0; x < count; ++x) {
      if constexpr (kKind == Residual::kFloat) {
        some[x] = static_cast<const float*>(residual_)[at + x] * residual_factor_;
      } else {
        const std::int32_t r = static_cast<const std::uint8_t*>(residual_)[at + x] - p_.residual_scale.zero;
        some[x] = static_cast<float>(r) * residual_factor_;
      }
    }
    return some;
  }

  template <Residual kKind, bool kBytes>
  [[gnu::noinline]] void finish(const FinishTile& t) {
    const V low = V{} + low_, high = V{} + high_;
    const std::int32_t zero = p_.output_scale.zero;
    auto* const bytes = static_cast<std::uint8_t*>(output_);
    auto* const floats = static_cast<float*>(output_);
    for (std::int64_t j = 0; j < t.columns; j += N) {
      const V factor = load(t.factor + j), bias = load(t.bias + j);
      const std::int64_t count = t.columns - j;
      const bool whole = count >= N;
      for (std::int64_t i = 0; i < t.rows; ++i) {
        const std::int64_t at = t.at + i * t.ldc + j;
        V y = __builtin_convertvector(load_ints(t.sums + i * t.lds + j), V) * factor + bias;
        if constexpr (kKind != Residual::kNone) y += whole ? added<kKind>(at) : added_part<kKind>(at, count);
        if constexpr (kBytes) {
          y = y > low ? y : low;  // NaN becomes the least
          y = y < high ? y : high;
          const Narrow u = bytes_of(y, zero);
          if (whole) {
            *reinterpret_cast<LooseNarrow*>(bytes + at) = (LooseNarrow)u;
          } else {
            for (std::int64_t x = 0; x < count; ++x) bytes[at + x] = u[x];
          }
        } else {
          y = low > y ? low : y;  // NaN stays NaN
          y = high < y ? high : y;
          if (whole) {
            store(floats + at, y);
          } else {
            for (std::int64_t x = 0; x < count; ++x) floats[at + x] = y[x];
          }
        }
      }
    }
  }

  // Hard swish, MobileNet's activation, is short enough for registers.
  template <bool kBytes>
  [[gnu::noinline]] void hardswish(const FinishTile& t) {
    const V three = V{} + 3.0f, six = V{} + 6.0f, sixth = V{} + 1.0f / 6.0f, inverse = V{} + inverse_;
    const V least = V{} - 512.0f, most = V{} + 512.0f;
    auto* const bytes = static_cast<std::uint8_t*>(output_);
    auto* const floats = static_cast<float*>(output_);
    for (std::int64_t j = 0; j < t.columns; j += N) {
      const V factor = load(t.factor + j), bias = load(t.bias + j);
      const std::int64_t count = t.columns - j < N ? t.columns - j : N;
      for (std::int64_t i = 0; i < t.rows; ++i) {
        const std::int64_t at = t.at + i * t.ldc + j;
        const V x = __builtin_convertvector(load_ints(t.sums + i * t.lds + j), V) * factor + bias;
        V gate = x + three;
        gate = gate < 0.0f ? V{} : gate;  // NaN stays NaN
        gate = gate > six ? six : gate;
        V y = x * gate * sixth;
        if constexpr (kBytes) {
          y *= inverse;
          y = y > least ? y : least;
          y = y < most ? y : most;
          const Narrow u = bytes_of(y, p_.output_scale.zero);
          if (count == N) {
            *reinterpret_cast<LooseNarrow*>(bytes + at) = (LooseNarrow)u;
          } else {
            for (std::int64_t c = 0; c < count; ++c) bytes[at + c] = u[c];
          }
        } else if (count == N) {
          store(floats + at, y);
        } else {
          for (std::int64_t c = 0; c < count; ++c) floats[at + c] = y[c];
        }
      }
    }
  }

  // Activations that are no clamp, in a tile of floats.
  [[gnu::noinline]] void in_memory(const FinishTile& t) {
    constexpr std::int64_t kMost = 64;
    alignas(64) float values[kMost], others[kMost];
    const V least = V{} - 512.0f, most = V{} + 512.0f;
    for (std::int64_t i = 0; i < t.rows; ++i) {
      for (std::int64_t first = 0; first < t.columns; first += kMost) {
        const std::int64_t columns = t.columns - first < kMost ? t.columns - first : kMost;
        const std::int64_t at = t.at + i * t.ldc + first;
        for (std::int64_t j = 0; j < columns; j += N) {
          store(values + j,
                __builtin_convertvector(load_ints(t.sums + i * t.lds + first + j), V) * load(t.factor + first + j) +
                    load(t.bias + first + j));
          if (kind_ == Residual::kNone) continue;
          const std::int64_t count = columns - j;
          if (count >= N) {
            store(others + j,
                  kind_ == Residual::kFloat ? added<Residual::kFloat>(at + j) : added<Residual::kBytes>(at + j));
          } else {
            store(others + j, kind_ == Residual::kFloat ? added_part<Residual::kFloat>(at + j, count)
                                                        : added_part<Residual::kBytes>(at + j, count));
          }
        }
        apply_epilogue(1, columns, p_.epilogue, kind_ == Residual::kNone ? nullptr : others, 0, values, 0);
        if (!bytes_) {
          float* const to = static_cast<float*>(output_) + at;
          for (std::int64_t j = 0; j < columns; ++j) to[j] = values[j];
          continue;
        }
        std::uint8_t* const to = static_cast<std::uint8_t*>(output_) + at;
        for (std::int64_t j = 0; j < columns; j += N) {
          V y = load(values + j) * inverse_;
          y = y > least ? y : least;
          y = y < most ? y : most;
          const Narrow u = bytes_of(y, p_.output_scale.zero);
          if (columns - j >= N) {
            *reinterpret_cast<LooseNarrow*>(to + j) = (LooseNarrow)u;
          } else {
            for (std::int64_t x = 0; x < columns - j; ++x) to[j + x] = u[x];
          }
        }
      }
    }
  }

  const Int8Convolution& p_;
  const void* const residual_;
  void* const output_;
  const bool bytes_;
  const TileEpilogue inside_;
  const float inverse_;
  float residual_factor_, low_, high_;
  Residual kind_;
};

// Dot products of four in each lane: acc + Σ u·w. With VNNI one instruction; without it, even and odd bytes apart.
[[gnu::always_inline]] inline Ints dot_madd(Ints acc, Ints a, Ints even, Ints odd) {
  return acc + madd(a & 0x00ff00ff, even) + madd((a >> 8) & 0x00ff00ff, odd);
}

}  // namespace untorch::kernels::UNTORCH_ISA
