// Split-KV attention (Flash-Decoding): the tile and split choice, and the reduction over the splits.
//
//   partial_out [splits, batch, heads, queries, value_width], partial_lse [splits, batch, heads, queries], float32
//   reduction: a CTA per query row; weights exp(lse - max lse), added in the order of the splits
//
// A few queries over many keys (decode) give too few CTAs to fill the GPU, so the keys are split over CTAs. The bits
// depend on the shapes and the device alone. Roofline of the reduction: memory, 4 * value_width bytes per query and
// split, written and read once; a split of half types has at least 128 keys, so this stays below a tenth of the bytes
// of K and V. In float32 a tile of keys takes longer than the reduction, so wide heads are split by the tile: with 4
// heads of 256 and 128 queries and keys a CTA took 52 us without.
// Measured with the kernels that it follows (flash_mma_sm80.cuh).
#include <algorithm>

#include "kernels/cuda/attention/flash_tile.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kCombineThreads = 128, kCombineColumns = kMaxAttentionWidth / kCombineThreads, kMaxSplits = 128;

template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    combine_splits(const __grid_constant__ Attention p, const __grid_constant__ AttentionPlan plan) {
  const std::int64_t rows = static_cast<std::int64_t>(p.batch) * p.heads * p.queries, row = blockIdx.x;
  const int query = static_cast<int>(row % p.queries);
  const int head = static_cast<int>(row / p.queries % p.heads), batch = static_cast<int>(row / p.queries / p.heads);
  float top = minus_infinity();
  for (int s = 0; s < plan.splits; ++s) top = fmaxf(top, plan.partial_lse[s * rows + row]);
  const float base = top == minus_infinity() ? 0.0f : top;
  float total = 0, value[kCombineColumns] = {};
  const int column = static_cast<int>(threadIdx.x);
  for (int s = 0; s < plan.splits; ++s) {
    const float lse = plan.partial_lse[s * rows + row];
    if (lse == minus_infinity()) continue;  // saw no key
    const float weight = exp2_fast((lse - base) * kLog2e);
    total += weight;
    const float* from = plan.partial_out + (s * rows + row) * p.value_width;
#pragma unroll
    for (int j = 0; j < kCombineColumns; ++j) {
      if (column + j * kCombineThreads < p.value_width) {
        value[j] = fmaf(weight, from[column + j * kCombineThreads], value[j]);
      }
    }
  }
  const float inverse = total == 0 ? 0.0f : 1.0f / total;
  T* to = static_cast<T*>(p.out.data) + batch * p.out.batch + head * p.out.head + query * p.out.row;
#pragma unroll
  for (int j = 0; j < kCombineColumns; ++j) {
    if (column + j * kCombineThreads < p.value_width) to[column + j * kCombineThreads] = narrow<T>(value[j] * inverse);
  }
  if (column == 0 && p.lse != nullptr) {
    p.lse[batch * p.lse_batch + head * p.lse_head + query] = total == 0 ? p.empty_lse : base + logf(total);
  }
}

bool multiple(std::int64_t value, int of) { return value % of == 0; }
bool aligned(const void* p, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; }
int divide_up(int a, int b) { return (a + b - 1) / b; }

}  // namespace

