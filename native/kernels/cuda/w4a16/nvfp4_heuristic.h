// Heuristic of the NVFP4 W4A16 GEMM: which algorithm serves a problem on a GPU.
#pragma once

#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/nvfp4.h"
#include "kernels/nvfp4_prefill.h"

namespace untorch::kernels::cuda {

// kDequantizeChunks: dequantize a chunk of columns, then cuBLASLt, chunk after chunk. kFp8, kFp4: quantize activations
// and convert the weight to FP8 (W8A8) or to cuBLASLt's NVFP4 layout (W4A4), then cuBLASLt. kDequantized: cuBLASLt,
// with a dequantized copy of the weight that the loader made.
enum class Nvfp4Algorithm : std::int8_t { kGemv, kGemmSm80, kGemmSm90, kDequantizeChunks, kFp8, kFp4, kDequantized };

// Measured by benchmarks/gpu_nvfp4.py on an H200; its options override them for a run.
struct Nvfp4Thresholds {
  GemvMaxM gemv_max_m;
  Sm90MaxM sm90_max_m;                      // where the GPU has the sm_90 GEMM
  std::int64_t sm90_tile_m = 0;             // W4A16Gemm::tile_m
  std::int64_t sm80_max_m_beside_sm90 = 0;  // of the sm_80 GEMM above sm90_max_m
  std::int64_t sm80_max_m = 256;            // of the sm_80 GEMM where the GPU has no sm_90 GEMM
  // The largest M that the W4A16 algorithms serve where `prefill` asks for fp8 or fp4. That of fp4 is not measured yet.
  std::int64_t fp8_above_m = 512, fp4_above_m = 256;
  bool fp8_fast_accumulation = false;  // of cuBLASLt: fewer bits in the accumulators
  PackedMaxM packed_max_m;
  bool fp4_emulated = false;  // by a reference kernel, on GPUs without FP4 tensor cores, for tests
};

// Dynamic shared memory of the GEMV's CTAs, at most, for M up to 8 and up to 16.
inline constexpr int kNvfp4GemvSharedBytes = 159744, kNvfp4GemvSharedBytesM16 = 227328;
inline int nvfp4_gemv_shared_bytes(std::int64_t m) { return m <= 8 ? kNvfp4GemvSharedBytes : kNvfp4GemvSharedBytesM16; }

// By dtype, M, layout, the GPU's features, `prefill`, and whether a dequantized copy of the weight lies there. The GEMV
// and the GEMMs take inner_k_tiles 8 alone.
inline Nvfp4Algorithm choose_nvfp4_algorithm(const Nvfp4Gemm& p, const Nvfp4Thresholds& thresholds = {},
                                             Nvfp4Prefill prefill = Nvfp4Prefill::kExact,
                                             bool has_dequantized = false) {
  if (prefill == Nvfp4Prefill::kFp8 && p.m > thresholds.fp8_above_m) return Nvfp4Algorithm::kFp8;
  if (prefill == Nvfp4Prefill::kFp4 && p.m > thresholds.fp4_above_m) return Nvfp4Algorithm::kFp4;
  const bool has_kernels = (p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16) && p.inner_k_tiles == 8;
  if (has_dequantized && (!has_kernels || p.m > thresholds.packed_max_m.of(p, p.has_wgmma))) {
    return Nvfp4Algorithm::kDequantized;
  }
  if (!has_kernels) return Nvfp4Algorithm::kDequantizeChunks;
  if (p.m <= thresholds.gemv_max_m.of(p, p.has_wgmma) && p.max_shared_bytes >= nvfp4_gemv_shared_bytes(p.m)) {
    return Nvfp4Algorithm::kGemv;
  }
  if (!p.has_wgmma) {
    return p.m <= thresholds.sm80_max_m ? Nvfp4Algorithm::kGemmSm80 : Nvfp4Algorithm::kDequantizeChunks;
  }
  if (p.m <= thresholds.sm90_max_m.of(p)) return Nvfp4Algorithm::kGemmSm90;
  return p.m <= thresholds.sm80_max_m_beside_sm90 ? Nvfp4Algorithm::kGemmSm80 : Nvfp4Algorithm::kDequantizeChunks;
}

// Why a GPU of that compute capability cannot serve `prefill`, and what to do instead; null where it can.
inline const char* prefill_obstacle(Nvfp4Prefill prefill, int major, int minor) {
  const int gpu = major * 10 + minor;
  if (prefill == Nvfp4Prefill::kFp8 && gpu < 89) {
    return "prefill 'fp8' needs a GPU of compute capability 8.9 or newer: quantise with prefill='exact'";
  }
  if (prefill != Nvfp4Prefill::kFp4 || gpu == 100 || gpu == 103 || gpu == 120 || gpu == 121) return nullptr;
  return gpu < 89 ? "prefill 'fp4' needs a GPU that multiplies NVFP4 by NVFP4 (sm_100, sm_103, sm_120 or sm_121): "
                    "quantise with prefill='exact'"
                  : "prefill 'fp4' needs a GPU that multiplies NVFP4 by NVFP4 (sm_100, sm_103, sm_120 or sm_121): "
                    "quantise with prefill='fp8' or 'exact'";
}

}  // namespace untorch::kernels::cuda
