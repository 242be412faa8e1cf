// Layers with a recurrent state: threads share sequences × channels, or sequences × value heads × columns of a state.
#include "kernels/linear_attention.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/linear_attention/linear_attention_levels.h"

namespace untorch::kernels::cpu {
namespace {

// work: element operations.
int threads_for(double work) { return omp_in_parallel() || work < kParallelWork ? 1 : omp_get_max_threads(); }

// Runs item(sequence, part, workspace) for the parts of each sequence that has tokens.
template <class Item>
void for_each_part(const StatePool& pool, std::int64_t parts, std::int64_t workspace, int threads, Item&& item) {
  const std::int64_t each = (workspace + 4095) / 4096 * 4096;
  const auto memory = std::make_unique_for_overwrite<char[]>(static_cast<std::size_t>(each * threads + 64));
  const auto aligned = (reinterpret_cast<std::uintptr_t>(memory.get()) + 63) / 64 * 64;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    void* const own = reinterpret_cast<void*>(aligned + static_cast<std::uintptr_t>(omp_get_thread_num() * each));
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < pool.sequences * parts; ++i) {
      const std::int64_t sequence = i / parts;
      if (pool.begin(sequence) < pool.end(sequence)) item(sequence, i % parts, own);
    }
  }
}

// Zeros for the tokens behind the last sequence.
void clear_padding(const StatePool& pool, void* out, std::int64_t row_bytes) {
  const std::int64_t used = pool.cu_seqlens_q[pool.sequences];
  if (used == pool.tokens) return;
  std::memset(static_cast<char*>(out) + used * row_bytes, 0,
              static_cast<std::size_t>((pool.tokens - used) * row_bytes));
}

}  // namespace

void causal_conv1d(const CausalConv1d& p) {
  if (p.channels == 0) return;
  clear_padding(p.pool, p.out, p.channels * static_cast<std::int64_t>(element_size(p.dtype)));
  const std::int64_t parts = (p.channels + kConvChannels - 1) / kConvChannels;
  const double work = static_cast<double>(p.pool.tokens * p.channels) * static_cast<double>(p.width);
  for_each_part(p.pool, parts, UNTORCH_ISA_CALL(conv1d_workspace)(p), threads_for(work),
                [&](std::int64_t sequence, std::int64_t part, void* own) {
                  UNTORCH_ISA_CALL(conv1d_item)(p, sequence, part * kConvChannels, own);
                });
}

void gated_delta_rule(const GatedDeltaRule& p) {
  if (p.heads == 0 || p.width_v == 0) return;
  clear_padding(p.pool, p.out, p.heads * p.width_v * static_cast<std::int64_t>(element_size(p.dtype)));
  const double work = static_cast<double>(p.pool.tokens * p.heads) * static_cast<double>(p.width * p.width_v);
  const int threads = threads_for(work);
  // Few heads are cut into columns, which do not depend on each other, but each prepare q and k again.
  const bool cuts = threads > 1 && p.pool.sequences * p.heads < 2 * static_cast<std::int64_t>(threads);
  const std::int64_t columns = cuts ? kStateColumns : p.width_v, parts = (p.width_v + columns - 1) / columns;
  for_each_part(p.pool, p.heads * parts, UNTORCH_ISA_CALL(delta_rule_workspace)(p), threads,
                [&](std::int64_t sequence, std::int64_t part, void* own) {
                  const std::int64_t begin = part % parts * columns;
                  UNTORCH_ISA_CALL(delta_rule_item)
                  (p, sequence, part / parts, begin, std::min(begin + columns, p.width_v), own);
                });
}

}  // namespace untorch::kernels::cpu