AttentionPlan plan_attention(const Attention& p, int num_sms, int l2_bytes) {
  AttentionPlan plan;
  const bool halves = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  const int width = std::max(p.width, p.value_width), element = halves ? 2 : 4;
  if ((!halves && p.dtype != DType::kFloat32) || width > (halves ? kMaxHalfAttentionWidth : kMaxAttentionWidth)) {
    return plan;
  }
  if (p.batch < 1 || p.heads < 1 || p.kv_heads < 1 || p.heads % p.kv_heads != 0 || p.queries < 1) return plan;
  if (p.queries > kMaxAttentionLength || p.keys > kMaxAttentionLength) return plan;

  // Not with a NaN either: it must reach the result.
  plan.scaled_first = p.bias != nullptr || !(p.scale > 0);
  const int group = p.heads / p.kv_heads;
  if (group > 1 && p.queries <= 64) plan.pack = group;
  const std::int64_t rows = static_cast<std::int64_t>(p.queries) * plan.pack;
  if (rows > kMaxAttentionLength) return plan;
  const std::int64_t slots = static_cast<std::int64_t>(p.batch) * (p.heads / plan.pack);

  plan.narrow = !halves || rows <= 64 || slots * divide_up(static_cast<int>(rows), 128) < num_sms;
  plan.row_blocks = divide_up(static_cast<int>(rows), plan.narrow ? 64 : 128);
  if (slots * plan.row_blocks > 0x7fffffff) return plan;
  const int ctas = static_cast<int>(slots * plan.row_blocks);

  // CTAs resident on an SM, by registers and shared memory.
  const int resident = halves ? (plan.narrow    ? (width <= 64    ? 4
                                                   : width <= 128 ? 3
                                                                  : 2)
                                 : width <= 128 ? 2
                                                : 1)
                              : (width <= 64 ? 3 : 1);
  if (p.first_query == nullptr) {
    const int tile_keys = halves || width <= 128 ? 64 : width <= 256 ? 32 : 16;
    const int least = halves || width <= 64 ? 128 : tile_keys;
    const int at_most = std::min(kMaxSplits, divide_up(p.keys, tile_keys) * tile_keys / least);
    plan.splits = std::max(1, std::min(num_sms * resident / ctas, at_most));
  }
  if (p.right >= 0) {
    const std::int64_t bytes = static_cast<std::int64_t>(std::max(p.keys, 1)) * (p.width + p.value_width) * element;
    plan.section =
        static_cast<int>(std::clamp<std::int64_t>(l2_bytes / 2 / std::max<std::int64_t>(bytes, 1), 1, slots));
  }

  const int lanes = 16 / element;
  plan.vector_out = aligned(p.out.data, 16) && multiple(p.out.batch, lanes) && multiple(p.out.head, lanes) &&
                    multiple(p.out.row, lanes) && multiple(p.value_width, lanes);
  plan.bias_pairs = p.bias != nullptr && aligned(p.bias, 4) && p.bias_key == 1 && multiple(p.bias_batch, 2) &&
                    multiple(p.bias_head, 2) && multiple(p.bias_row, 2);
  if (plan.splits > 1) {
    const auto parts = static_cast<std::size_t>(plan.splits) * p.batch * p.heads * p.queries;
    plan.scratch_bytes = parts * (p.value_width + 1) * sizeof(float);
  }
  plan.valid = true;
  return plan;
}

int attention(const Attention& problem, AttentionPlan plan, void* scratch, Stream stream) {
  if (!plan.valid) return kNoKernel;
  Attention p = problem;
  p.left = std::min(p.left, kMaxAttentionLength);
  p.right = std::min(p.right, kMaxAttentionLength);
  const std::int64_t rows = static_cast<std::int64_t>(p.batch) * p.heads * p.queries;
  if (plan.splits > 1) {
    plan.partial_out = static_cast<float*>(scratch);
    plan.partial_lse = plan.partial_out + plan.splits * rows * p.value_width;
  }
  int code = kNoKernel;
  switch (p.dtype) {
    case DType::kFloat16:
      code = plan.scaled_first ? attention_float16_bias(p, plan, stream) : attention_float16(p, plan, stream);
      break;
    case DType::kBFloat16:
      code = plan.scaled_first ? attention_bfloat16_bias(p, plan, stream) : attention_bfloat16(p, plan, stream);
      break;
    case DType::kFloat32:
      code = attention_float32(p, plan, stream);
      break;
    default:
      break;
  }
  if (code != 0 || plan.splits == 1) return code;
  const auto ctas = static_cast<unsigned>(rows);
  switch (p.dtype) {
    case DType::kFloat16:
      combine_splits<__half><<<ctas, kCombineThreads, 0, stream>>>(p, plan);
      break;
    case DType::kBFloat16:
      combine_splits<__nv_bfloat16><<<ctas, kCombineThreads, 0, stream>>>(p, plan);
      break;
    default:
      combine_splits<float><<<ctas, kCombineThreads, 0, stream>>>(p, plan);
      break;
  }
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
