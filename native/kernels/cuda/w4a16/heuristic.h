// Sizes that the kernels of packed weights have, whatever the format; and how many columns are unpacked at a time, for
// a product by cuBLASLt.
#pragma once

#include <algorithm>

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

// Shared memory of packed_mma's blocks with so many rows, at most.
inline constexpr int kSm80SharedBytesM64 = 106496, kSm80SharedBytesM128 = 129024;

// Rows of a block's tile there.
inline int sm80_tile_m(std::int64_t m, int max_shared_bytes) {
  if (m <= 16) return 16;
  if (m <= 32 || max_shared_bytes < kSm80SharedBytesM64) return 32;
  return m <= 64 || max_shared_bytes < kSm80SharedBytesM128 ? 64 : 128;
}

// Shared memory that packed_stream's blocks have at most, and rows of one launch of it: with more, x does not stay in
// the second-level cache.
inline constexpr int kSm90SharedBytes = 232448, kSm90MaxM = 1024;

// So many rows where there are fewer weights; the last step is for all others.
struct MLimit {
  std::int64_t weights, rows;
};
template <std::size_t Count>
std::int64_t m_limit_for(const MLimit (&steps)[Count], std::int64_t weights) {
  std::size_t i = 0;
  while (i < Count - 1 && weights >= steps[i].weights) ++i;
  return steps[i].rows;
}

// Rows up to which packed_narrow serves on an H200 where packed_stream could, by the number of weights. µs of both,
// int4 with groups of 128 and NVFP4:
//                     8 rows                          16 rows
//   4096 × 4096       6.8 and 9.0, 8.4 and 9.8        8.6 and 9.7, 9.8 and 10.5
//   14336 × 4096      12.7 and 15.0, 16.2 and 17.4    15.7 and 16.0, 18.5 and 18.1
//   4096 × 14336      13.5 and 13.1, 16.9 and 15.9    16.5 and 14.1, 18.7 and 16.5
//   8192 × 28672      39.2 and 36.7, 50.3 and 46.6    47.5 and 39.5, 54.7 and 48.5
struct GemvMLimit {
  MLimit steps[3] = {{1 << 25, 16}, {1 << 27, 8}, {0, 0}};
  std::int64_t rows_alone = 16;  // where there is no packed_stream; more are packed_mma's

  // The same for all.
  void set(std::int64_t all) {
    for (MLimit& step : steps) step.rows = all;
    rows_alone = all;
  }
  std::int64_t of(const W4A16Gemm& p, bool has_stream) const {
    return has_stream ? m_limit_for(steps, p.n * p.k) : rows_alone;
  }
};

// Rows up to which packed_stream serves on an H200; with more, unpacking is faster, as cuBLASLt's products of few tiles
// are. µs of both, int4 with groups of 128:
//                     256 rows       512            1024           2048           4096
//   3072 × 1024       9.9 and 10.9   12.8 and 11.6  16.9 and 15.2
//   1280 × 5120       13.4 and 13.8  15.8 and 18.2  27.2 and 26.8  54 and 45      113 and 83
//   4096 × 4096       21.5 and 27.6  30.7 and 36.3  49.9 and 57.5  100.5, 100.4   203 and 197
//   14336 × 4096      50 and 87      86 and 116     164 and 187    327 and 356    655 and 663
//   8192 × 28672      163 and 337    322 and 474    629 and 769    1257 and 1385  2511 and 2746
struct Sm90MLimit {
  MLimit steps[5] = {{1 << 22, 256}, {1 << 23, 512}, {1 << 25, 1024}, {1 << 27, 2048}, {0, 4096}};

  // The same for all.
  void set(std::int64_t all) {
    for (MLimit& step : steps) step.rows = all;
  }
  std::int64_t of(const W4A16Gemm& p) const { return m_limit_for(steps, p.n * p.k); }
};

// Rows above which a weight that also lies unpacked on the GPU is read as such, by cuBLASLt, on an H200: where
// benchmarks/gpu_int4.py and gpu_nvfp4.py show bfloat16 to be the faster one.
struct DequantizedMLimit {
  MLimit steps[5] = {{1 << 23, 8}, {1 << 24, 32}, {1 << 25, 64}, {1 << 27, 224}, {0, 256}};
  MLimit alone[3] = {{1 << 22, 8}, {1 << 25, 16}, {0, 128}};  // where there is no packed_stream

  std::int64_t of(const W4A16Gemm& p, bool has_stream) const {
    return has_stream ? m_limit_for(steps, p.n * p.k) : m_limit_for(alone, p.n * p.k);
  }
};

// Of a product that makes tiles of 128 by 256, one on each multiprocessor.
inline std::int64_t waves_of_tiles(std::int64_t m, std::int64_t columns, std::int64_t num_sms) {
  const std::int64_t tiles = (m + 127) / 128 * ((columns + 255) / 256);
  return (tiles + num_sms - 1) / num_sms;
}

// Columns of a chunk that is unpacked and multiplied: all of them, or a multiple of 256. Few chunks, and such that the
// products' last wave of tiles is full: the fastest by what an H200 needs, about 6 TFLOP/s for each multiprocessor (of
// 16-bit numbers; operations_a_second is that), and 10 µs to go over to the next chunk. Whether one stays in the
// second-level cache makes no difference: unpacked weights go to memory sooner or later, and come from there while the
// tensor cores are busy.
inline std::int64_t dequantize_chunk_n(const W4A16Gemm& p, std::int64_t element_bytes, std::int64_t l2_bytes,
                                       double operations_a_second = 6e12) {
  const double tile_seconds = 2.0 * 128 * 256 / operations_a_second;  // for each k
  constexpr double kChunkSeconds = 1e-5;
  const std::int64_t column_bytes = std::max<std::int64_t>(p.k * element_bytes, 1);
  const std::int64_t most = std::max<std::int64_t>(2 * l2_bytes / column_bytes, 1024);  // of scratch
  const auto seconds = [&](std::int64_t columns) {
    const std::int64_t full = p.n / columns, rest = p.n % columns;
    const std::int64_t waves =
        full * waves_of_tiles(p.m, columns, p.num_sms) + (rest > 0 ? waves_of_tiles(p.m, rest, p.num_sms) : 0);
    return static_cast<double>(waves) * static_cast<double>(p.k) * tile_seconds +
           static_cast<double>(full + (rest > 0 ? 1 : 0)) * kChunkSeconds;
  };
  if (p.n <= 256) return p.n;
  std::int64_t best = 256;
  for (std::int64_t columns = 512; columns < p.n + 256 && columns <= most; columns += 256) {
    if (seconds(std::min(columns, p.n)) < seconds(best)) best = std::min(columns, p.n);
  }
  return best;
}

}  // namespace untorch::kernels::cuda
