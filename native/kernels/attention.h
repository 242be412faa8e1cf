// Scaled dot-product attention, forward: softmax(scale * q @ kᵀ + bias, over the visible keys) @ v. The two devices
// take different problems: the CPU any strides and float64, CUDA 16-byte rows, packed sequences and sliding windows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention/attention.h"  // the CPU's problem
#include "kernels/divisor.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

inline constexpr int kMaxAttentionWidth = 512, kMaxHalfAttentionWidth = 256;  // in float32, in half types
inline constexpr int kMaxAttentionLength = 1 << 29;  // queries (times the heads that share a tile), keys, limits

// Rows of heads: element (batch, head, row, i) lies at data + batch * … + head * … + row * … + i.
struct Heads {
  void* data = nullptr;
  std::int64_t batch = 0, head = 0, row = 0;  // strides in elements
};

struct Attention {
  DType dtype{};  // of query, key, value, bias and out: float16, bfloat16 or float32
  int batch = 0, heads = 0, kv_heads = 0;
  int queries = 0, keys = 0;       // with cumulative lengths: the longest sequence
  int width = 0, value_width = 0;  // at most kMaxAttentionWidth
  Heads query, key, value;         // 16-byte aligned, strides a multiple of 16 bytes
  Heads out;                       // any alignment
  const void* bias = nullptr;      // added before the softmax; null: none
  std::int64_t bias_batch = 0, bias_head = 0, bias_row = 0, bias_key = 0;
  float* lse = nullptr;                      // log of the softmax's denominator, natural; null: not wanted
  std::int64_t lse_batch = 0, lse_head = 0;  // a batch stride of 0: the sequences are packed there too
  int lse_rows = 0;     // those beyond the queries are set to +infinity (padding of the memory-efficient one)
  float empty_lse = 0;  // for a row that sees no key; its result is 0
  std::uint64_t* random_state = nullptr;  // three words to set to 0: without dropout there is no state
  float scale = 1;
  // Query i sees the keys from i + shift - left to i + shift + right; -1: no limit. The shift is 0, or keys - queries
  // when the diagonal ends in the bottom right corner.
  int left = -1, right = -1;
  bool bottom_right = false;
  // Sequences of different lengths, packed along the rows: [batch + 1] first rows. The batch strides are 0 then.
  const std::int32_t* first_query = nullptr;
  const std::int32_t* first_key = nullptr;
  const std::int32_t* used_keys = nullptr;  // [batch]: only the first so many keys count
};

// The tile and split-KV choice, and what the kernels need besides the problem.
struct AttentionPlan {
  bool valid = false;
  bool narrow = false;        // tiles of 64 query rows instead of 128
  bool scaled_first = false;  // the kernel that scales before it takes the maximum: with a bias, or a scale <= 0
  int pack = 1;               // query heads of one key head that share a row block (GQA packing)
  int row_blocks = 0, splits = 1;
  int section = 1;  // heads in flight together: causal CTAs run from the longest to the shortest among them
  bool vector_out = false, bias_pairs = false;
  float* partial_out = nullptr;  // [splits, batch, heads, queries, value_width]
  float* partial_lse = nullptr;  // [splits, batch, heads, queries]
  std::size_t scratch_bytes = 0;
};

// Invalid when a dtype, a width or a size is beyond what the kernels take. Depends on the shapes and the device alone,
// so that the same call gives the same bits.
AttentionPlan plan_attention(const Attention& problem, int num_sms, int l2_bytes);
// scratch: plan.scratch_bytes of device memory (null when 0).
int attention(const Attention& problem, AttentionPlan plan, void* scratch, Stream stream);

// The tile and the schedule of the WGMMA kernel, for compute capability 9.0.
struct WgmmaAttentionPlan {
  bool valid = false;  // false: the problem is for attention()
  int width = 0;       // the kernel's: 64, 96, 128, 192 or 256
  int warpgroups = 0;  // consumers, of 64 query rows each
  int row_blocks = 0;
  int first_row = 0;    // of the first row block: 0, or warpgroups without rows in it, 64 each, below 0
  bool paired = false;  // an item of a CTA's work is two row blocks of a head, a long and a short one; else one
  int items = 0, ctas = 0;
  Divisor by_ctas, by_heads, by_blocks;  // by_blocks: the items of a head, or of a section of heads
  bool alternates = false;               // every second round of items goes from the last CTA to the first
  int section = 1;                       // heads in flight together, where a CTA takes one row block
  bool vector_out = false;
};

// Valid for many queries in float16 or bfloat16 without a bias, a left limit or packed sequences, with a positive
// scale. Depends on the shapes and the device alone.
WgmmaAttentionPlan plan_attention_wgmma(const Attention& problem, int num_sms, int l2_bytes);
int attention_wgmma(const Attention& problem, const WgmmaAttentionPlan& plan, Stream stream);

}  // namespace untorch::kernels::cuda
