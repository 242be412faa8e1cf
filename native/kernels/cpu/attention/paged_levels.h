// The serial parts of paged attention, one set for each instruction-set level (see isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"

namespace untorch::kernels {

struct PagedAttention;

inline constexpr std::int64_t kPagedRows = 48;    // queries × heads of a group that pass over the keys together
inline constexpr std::int64_t kPagedPart = 1024;  // keys of an item with few rows; their results are joined afterwards

// Some queries of one sequence and one KV head, and the keys [key0, key1).
struct PagedItem {
  std::int64_t sequence, kv_head, query, count, key0, key1;
  float* partial;  // [rows][width_v + 2]: sums, maximum, sum of weights; null: the item has all keys, and writes out
};

}  // namespace untorch::kernels

UNTORCH_ISA_DECLARE(std::int64_t paged_workspace(const PagedAttention& p);
                    void paged_item(const PagedAttention& p, const PagedItem& item, bool bf16, bool amx,
                                    void* workspace);
                    void paged_join(const PagedAttention& p, const PagedItem& first, std::int64_t parts);
                    void paged_write(const PagedAttention& p, std::int64_t token, void* workspace);)
