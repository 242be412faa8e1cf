// The serial parts of layers with a recurrent state, one set for each instruction-set level (see isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"

namespace untorch::kernels {

struct CausalConv1d;
struct GatedDeltaRule;

inline constexpr std::int64_t kConvChannels = 256;  // of an item: 1 KiB of each row
inline constexpr std::int64_t kStateColumns = 32;   // of a state, that lie in L1 together

}  // namespace untorch::kernels

// Workspaces are in bytes, aligned to 64. An item is kConvChannels channels from `channel` on, or the columns [begin,
// end) of one value head's state; begin is a multiple of kStateColumns.
UNTORCH_ISA_DECLARE(std::int64_t conv1d_workspace(const CausalConv1d& p);
                    void conv1d_item(const CausalConv1d& p, std::int64_t sequence, std::int64_t channel,
                                     void* workspace);
                    std::int64_t delta_rule_workspace(const GatedDeltaRule& p);
                    void delta_rule_item(const GatedDeltaRule& p, std::int64_t sequence, std::int64_t head,
                                         std::int64_t begin, std::int64_t end, void* workspace);)
