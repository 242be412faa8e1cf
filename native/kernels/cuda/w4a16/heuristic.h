// Thresholds of the W4A16 GEMM algorithms, shared by int4 and NVFP4; and the chunk size of dequantize + cuBLASLt.
//
// Which algorithm serves a problem: int4_heuristic.h and nvfp4_heuristic.h. All limits are in M, and depend on the
// number of weights, n · k.
#pragma once

#include <algorithm>

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

// Dynamic shared memory of the sm_80 GEMM's CTAs, at most, with tiles of 64 and 128 rows.
inline constexpr int kSm80SharedBytesM64 = 106496, kSm80SharedBytesM128 = 129024;

// Its tile size in M.
inline int sm80_tile_m(std::int64_t m, int max_shared_bytes) {
  if (m <= 16) return 16;
  if (m <= 32 || max_shared_bytes < kSm80SharedBytesM64) return 32;
  return m <= 64 || max_shared_bytes < kSm80SharedBytesM128 ? 64 : 128;
}

// Dynamic shared memory of the sm_90 GEMM's CTAs, at most; and the M of one launch: beyond it x does not stay in L2.
inline constexpr int kSm90SharedBytes = 232448, kSm90MaxM = 1024;

// A step of a table: `m` applies to weights with fewer than `weights` elements; the last step to all others.
struct MThreshold {
  std::int64_t weights, m;
};
template <std::size_t Count>
std::int64_t m_threshold_for(const MThreshold (&steps)[Count], std::int64_t weights) {
  std::size_t i = 0;
  while (i < Count - 1 && weights >= steps[i].weights) ++i;
  return steps[i].m;
}

// The largest M that the GEMV serves on an H200. µs of the GEMV and the sm_90 GEMM, int4 with groups of 128, then
// NVFP4:
//                     M = 8                           M = 16
//   4096 × 4096       6.8 and 9.0, 8.4 and 9.8        8.6 and 9.7, 9.8 and 10.5
//   14336 × 4096      12.7 and 15.0, 16.2 and 17.4    15.7 and 16.0, 18.5 and 18.1
//   4096 × 14336      13.5 and 13.1, 16.9 and 15.9    16.5 and 14.1, 18.7 and 16.5
//   8192 × 28672      39.2 and 36.7, 50.3 and 46.6    47.5 and 39.5, 54.7 and 48.5
struct GemvMaxM {
  MThreshold steps[3] = {{1 << 25, 16}, {1 << 27, 8}, {0, 0}};
  std::int64_t without_sm90 = 16;  // where the GPU has no sm_90 GEMM; the sm_80 GEMM serves larger M

  // The same for all weights.
  void set(std::int64_t m) {
    for (MThreshold& step : steps) step.m = m;
    without_sm90 = m;
  }
  std::int64_t of(const W4A16Gemm& p, bool has_sm90) const {
    return has_sm90 ? m_threshold_for(steps, p.n * p.k) : without_sm90;
  }
};

// The largest M that the sm_90 GEMM serves on an H200; above it dequantize + cuBLASLt is faster, as it is for weights
// that make few tiles. µs of both, int4 with groups of 128:
//                     M = 256        512            1024           2048           4096
//   3072 × 1024       9.9 and 10.9   12.8 and 11.6  16.9 and 15.2
//   1280 × 5120       13.4 and 13.8  15.8 and 18.2  27.2 and 26.8  54 and 45      113 and 83
//   4096 × 4096       21.5 and 27.6  30.7 and 36.3  49.9 and 57.5  100.5, 100.4   203 and 197
//   14336 × 4096      50 and 87      86 and 116     164 and 187    327 and 356    655 and 663
//   8192 × 28672      163 and 337    322 and 474    629 and 769    1257 and 1385  2511 and 2746
struct Sm90MaxM {
  MThreshold steps[5] = {{1 << 22, 256}, {1 << 23, 512}, {1 << 25, 1024}, {1 << 27, 2048}, {0, 4096}};

  // The same for all weights.
  void set(std::int64_t m) {
    for (MThreshold& step : steps) step.m = m;
  }
  std::int64_t of(const W4A16Gemm& p) const { return m_threshold_for(steps, p.n * p.k); }
};

// The largest M that the packed weight serves where a dequantized copy lies on the GPU as well; above it cuBLASLt reads
// the copy. On an H200: where benchmarks/gpu_int4.py and gpu_nvfp4.py show bfloat16 to be faster.
struct PackedMaxM {
  MThreshold steps[5] = {{1 << 23, 8}, {1 << 24, 32}, {1 << 25, 64}, {1 << 27, 224}, {0, 256}};
  MThreshold without_sm90[3] = {{1 << 22, 8}, {1 << 25, 16}, {0, 128}};

  std::int64_t of(const W4A16Gemm& p, bool has_sm90) const {
    return has_sm90 ? m_threshold_for(steps, p.n * p.k) : m_threshold_for(without_sm90, p.n * p.k);
  }
};

// Waves of a GEMM with tiles of 128 × 256, one CTA an SM.
inline std::int64_t num_waves(std::int64_t m, std::int64_t n, std::int64_t num_sms) {
  const std::int64_t tiles = (m + 127) / 128 * ((n + 255) / 256);
  return (tiles + num_sms - 1) / num_sms;
}

// Columns (N) that are dequantized and multiplied at a time: all of them, or a multiple of 256. Few chunks, with little
// wave quantization: the least time at an H200's 6 TFLOP/s an SM (flops_per_sm: of 16-bit operands) and 10 µs to go
// over to the next chunk. Whether a chunk stays in L2 makes no difference: dequantized weights are written to memory
// sooner or later, and are read from there while the tensor cores are busy.
inline std::int64_t dequantize_chunk_n(const W4A16Gemm& p, std::int64_t element_bytes, std::int64_t l2_bytes,
                                       double flops_per_sm = 6e12) {
  const double tile_seconds = 2.0 * 128 * 256 / flops_per_sm;  // for each k
  constexpr double kChunkSeconds = 1e-5;
  const std::int64_t column_bytes = std::max<std::int64_t>(p.k * element_bytes, 1);
  const std::int64_t max_columns = std::max<std::int64_t>(2 * l2_bytes / column_bytes, 1024);  // of scratch
  const auto seconds = [&](std::int64_t columns) {
    const std::int64_t full = p.n / columns, rest = p.n % columns;
    const std::int64_t waves =
        full * num_waves(p.m, columns, p.num_sms) + (rest > 0 ? num_waves(p.m, rest, p.num_sms) : 0);
    return static_cast<double>(waves) * static_cast<double>(p.k) * tile_seconds +
           static_cast<double>(full + (rest > 0 ? 1 : 0)) * kChunkSeconds;
  };
  if (p.n <= 256) return p.n;
  std::int64_t best = 256;
  for (std::int64_t columns = 512; columns < p.n + 256 && columns <= max_columns; columns += 256) {
    if (seconds(std::min(columns, p.n)) < seconds(best)) best = std::min(columns, p.n);
  }
  return best;
}

}  // namespace untorch::kernels::cuda
