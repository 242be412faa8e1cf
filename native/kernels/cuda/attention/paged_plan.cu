// Which steps the paged WGMMA kernel takes, and its tiles (paged_wgmma_sm90.cuh).
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "kernels/cuda/attention/instances.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kRows = 128;     // of a row block
constexpr int kRowHeads = 64;  // at most
constexpr int kLeastBox = 16;  // pages are multiples of it
constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();

bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

}  // namespace

PagedPrefillPlan plan_paged_prefill(const PagedPrefill& p, int num_sms) {
  PagedPrefillPlan plan;
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return plan;
  if (p.width < 8 || p.width % 8 != 0 || p.width > kMaxPagedPrefillWidth || !(p.scale > 0)) return plan;
  if (p.kv_heads < 1 || p.heads % p.kv_heads != 0 || p.block < kLeastBox || p.block % kLeastBox != 0) return plan;
  if (p.pool_block % p.width != 0 || p.blocks < 1) return plan;
  if (p.blocks > kMaxInt / (p.pool_block / p.width) || p.table_columns > kMaxInt / p.block) return plan;
  if (!is_aligned(p.q) || !is_aligned(p.pool) || !is_aligned(p.out)) return plan;
  plan.width = p.width <= 64 ? 64 : p.width <= 96 ? 96 : p.width <= 128 ? 128 : 256;
  const int group = p.heads / p.kv_heads;
  plan.head_tiles = (group + kRowHeads - 1) / kRowHeads;
  plan.row_heads = (group + plan.head_tiles - 1) / plan.head_tiles;
  plan.row_tokens = kRows / plan.row_heads;
  const std::int64_t row_blocks = p.tokens / plan.row_tokens + p.sequences;
  const std::int64_t items = row_blocks * p.kv_heads * plan.head_tiles;
  if (p.tokens > kMaxInt || items > kMaxInt / 2) return plan;
  plan.row_blocks = static_cast<int>(row_blocks);
  // With no more tokens than sequences there is no prompt.
  plan.items = p.tokens > p.sequences ? static_cast<int>(items) : 0;
  plan.ctas = std::min(plan.items, num_sms);
  plan.box_rows = std::gcd(p.block, paged_keys(plan.width));
  plan.valid = true;
  return plan;
}

int paged_prefill(const PagedPrefill& problem, const PagedPrefillPlan& plan, Stream stream) {
  if (!plan.valid) return kNoKernel;
  if (plan.ctas == 0) return 0;
  return problem.dtype == DType::kFloat16 ? paged_prefill_float16(problem, plan, stream)
                                          : paged_prefill_bfloat16(problem, plan, stream);
}

}  // namespace untorch::kernels::cuda
