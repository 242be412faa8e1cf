// The W4A8 GEMM of many rows by AMX: tiles of the CPU, and the weights' format.
#include <cstdint>

#include "kernels/cpu/w4a8/w4a8_levels.h"
#if defined(__AVX512F__)
#include "kernels/cpu/w4a8/w4a8_amx.h"
#endif

namespace untorch::kernels::UNTORCH_ISA {

#if defined(__AVX512F__)
void round_rows(const W4A8Linear& p, std::int64_t row, std::int64_t row_end, std::uint16_t* to) {
  for (; row < row_end; ++row) round_row(p.x + row * p.x_stride, p.x_width, p.k, to + row * w4a8_amx_stride(p.k));
}

void w4a8_amx_slice(const W4A8Linear& p, const std::uint16_t* x, std::int64_t panel, std::int64_t panel_end) {
  const AmxScope scope(true);
  if (p.format == W4A8Format::kNvfp4) return w4a8_amx<AmxTiles, Weights::kNvfp4>(p, x, panel, panel_end);
  switch (p.scale_type) {
    case ScaleType::kBFloat16:
      return w4a8_amx<AmxTiles, Weights::kBFloat16Scales>(p, x, panel, panel_end);
    case ScaleType::kFloat16:
      return w4a8_amx<AmxTiles, Weights::kFloat16Scales>(p, x, panel, panel_end);
    case ScaleType::kFloat32:
      return w4a8_amx<AmxTiles, Weights::kFloat32Scales>(p, x, panel, panel_end);
  }
}
#else
void round_rows(const W4A8Linear&, std::int64_t, std::int64_t, std::uint16_t*) {}
void w4a8_amx_slice(const W4A8Linear&, const std::uint16_t*, std::int64_t, std::int64_t) {}
#endif

}  // namespace untorch::kernels::UNTORCH_ISA
