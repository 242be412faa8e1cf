// The serial part of the W8A8 convolution by AMX: the integers of vpdpbusd. The mainloop is amx_slice.h; sums start at
// −zero · column sums, one row for all of a tile's, and pass to the epilogue through L1.
#include <cstdint>

#include "kernels/cpu/convolution/amx_slice.h"
#include "kernels/cpu/w8a8/convolution_bytes.h"

namespace untorch::kernels::UNTORCH_ISA {

#if defined(UNTORCH_FINISHES_IN_REGISTERS)
namespace {

constexpr std::int64_t P = kPackWidth;

template <int MR, int NP>
void finish_rows(const std::int32_t* sums, const ByteTile& t) {
  Ints acc[MR][NP];
  for (int i = 0; i < MR; ++i) {
    for (int j = 0; j < NP; ++j) acc[i][j] = load_ints(sums + i * kAmxBlock + j * P);
  }
  t.residual != nullptr ? finish_bytes<true>(acc, t) : finish_bytes<false>(acc, t);
}

template <int NP>
void finish_all(std::int64_t rows, const std::int32_t* sums, ByteTile t) {
  constexpr int kAtOnce = 4;
  for (std::int64_t i = 0; i < rows;) {
    const int count = rows - i >= kAtOnce ? kAtOnce : 1;
    count == kAtOnce ? finish_rows<kAtOnce, NP>(sums, t) : finish_rows<1, NP>(sums, t);
    sums += count * kAmxBlock, t.out += count * t.ldc, i += count;
    if (t.residual != nullptr) t.residual += count * t.ldc;
  }
}

}  // namespace

void int8_convolution_amx_slice(const Int8ConvolutionCall& call, const AmxConvolution& amx, const AmxPart& part) {
  const Int8Convolution& p = *call.problem;
  const std::int64_t n = p.out_channels, of_group = amx.panels * P, pixels = p.output[0] * p.output[1];
  Finisher finish(call);
  const bool in_registers = finish.only_clamps_above();
  ByteTile bytes = byte_tile(call, finish);
  const AmxScope scope(true, amx_step(amx.words));
  amx_slice<AmxTiles, true, std::int32_t>(
      amx, part,
      [&](std::int64_t group, std::int64_t panel, std::int64_t image) {
        return call.start + image * call.channel_step + group * of_group + panel * P;
      },
      [&](const std::int32_t* sums, std::int64_t pixel, std::int64_t count, std::int64_t group, std::int64_t panel,
          int panels) {
        const std::int64_t channel = group * of_group + panel * P, at = pixel * p.groups * n + group * n + panel * P;
        const std::int64_t image = call.channel_step == 0 ? 0 : pixel / pixels;
        const float* const factor = call.factor + image * call.channel_step + channel;
        if (in_registers && (panel + panels) * P <= n) {
          bytes.factor = factor, bytes.bias = call.bias + channel;
          finish.place(at, bytes.out, bytes.residual);
          panels > 1 ? finish_all<2>(count, sums, bytes) : finish_all<1>(count, sums, bytes);
          return;
        }
        const std::int64_t columns = n - panel * P < panels * P ? n - panel * P : panels * P;
        finish({count, columns, sums, kAmxBlock, factor, call.bias + channel, at, p.groups * n});
      });
}
#else
void int8_convolution_amx_slice(const Int8ConvolutionCall&, const AmxConvolution&, const AmxPart&) {}
#endif

}  // namespace untorch::kernels::UNTORCH_ISA
