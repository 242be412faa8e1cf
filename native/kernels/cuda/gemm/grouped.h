// Grouped GEMM kernels and the choice among them.
#pragma once

#include <cstdint>

#include "kernels/gemm.h"

namespace untorch::kernels::cuda {

// Whether grouped_sm90 takes the problem: float16 or bfloat16, groups of rows, and what TMA asks for: bases and strides
// that are multiples of 16 bytes, x dense along k, weights dense along k or n, out dense along n.
inline bool has_grouped_sm90(const GroupedGemm& p) {
  constexpr std::int64_t kMaxGroups = 1024, kMaxSize = std::int64_t{1} << 30;
  const auto aligned = [](const void* base) { return reinterpret_cast<std::uintptr_t>(base) % 16 == 0; };
  const bool is_half = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  const bool k_major = p.b_row == 1 && p.b_col % 8 == 0 && p.b_col >= p.k;
  const bool n_major = p.b_col == 1 && p.b_row % 8 == 0 && p.b_row >= p.n;
  return p.has_wgmma && is_half && !p.along_k && p.groups > 0 && p.groups <= kMaxGroups && p.m < kMaxSize &&
         p.n < kMaxSize && p.k > 0 && p.k < kMaxSize && aligned(p.a) && aligned(p.b) && aligned(p.out) &&
         p.a_col == 1 && p.a_row % 8 == 0 && p.a_row >= p.k && (k_major || n_major) && p.b_group % 8 == 0 &&
         p.b_group > 0 && p.out_col == 1 && p.out_row % 8 == 0;
}

// Mean rows a group up to which grouped_sm90 has tiles for few rows.
inline constexpr std::int64_t kFewRowsMean = 40;

// One launch each. Rows of out behind the last group become 0; ends that decrease or pass the whole are cut to it.
int grouped_sm90(const GroupedGemm& p, Stream stream);

}  // namespace untorch::kernels::cuda
