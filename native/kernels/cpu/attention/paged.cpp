// Paged attention: checks the tables, writes new keys and values, cuts the work into items.
//
// An item has at most 48 rows (queries × heads of a group). With few rows, as in decoding, keys are cut into parts of
// 1024, whose results are joined; the cut does not depend on the number of threads, so neither does the result.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/attention/paged_levels.h"
#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/gemm/gemm_operands.h"
#include "kernels/paged_attention.h"

namespace untorch::kernels::cpu {
namespace {

constexpr std::int64_t kFewRows = 16;
constexpr std::int64_t kPanelKeys = 16;  // items begin at a panel of keys

// The first key that query i of the sequence's positions sees.
std::int64_t first_key(const PagedAttention& p, std::int64_t i) {
  std::int64_t first = 0;
  if (p.window > 0) first = std::max(first, i - p.window + 1);
  if (p.chunk > 0) first = std::max(first, i / p.chunk * p.chunk);
  return first;
}

}  // namespace

PagedFault check_paged(const PagedAttention& p) noexcept {
  std::int64_t before = 0;
  for (std::int64_t s = 0; s <= p.sequences; ++s) {
    const std::int64_t end = p.cu_seqlens_q[s];
    if (end < before || end > p.tokens || (s == 0 && end != 0)) return {"cu_seqlens_q", s, end};
    if (s > 0) {
      const std::int64_t length = p.seqlens_k[s - 1], queries = end - before;
      const std::int64_t pages = (length + p.block - 1) / p.block;
      if (queries > 0 && (length < queries || pages > p.table_columns)) return {"seqlens_k", s - 1, length};
      // What nothing reads may be anything.
      const std::int64_t first = queries > 0 ? first_key(p, length - queries) / p.block : pages;
      for (std::int64_t i = first; queries > 0 && i < pages; ++i) {
        const std::int64_t page = p.block_table[(s - 1) * p.table_columns + i];
        if (page < 0 || page >= p.blocks) return {"block_table", (s - 1) * p.table_columns + i, page};
      }
    }
    before = end;
  }
  for (std::int64_t t = 0; t < p.tokens && p.k != nullptr; ++t) {
    if (p.slots[t] < -1 || p.slots[t] >= p.blocks * p.block) return {"slot_mapping", t, p.slots[t]};
  }
  return {};
}

void paged_attention(const PagedAttention& p) {
  if (p.tokens == 0 || p.heads == 0) return;
  const std::int64_t group = p.heads / p.kv_heads, queries = std::max<std::int64_t>(1, kPagedRows / group);
  std::vector<PagedItem> items;
  std::vector<std::int64_t> joins;  // the first item of those that are joined
  std::int64_t partial = 0;         // floats
  double work = 0.0;
  for (std::int64_t s = 0; s < p.sequences; ++s) {
    const std::int64_t begin = p.cu_seqlens_q[s], count = p.cu_seqlens_q[s + 1] - begin;
    const std::int64_t length = p.seqlens_k[s];
    for (std::int64_t q = 0; q < count; q += queries) {
      const std::int64_t rows = std::min(queries, count - q), at = length - count + q;
      const std::int64_t first = first_key(p, at) / kPanelKeys * kPanelKeys, last = at + rows;
      const bool few = rows * group <= kFewRows;
      const std::int64_t parts = few ? std::max<std::int64_t>(1, (last - first + kPagedPart - 1) / kPagedPart) : 1;
      work += static_cast<double>(rows * p.heads) * static_cast<double>((last - first) * (p.width + p.width_v));
      for (std::int64_t h = 0; h < p.kv_heads; ++h) {
        if (parts > 1) joins.push_back(static_cast<std::int64_t>(items.size()));
        for (std::int64_t part = 0; part < parts; ++part) {
          const std::int64_t key0 = first + part * kPagedPart;
          const std::int64_t key1 = parts == 1 ? last : std::min(last, key0 + kPagedPart);
          items.push_back({s, h, begin + q, rows, key0, key1, nullptr});
          if (parts > 1) partial += rows * group * (p.width_v + 2);
        }
      }
    }
  }
  std::vector<float> partials(static_cast<std::size_t>(partial));
  float* next = partials.data();
  for (const std::int64_t first : joins) {
    for (std::size_t i = static_cast<std::size_t>(first);
         i < items.size() && items[i].query == items[static_cast<std::size_t>(first)].query &&
         items[i].kv_head == items[static_cast<std::size_t>(first)].kv_head;
         ++i) {
      items[i].partial = next;
      next += items[i].count * group * (p.width_v + 2);
    }
  }
  const int threads = omp_in_parallel() || work < 5e5 ? 1 : omp_get_max_threads();
  const std::int64_t each = (UNTORCH_ISA_CALL(paged_workspace)(p) + 4095) / 4096 * 4096;
  char* const memory = static_cast<char*>(gemm_scratch(static_cast<std::size_t>(each * threads)));
  const auto count = static_cast<std::int64_t>(items.size()), joined = static_cast<std::int64_t>(joins.size());
  const bool bf16 = cpu_has_fast_bf16(), amx = p.dtype == DType::kBFloat16 && cpu_has_amx();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    void* const own = memory + omp_get_thread_num() * each;
#pragma omp for schedule(static)
    for (std::int64_t t = 0; t < p.tokens; ++t) UNTORCH_ISA_CALL(paged_write)(p, t, own);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < count; ++i) {
      UNTORCH_ISA_CALL(paged_item)(p, items[static_cast<std::size_t>(i)], bf16, amx, own);
    }
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < joined; ++i) {
      const std::int64_t first = joins[static_cast<std::size_t>(i)];
      const std::int64_t end = i + 1 < joined ? joins[static_cast<std::size_t>(i + 1)] : count;
      std::int64_t parts = 0;
      while (first + parts < end && items[static_cast<std::size_t>(first + parts)].partial != nullptr &&
             items[static_cast<std::size_t>(first + parts)].query == items[static_cast<std::size_t>(first)].query &&
             items[static_cast<std::size_t>(first + parts)].kv_head == items[static_cast<std::size_t>(first)].kv_head) {
        ++parts;
      }
      UNTORCH_ISA_CALL(paged_join)(p, items[static_cast<std::size_t>(first)], parts);
    }
  }
}

}  // namespace untorch::kernels::cpu
