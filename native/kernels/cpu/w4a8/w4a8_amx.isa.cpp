// The W4A8 GEMM of many rows by AMX: tiles of the CPU, and the weights' format.
#include <cstdint>

#include "kernels/cpu/w4a8/w4a8_levels.h"
#if defined(__AVX512F__)
#include "kernels/cpu/w4a8/w4a8_amx.h"
#endif

namespace untorch::kernels::UNTORCH_ISA {

#if defined(__AVX512F__)
void w4a8_amx_slice(const W4A8Linear& p, const W4A8Rows& rows, std::int64_t panel, std::int64_t panel_end) {
  const AmxScope scope(true, w4a8_step_words(p.format));
  if (p.format == W4A8Format::kNvfp4) return w4a8_amx<AmxTiles, Weights::kNvfp4>(p, rows, panel, panel_end);
  switch (p.scale_type) {
    case ScaleType::kBFloat16:
      return w4a8_amx<AmxTiles, Weights::kBFloat16Scales>(p, rows, panel, panel_end);
    case ScaleType::kFloat16:
      return w4a8_amx<AmxTiles, Weights::kFloat16Scales>(p, rows, panel, panel_end);
    case ScaleType::kFloat32:
      return w4a8_amx<AmxTiles, Weights::kFloat32Scales>(p, rows, panel, panel_end);
  }
}
#else
void w4a8_amx_slice(const W4A8Linear&, const W4A8Rows&, std::int64_t, std::int64_t) {}
#endif

}  // namespace untorch::kernels::UNTORCH_ISA
