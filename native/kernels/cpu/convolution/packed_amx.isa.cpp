// The serial part of the packed convolution in bfloat16 by AMX: the mainloop is amx_slice.h, here are the rounding of
// the input and the epilogue. Sums start with the bias; residual, clamp and activation happen on the way from the
// tile's sums, which lie in L1, to the output.
#include <cstdint>

#include "kernels/cpu/convolution/amx_slice.h"
#include "kernels/cpu/convolution/packed_levels.h"
#include "kernels/cpu/gemm/gemm_epilogue.h"

namespace untorch::kernels::UNTORCH_ISA {

#if defined(__AVX512F__)
namespace {

using V = Vector<float>;
constexpr int P = kPanel<float>;

// The first `count` lanes.
[[gnu::always_inline]] inline __mmask16 lanes(std::int64_t count) {
  return static_cast<__mmask16>(count >= P ? 0xffff : (1u << count) - 1u);
}

template <bool kResidual>
void finish_rows(std::int64_t rows, std::int64_t columns, const TileEpilogue& inside, const float* sums,
                 const float* residual, float* to, std::int64_t ld) {
  const V low = V{} + inside.low, high = V{} + inside.high;
  for (std::int64_t j = 0; j < columns; j += P) {
    const __mmask16 mask = lanes(columns - j);
    for (std::int64_t i = 0; i < rows; ++i) {
      V v = load(sums + i * kAmxBlock + j);
      if constexpr (kResidual) v += (V)_mm512_maskz_loadu_ps(mask, residual + i * ld + j);
      v = vecmath::at_most(vecmath::at_least(v, low), high);
      _mm512_mask_storeu_ps(to + i * ld + j, mask, (__m512)v);
    }
  }
}

}  // namespace

void convolution_amx_slice(const ConvolutionCall& call, const AmxConvolution& amx, const AmxPart& part) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t n = p.out_channels, ld = p.groups * n;
  const TileEpilogue inside = tile_epilogue(p.epilogue, call.residual != nullptr);
  alignas(64) float tail[kAmxBlock];
  const auto columns_of = [&](std::int64_t panel, int panels) {
    return n - panel * P < panels * P ? n - panel * P : std::int64_t{panels * P};
  };
  const AmxScope scope(true, amx_step(amx.words));
  amx_slice<AmxTiles, false, float>(
      amx, part,
      [&](std::int64_t group, std::int64_t panel, std::int64_t) -> const float* {
        if (call.bias == nullptr) return nullptr;
        const float* const from = call.bias + group * n + panel * P;
        const std::int64_t columns = columns_of(panel, kAmxMostTiles);
        if (columns % P == 0) return from;
        for (std::int64_t j = 0; j < columns; j += P) {
          store(tail + j, (V)_mm512_maskz_loadu_ps(lanes(columns - j), from + j));
        }
        return tail;
      },
      [&](const float* sums, std::int64_t pixel, std::int64_t count, std::int64_t group, std::int64_t panel,
          int panels) {
        const std::int64_t at = pixel * ld + group * n + panel * P, columns = columns_of(panel, panels);
        const float* const residual = call.residual == nullptr ? nullptr : call.residual + at;
        float* const to = call.output + at;
        if (inside.residual) {
          finish_rows<true>(count, columns, inside, sums, residual, to, ld);
        } else {
          finish_rows<false>(count, columns, inside, sums, nullptr, to, ld);
        }
        if (inside.rest) {
          apply_epilogue(count, columns, p.epilogue, inside.residual ? nullptr : residual, ld, to, ld);
        }
      });
}
#else
void convolution_amx_slice(const ConvolutionCall&, const AmxConvolution&, const AmxPart&) {}
#endif

}  // namespace untorch::kernels::UNTORCH_ISA
