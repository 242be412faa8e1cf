// Grouped GEMM of bfloat16 by AVX512_BF16's dot products, for operands that are dense along k.
#pragma once

#include "kernels/gemm.h"

namespace untorch::kernels::cpu {

// Whether this machine has it, and the problem is one: bfloat16, groups of rows, x·Wᵀ with W row-major.
bool has_grouped_bf16_dot(const GroupedGemm& p) noexcept;
// The ends are in order.
void grouped_bf16_dot(const GroupedGemm& p);

}  // namespace untorch::kernels::cpu
