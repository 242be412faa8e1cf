// Which steps the paged kernels of sm_90 take, and their tiles (paged_wgmma_sm90.cuh, paged_decode.sm90a.cu).
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "kernels/cuda/attention/instances.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kRowHeads = 64;       // of a row block, at most
constexpr int kMaxClusterBits = 3;  // of decode's clusters: more than 8 CTAs are not portable
constexpr int kLeastBox = 16;       // pages are multiples of it
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
  plan.group = p.heads / p.kv_heads;
  plan.head_tiles = (plan.group + kRowHeads - 1) / kRowHeads;
  plan.row_heads = (plan.group + plan.head_tiles - 1) / plan.head_tiles;
  plan.row_tokens = paged_rows(plan.width) / plan.row_heads;
  const std::int64_t row_blocks = p.tokens / plan.row_tokens + p.sequences;
  const std::int64_t items = row_blocks * p.kv_heads * plan.head_tiles;
  if (p.tokens > kMaxInt || items > kMaxInt / 2) return plan;
  plan.row_blocks = static_cast<int>(row_blocks);
  // With no more tokens than sequences there is no prompt.
  plan.items = p.tokens > p.sequences ? static_cast<int>(items) : 0;
  plan.ctas = std::min(plan.items, num_sms);
  plan.box_rows = std::gcd(p.block, paged_keys(plan.width));
  plan.by_row_heads = divisor(plan.row_heads), plan.by_row_tokens = divisor(plan.row_tokens);
  plan.by_head_tiles = divisor(plan.head_tiles), plan.by_pairs = divisor(p.kv_heads * plan.head_tiles);
  plan.by_block = divisor(p.block);
  plan.valid = true;
  return plan;
}

PagedDecodePlan plan_paged_decode(const PagedPrefill& p, int num_sms) {
  PagedDecodePlan plan;
  if (!plan_paged_prefill(p, num_sms).valid) return plan;
  const int group = p.heads / p.kv_heads;
  if (!takes_paged_decode(p.width, group, p.few)) return plan;
  std::int64_t slots = p.tokens;
  if (p.tokens > p.sequences) {
    slots = p.sequences + 1;
    if (slots * p.few * p.kv_heads <= num_sms) plan.each = p.few;  // few sequences' tokens, side by side
    slots *= plan.each;
  }
  const std::int64_t units = slots * p.kv_heads;
  if (units > kMaxInt >> kMaxClusterBits) return plan;
  plan.heads = group <= 4 ? 4 : 8;
  plan.units = static_cast<int>(units);
  while (plan.cluster_bits < kMaxClusterBits && units << (plan.cluster_bits + 1) <= num_sms) ++plan.cluster_bits;
  plan.valid = true;
  return plan;
}

int paged_decode(const PagedPrefill& problem, const PagedDecodePlan& plan, Stream stream) {
  if (!plan.valid) return kNoKernel;
  return plan.units == 0 ? 0 : paged_decode_sm90(problem, plan, stream);
}

int paged_prefill(const PagedPrefill& problem, const PagedPrefillPlan& plan, Stream stream) {
  if (!plan.valid) return kNoKernel;
  if (plan.ctas == 0) return 0;
  return problem.dtype == DType::kFloat16 ? paged_prefill_float16(problem, plan, stream)
                                          : paged_prefill_bfloat16(problem, plan, stream);
}

}  // namespace untorch::kernels::cuda
