// The serial part of attention, one for each instruction-set level (see isa.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/common/isa.h"

namespace untorch::kernels {

inline constexpr std::int64_t kQueryBlock = 48;

// How attention in bfloat16 or float16 multiplies: operands widened to float32, or bfloat16 by vdpbf16ps or AMX.
enum class HalfMath { kWidened, kDotBf16, kAmx };

}  // namespace untorch::kernels

// Items are numbered (batch, head, block of queries), blocks innermost; [first, last) run one after the other, so that
// a head's keys are packed once. workspace: attention_workspace bytes, 64-byte aligned.
UNTORCH_ISA_DECLARE(std::size_t attention_workspace(const cpu::Attention<float>& problem);
                    void attention_items(const cpu::Attention<float>& problem, std::int64_t first, std::int64_t last,
                                         void* workspace);
                    std::size_t attention_half_workspace(const cpu::HalfAttention& problem, HalfMath math);
                    void attention_half_items(const cpu::HalfAttention& problem, HalfMath math, std::int64_t first,
                                              std::int64_t last, void* workspace);)
