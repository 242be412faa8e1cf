// The serial part of attention, one for each instruction-set level (see isa.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/common/isa.h"

namespace untorch::kernels {

inline constexpr std::int64_t kQueryBlock = 48;

}  // namespace untorch::kernels

// Items are numbered (batch, head, block of queries), blocks innermost; [first, last) run one after the other, so that
// a head's keys are packed once. workspace: attention_workspace bytes, 64-byte aligned.
UNTORCH_ISA_DECLARE(std::size_t attention_workspace(const cpu::Attention<float>& problem);
                    void attention_items(const cpu::Attention<float>& problem, std::int64_t first, std::int64_t last,
                                         void* workspace);
                    // bf16: AVX512_BF16 multiplies bfloat16.
                    std::size_t attention_half_workspace(const cpu::HalfAttention& problem, bool bf16);
                    void attention_half_items(const cpu::HalfAttention& problem, bool bf16, std::int64_t first,
                                              std::int64_t last, void* workspace);)
