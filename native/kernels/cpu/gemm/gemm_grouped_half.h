// Grouped GEMM of bfloat16 and float16 by AVX-512, on operands as they lie.
#pragma once

#include "kernels/gemm.h"

namespace untorch::kernels::cpu {

// Whether this machine has the instructions, and the problem is one: groups of rows, x dense along k, weights dense
// along k or n, out dense along n.
bool has_grouped_half(const GroupedGemm& p) noexcept;
// The ends are in order.
void grouped_half(const GroupedGemm& p);

}  // namespace untorch::kernels::cpu
