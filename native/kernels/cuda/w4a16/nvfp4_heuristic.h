// Which kernel serves a product with NVFP4 weights: the one place that says so.
#pragma once

#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/nvfp4.h"
#include "kernels/nvfp4_prefill.h"

namespace untorch::kernels::cuda {

// kFloat8, kFloat4: both operands are made that and multiplied by cuBLASLt. kWhole: by cuBLASLt, from a weight that
// lies unpacked beside the packed one.
enum class Nvfp4Path : std::int8_t { kGemv, kGemmSm80, kGemmSm90, kDequantizeChunks, kFloat8, kFloat4, kDequantized };

// Read off benchmarks/gpu_nvfp4.py on an H200, whose options move them for a run.
struct Nvfp4Limits {
  GemvMLimit narrow;                  // of nvfp4_gemv
  Sm90MLimit stream;                  // of nvfp4_gemm_sm90, where the GPU has it
  std::int64_t tile_rows = 0;         // of its tiles: W4A16Gemm::tile_rows
  std::int64_t mma_rows = 0;          // above those, of nvfp4_gemm_sm80
  std::int64_t mma_rows_alone = 256;  // of nvfp4_gemm_sm80 where the GPU has no nvfp4_gemm_sm90
  // Rows from which what is asked for as `prefill` serves: above them. That of fp4 is not measured yet.
  std::int64_t fp8_rows = 512, fp4_rows = 256;
  bool fp8_fast_accumulation = false;  // of cuBLASLt: sums of fewer digits
  DequantizedMLimit whole;
  bool fp4_emulated = false;  // on GPUs that cannot, slowly, for tests
};

// Shared memory of nvfp4_gemv's blocks at most, with so many rows.
inline constexpr int kNvfp4NarrowShared = 159744, kNvfp4NarrowShared16 = 227328;
inline int nvfp4_narrow_shared(std::int64_t m) { return m <= 8 ? kNvfp4NarrowShared : kNvfp4NarrowShared16; }

// By dtype, m, layout, what the GPU can, what is asked for, and whether the weight lies there unpacked, too. Only tiles
// with inner_k_tiles 8 have kernels that multiply.
inline Nvfp4Path choose_nvfp4_kernel(const Nvfp4Gemm& p, const Nvfp4Limits& limits = {},
                                     Nvfp4Prefill prefill = Nvfp4Prefill::kExact, bool has_whole = false) {
  if (prefill == Nvfp4Prefill::kFloat8 && p.m > limits.fp8_rows) return Nvfp4Path::kFloat8;
  if (prefill == Nvfp4Prefill::kFloat4 && p.m > limits.fp4_rows) return Nvfp4Path::kFloat4;
  const bool has_kernels = (p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16) && p.inner_k_tiles == 8;
  if (has_whole && (!has_kernels || p.m > limits.whole.of(p, p.has_wgmma))) return Nvfp4Path::kDequantized;
  if (!has_kernels) return Nvfp4Path::kDequantizeChunks;
  if (p.m <= limits.narrow.of(p, p.has_wgmma) && p.max_shared_bytes >= nvfp4_narrow_shared(p.m)) {
    return Nvfp4Path::kGemv;
  }
  if (!p.has_wgmma) return p.m <= limits.mma_rows_alone ? Nvfp4Path::kGemmSm80 : Nvfp4Path::kDequantizeChunks;
  if (p.m <= limits.stream.of(p)) return Nvfp4Path::kGemmSm90;
  return p.m <= limits.mma_rows ? Nvfp4Path::kGemmSm80 : Nvfp4Path::kDequantizeChunks;
}

// Why a GPU of that compute capability cannot do what is asked for, and what to do; null where it can.
inline const char* prefill_obstacle(Nvfp4Prefill prefill, int major, int minor) {
  const int gpu = major * 10 + minor;
  if (prefill == Nvfp4Prefill::kFloat8 && gpu < 89) {
    return "prefill 'fp8' needs a GPU of compute capability 8.9 or newer: quantise with prefill='exact'";
  }
  if (prefill != Nvfp4Prefill::kFloat4 || gpu == 100 || gpu == 103 || gpu == 120 || gpu == 121) return nullptr;
  return gpu < 89 ? "prefill 'fp4' needs a GPU that multiplies NVFP4 by NVFP4 (sm_100, sm_103, sm_120 or sm_121): "
                    "quantise with prefill='exact'"
                  : "prefill 'fp4' needs a GPU that multiplies NVFP4 by NVFP4 (sm_100, sm_103, sm_120 or sm_121): "
                    "quantise with prefill='fp8' or 'exact'";
}

}  // namespace untorch::kernels::cuda
