// GEMM heuristic: the small-M kernel or cuBLASLt.
//
// The limits are for H200 and come from benchmarks/gpu_matmul.py (column "ours" against "torch"); run it again before
// changing one. cuBLASLt is opened only when a GEMM goes to it, so what small models need should stay with our kernel.
#pragma once

#include <algorithm>

#include "kernels/cuda/gemm/small_m.h"

namespace untorch::kernels::cuda {

enum class GemmChoice : std::int8_t { kSmall, kBlas };

struct GemmLimits {
  // M up to which a GEMM is bound by reading the weights.
  std::int64_t rows = kRowsOfATile;
  // Multiply-adds above that M that still cost less than a launch; in float32 our kernel stays faster for longer.
  std::int64_t work = std::int64_t{1} << 24, work_float = std::int64_t{1} << 26;
  // M · N in float32 above that M, weights transposed, above which cuBLASLt's larger tiles win (1.3 to 2.6 times).
  std::int64_t outputs_float = std::int64_t{1} << 17;
  // Batches of GEMMs in float32 above that M (attention without a fused kernel): outputs, or outputs for each of K, up
  // to which our kernel is faster. Above, it takes 1.2 to 8 times as long.
  std::int64_t outputs_batch = std::int64_t{1} << 14, outputs_batch_k = 128;
  // Multiply-adds in half types for weights with dense rows, for any M: above, cuBLASLt is a tenth faster.
  std::int64_t work_columns = std::int64_t{1} << 22;
  // The same for strides that are read element by element, and the longest sum of theirs.
  std::int64_t work_any = std::int64_t{1} << 21;
  std::int64_t k_any = 1024;
  // And above that M: 49×32 · 32×49, four of them, takes 15 µs in float32, and cuBLASLt 3.5; 24×784 · 784×24 28 in
  // bfloat16. In float64 cuBLASLt was not measured.
  std::int64_t work_any_tall = std::int64_t{1} << 16;
  // A K this long with an N that does not fill the GPU: cuBLASLt splits K over more CTAs.
  std::int64_t k_long = 16384, n_long = 1024;

  static constexpr std::int64_t kRowsOfATile = 16;
};

// allow_tf32: cuBLASLt may use the tensor cores in float32, so that it wins as early as in half types.
inline GemmChoice choose(const SmallGemm& p, bool allow_tf32, const GemmLimits& limits = {}) {
  const SmallPath path = small_path(p);
  if (path == SmallPath::kNone) return GemmChoice::kBlas;
  // In double, so that no size overflows.
  const double work =
      static_cast<double>(p.batch) * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  const auto small_if = [&](std::int64_t most, bool also = true) {
    return work <= static_cast<double>(most) && also ? GemmChoice::kSmall : GemmChoice::kBlas;
  };
  const bool is_float = p.dtype == DType::kFloat32;
  if (path == SmallPath::kAny) {
    const bool tall = p.dtype != DType::kFloat64 && p.m > limits.rows;
    return small_if(tall ? limits.work_any_tall : limits.work_any, p.k <= limits.k_any);
  }
  if (path == SmallPath::kColumns && !is_float) return small_if(limits.work_columns, p.k <= limits.k_any);
  const bool tiles_win =
      is_float && path == SmallPath::kRows && p.batch == 1 &&
      static_cast<double>(p.m) * static_cast<double>(p.n) > static_cast<double>(limits.outputs_float);
  if (p.m > limits.rows && p.batch > 1 && is_float && !allow_tf32) {
    const std::int64_t most =
        std::max(path == SmallPath::kRows ? limits.outputs_batch : 0, limits.outputs_batch_k * p.k);
    const double outputs = static_cast<double>(p.batch) * static_cast<double>(p.m) * static_cast<double>(p.n);
    return small_if(limits.work_float, p.k <= limits.k_any && outputs <= static_cast<double>(most));
  }
  if (p.m > limits.rows) {
    return small_if(is_float && !allow_tf32 ? limits.work_float : limits.work, p.k <= limits.k_any && !tiles_win);
  }
  return p.k >= limits.k_long && p.n * p.batch <= limits.n_long ? GemmChoice::kBlas : GemmChoice::kSmall;
}

}  // namespace untorch::kernels::cuda
