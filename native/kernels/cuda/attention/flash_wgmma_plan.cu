// Which attention problems the WGMMA kernel takes, and its tiles (flash_wgmma_sm90.cuh).
#include <algorithm>

#include "kernels/cuda/attention/instances.h"

namespace untorch::kernels::cuda {
namespace {

// Few rows are for the kernel with small tiles, which packs the query heads of a key head and splits the keys.
constexpr int kFewQueries = 64;
// So many keys cost less than the launch that adds up splits.
constexpr int kShortKeys = 1024;

bool multiple(std::int64_t value, int of) { return value % of == 0; }

// What a tensor map takes: rows that are apart, strides below 2^40 bytes.
bool has_tensor_map(const Heads& heads, int rows) {
  constexpr std::int64_t kMaxStride = (std::int64_t{1} << 39) - 1;  // elements of 2 bytes
  if (rows > 1 && heads.row <= 0) return false;
  return std::max({heads.batch, heads.head, heads.row}) <= kMaxStride && std::min(heads.batch, heads.head) >= 0;
}

int divide_up(int a, int b) { return (a + b - 1) / b; }

// The order of causal row blocks, which cost the less the earlier they are. Pairs of a long and a short one cost the
// same; where that leaves CTAs idle in the last round, single ones, the longest first, if the heads' keys and values
// stay in L2. If they do not, a section of heads comes after the other, and every row block has a CTA of its own.
void plan_causal(const Attention& p, WgmmaAttentionPlan& plan, std::int64_t slots, int num_sms, int l2_bytes) {
  if (plan.row_blocks == 1) return;
  const int tiles = plan.items;
  const auto pairs = static_cast<int>(slots * divide_up(plan.row_blocks, 2));
  const int rounds = divide_up(pairs, num_sms);
  const std::int64_t bytes = std::int64_t{p.keys} * (p.width + p.value_width) * 2;
  plan.section = static_cast<int>(std::clamp<std::int64_t>(l2_bytes / 2 / bytes, 1, slots));
  // Tiles of keys: a row block costs one more, a CTA of its own one and a half.
  const std::int64_t both = divide_up(p.keys, 128) + divide_up(64 * plan.warpgroups, 128);
  const bool pairs_cost_less =
      std::int64_t{rounds} * num_sms * (both + 2) * 2 <= static_cast<std::int64_t>(tiles) * (both + 5);
  const bool stay = bytes * slots <= std::int64_t{l2_bytes} / 4 * 3;  // in L2
  if (pairs >= rounds * num_sms - rounds * num_sms / 10 || (!stay && pairs_cost_less)) {
    plan.paired = true, plan.section = 1;
    plan.items = pairs, plan.ctas = std::min(pairs, num_sms);
  } else if (stay) {
    plan.alternates = true, plan.section = static_cast<int>(slots);
  } else {
    plan.ctas = tiles;
  }
}

}  // namespace

WgmmaAttentionPlan plan_attention_wgmma(const Attention& p, int num_sms, int l2_bytes) {
  WgmmaAttentionPlan plan;
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return plan;
  // Not with a NaN either: it must reach the result.
  if (p.bias != nullptr || !(p.scale > 0) || p.left >= 0) return plan;
  if (p.first_query != nullptr || p.first_key != nullptr || p.used_keys != nullptr) return plan;
  if (p.queries <= kFewQueries || p.keys < 1 || p.queries > kMaxAttentionLength || p.keys > kMaxAttentionLength) {
    return plan;
  }
  const int width = std::max(p.width, p.value_width);
  if (p.width < 1 || p.value_width < 1 || width > kMaxHalfAttentionWidth) return plan;
  if (!has_tensor_map(p.query, p.queries) || !has_tensor_map(p.key, p.keys) || !has_tensor_map(p.value, p.keys)) {
    return plan;
  }
  plan.width = width <= 64 ? 64 : width <= 96 ? 96 : width <= 128 ? 128 : width <= 192 ? 192 : 256;
  const std::int64_t slots = std::int64_t{p.batch} * p.heads;
  const auto rounds = [&](int warpgroups) {
    return (slots * divide_up(p.queries, 64 * warpgroups) + num_sms - 1) / num_sms;
  };
  // The rows of the longest CTA: a third warpgroup hides more of the others, at 1.2 times their rate.
  plan.warpgroups = plan.width == 64 && rounds(3) * 30 <= rounds(2) * 24 ? 3 : 2;
  plan.row_blocks = divide_up(p.queries, 64 * plan.warpgroups);
  if (slots * plan.row_blocks > (1 << 30)) return plan;
  const auto tiles = static_cast<int>(slots * plan.row_blocks);
  // A split over the keys fills the GPU, at half of this kernel's rate.
  if (2 * tiles < num_sms && p.keys > kShortKeys && plan_attention(p, num_sms, l2_bytes).splits > 1) return plan;
  plan.items = tiles, plan.ctas = std::min(tiles, num_sms);
  if (p.right >= 0) {
    // Of three warpgroups those without rows cost nothing: in the row block that sees the fewest keys.
    if (plan.warpgroups == 3) plan.first_row = -(plan.row_blocks * 192 - p.queries) / 64 * 64;
    plan_causal(p, plan, slots, num_sms, l2_bytes);
  }
  plan.by_ctas = divisor(plan.ctas), plan.by_heads = divisor(p.heads);
  plan.by_blocks = divisor(plan.paired ? divide_up(plan.row_blocks, 2) : plan.section * plan.row_blocks);
  plan.vector_out = has_tensor_map(p.out, p.queries) && reinterpret_cast<std::uintptr_t>(p.out.data) % 16 == 0 &&
                    multiple(p.out.batch, 8) && multiple(p.out.head, 8) && multiple(p.out.row, 8) &&
                    multiple(p.value_width, 8);
  plan.valid = true;
  return plan;
}

int attention_wgmma(const Attention& problem, const WgmmaAttentionPlan& plan, Stream stream) {
  if (!plan.valid) return kNoKernel;
  Attention p = problem;
  p.right = std::min(p.right, kMaxAttentionLength);
  return p.dtype == DType::kFloat16 ? attention_wgmma_float16(p, plan, stream)
                                    : attention_wgmma_bfloat16(p, plan, stream);
}

}  // namespace untorch::kernels::cuda
