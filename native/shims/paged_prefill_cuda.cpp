// untorch::paged_prefill and paged_prefill_decode: attention of a step over a paged KV cache by the kernels of sm_90,
// of its prompts (WGMMA) or of all of it.
#include <cstdint>
#include <limits>

#include "cuda/driver.h"
#include "kernels/paged_prefill.h"
#include "shims/destination.h"
#include "shims/op.h"

namespace untorch::shims {
namespace {

constexpr std::int64_t kBlockUnit = 16, kWidthUnit = 8;

void check_lengths(const Op& op, const char* name, const Tensor& tensor, const Dims& shape) {
  check(tensor.dtype() == DType::kInt32 && tensor.sizes() == shape && tensor.is_contiguous(), op, ": argument '", name,
        "' must be int32, contiguous, of shape ", to_string(shape), ", got ", dtype_name(tensor.dtype()), " ",
        to_string(tensor.sizes()));
}

int narrowed(const Op& op, const char* name, std::int64_t value) {
  check(value >= 0 && value <= std::numeric_limits<std::int32_t>::max(), op, ": argument '", name,
        "' must be a number from 0 to 2^31 - 1, got ", value);
  return static_cast<int>(value);
}

struct Arguments {
  AtenTensorHandle q, pool, block_table, cu_seqlens_q, seqlens_k;
  AtenTensorHandle* sinks;
  AtenTensorHandle offset;
  std::int64_t block, heads_kv;
  double scale;
  std::int64_t window, chunk, few;
};

// `into` null: new memory. decodes: the sequences that are no prompts, too.
TensorPtr paged_prefill(const Op& op, const Arguments& in, bool decodes, const Tensor* into) {
  const Tensor &query = op.input(in.q, "q"), &pool = op.input(in.pool, "pool"),
               &table = op.input(in.block_table, "block_table"), &ends = op.input(in.cu_seqlens_q, "cu_seqlens_q"),
               &lengths = op.input(in.seqlens_k, "seqlens_k"), &offset = op.input(in.offset, "offset");
  const Tensor* const sinks = op.optional_input(in.sinks, "sinks");
  const DType dtype = query.dtype();
  check((dtype == DType::kBFloat16 || dtype == DType::kFloat16) && query.dim() == 3 && query.is_contiguous(), op,
        ": argument 'q' must be bfloat16 or float16, contiguous, [tokens, heads, width], got ", dtype_name(dtype), " ",
        to_string(query.sizes()));
  const std::int64_t tokens = query.size(0), heads = query.size(1), width = query.size(2);
  check(width > 0 && width % kWidthUnit == 0 && width <= kernels::cuda::kMaxPagedPrefillWidth, op,
        ": argument 'q' must have a width that is a multiple of ", kWidthUnit, ", at most ",
        kernels::cuda::kMaxPagedPrefillWidth, ", got ", width);
  check(in.heads_kv > 0 && heads % in.heads_kv == 0, op, ": ", heads, " heads do not divide into ", in.heads_kv,
        " KV heads");
  check(in.block > 0 && in.block % kBlockUnit == 0, op, ": argument 'block' must be a multiple of ", kBlockUnit,
        ", got ", in.block);
  check(pool.dtype() == dtype && pool.dim() == 2 && (pool.size(1) <= 1 || pool.stride(1) == 1), op,
        ": argument 'pool' must be ", dtype_name(dtype), " [blocks, elements] with dense blocks, got ",
        dtype_name(pool.dtype()), " ", to_string(pool.sizes()));
  const std::int64_t pool_block = pool.size(0) > 1 ? pool.stride(0) : pool.size(1);
  check(pool.size(0) > 0 && pool_block % width == 0 && pool.size(1) >= 2 * in.heads_kv * in.block * width, op,
        ": argument 'pool' must have blocks of a multiple of ", width, " elements, with room for ",
        2 * in.heads_kv * in.block * width, ", got ", pool.size(0), " of ", pool.size(1), " with a stride of ",
        pool_block);
  check(offset.dtype() == DType::kInt64 && offset.numel() == 1, op, ": argument 'offset' must be one int64, got ",
        dtype_name(offset.dtype()), " ", to_string(offset.sizes()));
  check(table.dim() == 2, op, ": argument 'block_table' must be [sequences, columns], got shape ",
        to_string(table.sizes()));
  check(in.scale > 0, op, ": argument 'scale' must be positive, got ", in.scale);
  const std::int64_t sequences = table.size(0);
  check_lengths(op, "block_table", table, Dims{sequences, table.size(1)});
  check_lengths(op, "cu_seqlens_q", ends, Dims{sequences + 1});
  check_lengths(op, "seqlens_k", lengths, Dims{sequences});
  check(sinks == nullptr ||
            (sinks->dtype() == DType::kFloat32 && sinks->sizes() == Dims{heads} && sinks->is_contiguous()),
        op, ": argument 'sinks' must be float32, contiguous, of shape ", to_string(Dims{heads}));
  check(!decodes || kernels::cuda::takes_paged_decode(width, heads / in.heads_kv, in.few), op,
        ": expected a width of 64 or 128, at most 8 heads for each KV head, and 'few' above 0, got ", width, ", ",
        heads / in.heads_kv, " and ", in.few);
  const OnDevice on(op, query, {&pool, &table, &ends, &lengths, &offset, sinks});
  const cuda::DeviceProperties& gpu = on.properties();
  check(gpu.major == 9 && gpu.minor == 0, op, ": the kernel is for GPUs of compute capability 9.0, ", gpu.name, " has ",
        gpu.major, ".", gpu.minor);
  TensorPtr out = destination(op, into, query.sizes(), dtype, on.device());
  const bool has_prompts = tokens > sequences;
  if (heads == 0 || tokens == 0 || !(has_prompts || decodes)) return out;
  kernels::cuda::PagedPrefill p;
  p.dtype = dtype, p.tokens = tokens, p.sequences = sequences;
  p.heads = narrowed(op, "heads", heads), p.kv_heads = narrowed(op, "heads_kv", in.heads_kv);
  p.width = static_cast<int>(width), p.scale = static_cast<float>(in.scale);
  p.window = narrowed(op, "window", in.window), p.chunk = narrowed(op, "chunk", in.chunk);
  p.few = narrowed(op, "few", in.few), p.block = narrowed(op, "block", in.block);
  p.q = query.raw(), p.out = out->raw(), p.pool = pool.raw();
  p.blocks = pool.size(0), p.pool_block = pool_block;
  p.offset = offset.data<std::int64_t>();
  p.block_table = table.data<std::int32_t>(), p.table_columns = table.size(1);
  p.cu_seqlens_q = ends.data<std::int32_t>(), p.seqlens_k = lengths.data<std::int32_t>();
  if (sinks != nullptr) p.sinks = sinks->data<float>();
  const kernels::cuda::PagedPrefillPlan plan = kernels::cuda::plan_paged_prefill(p, gpu.num_sms);
  check(plan.valid, op, ": q ", to_string(query.sizes()), " and a pool ", to_string(pool.sizes()), " at ", query.raw(),
        " and ", pool.raw(), " are larger than the kernel takes, or not aligned to 16 bytes");
  if (has_prompts) {
    const StorageRef counter = on.scratch(sizeof(std::uint32_t));
    p.counter = static_cast<std::uint32_t*>(counter->data());
    cuda::check_driver(cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(p.counter), 0,
                                                      sizeof(std::uint32_t), on.stream()),
                       op);
    on.launched(kernels::cuda::paged_prefill(p, plan, on.stream()));
  }
  if (decodes) {
    kernels::cuda::PagedDecodePlan decode = kernels::cuda::plan_paged_decode(p, gpu.num_sms);
    check(decode.valid, op, ": ", sequences, " sequences and ", tokens, " tokens are more than the kernel takes");
    decode.pdl = gpu.has_pdl;
    on.launched(kernels::cuda::paged_decode(p, decode, on.stream()));
  }
  return out;
}

}  // namespace

// q [tokens, heads, width], bfloat16 or float16; pool [blocks, elements] of the same dtype, of which a layer has
// K [heads_kv, block, width] and V of the same shape from the element in `offset` on, int64 on the GPU, a multiple of
// width. block_table [sequences, columns], cu_seqlens_q [sequences + 1], seqlens_k [sequences], int32; sinks float32
// [heads] or null. Gives [tokens, heads, width], in which rows of sequences of at most `few` tokens are not written,
// nor those behind the last sequence; with no more tokens than sequences, none is.
UNTORCH_SHIM aoti_torch_cuda_paged_prefill(AtenTensorHandle q, AtenTensorHandle pool, AtenTensorHandle block_table,
                                           AtenTensorHandle cu_seqlens_q, AtenTensorHandle seqlens_k,
                                           AtenTensorHandle* sinks, AtenTensorHandle offset, std::int64_t block,
                                           std::int64_t heads_kv, double scale, std::int64_t window, std::int64_t chunk,
                                           std::int64_t few, AtenTensorHandle* ret0) {
  constexpr Op op{"paged_prefill", DeviceType::kCUDA};
  return guarded(op, [&] {
    check_interrupt();
    check(ret0 != nullptr, op, ": output pointer is null");
    give(ret0,
         paged_prefill(
             op,
             {q, pool, block_table, cu_seqlens_q, seqlens_k, sinks, offset, block, heads_kv, scale, window, chunk, few},
             false, nullptr),
         op);
  });
}

// The same into memory of the caller, on the device of q.
UNTORCH_SHIM untorch_paged_prefill(AtenTensorHandle out, AtenTensorHandle q, AtenTensorHandle pool,
                                   AtenTensorHandle block_table, AtenTensorHandle cu_seqlens_q,
                                   AtenTensorHandle seqlens_k, AtenTensorHandle* sinks, AtenTensorHandle offset,
                                   std::int64_t block, std::int64_t heads_kv, double scale, std::int64_t window,
                                   std::int64_t chunk, std::int64_t few) {
  constexpr Op op{"paged_prefill", DeviceType::kCUDA};
  return guarded(op, [&] {
    (void)op.input(q, "q");
    const FromTorch relaxed(op);
    (void)paged_prefill(
        op, {q, pool, block_table, cu_seqlens_q, seqlens_k, sinks, offset, block, heads_kv, scale, window, chunk, few},
        false, &op.input(out, "out"));
  });
}

// The same with all sequences, for widths of 64 and 128 and at most 8 heads for each KV head: rows behind the last
// sequence are zeros. `decoded` 0: as paged_prefill.
UNTORCH_SHIM aoti_torch_cuda_paged_prefill_decode(AtenTensorHandle q, AtenTensorHandle pool,
                                                  AtenTensorHandle block_table, AtenTensorHandle cu_seqlens_q,
                                                  AtenTensorHandle seqlens_k, AtenTensorHandle* sinks,
                                                  AtenTensorHandle offset, std::int64_t block, std::int64_t heads_kv,
                                                  double scale, std::int64_t window, std::int64_t chunk,
                                                  std::int64_t few, std::int64_t decoded, AtenTensorHandle* ret0) {
  constexpr Op op{"paged_prefill_decode", DeviceType::kCUDA};
  return guarded(op, [&] {
    check_interrupt();
    check(ret0 != nullptr, op, ": output pointer is null");
    give(ret0,
         paged_prefill(
             op,
             {q, pool, block_table, cu_seqlens_q, seqlens_k, sinks, offset, block, heads_kv, scale, window, chunk, few},
             decoded != 0, nullptr),
         op);
  });
}

// That into memory of the caller.
UNTORCH_SHIM untorch_paged_prefill_decode(AtenTensorHandle out, AtenTensorHandle q, AtenTensorHandle pool,
                                          AtenTensorHandle block_table, AtenTensorHandle cu_seqlens_q,
                                          AtenTensorHandle seqlens_k, AtenTensorHandle* sinks, AtenTensorHandle offset,
                                          std::int64_t block, std::int64_t heads_kv, double scale, std::int64_t window,
                                          std::int64_t chunk, std::int64_t few, std::int64_t decoded) {
  constexpr Op op{"paged_prefill_decode", DeviceType::kCUDA};
  return guarded(op, [&] {
    (void)op.input(q, "q");
    const FromTorch relaxed(op);
    (void)paged_prefill(
        op, {q, pool, block_table, cu_seqlens_q, seqlens_k, sinks, offset, block, heads_kv, scale, window, chunk, few},
        decoded != 0, &op.input(out, "out"));
  });
}

}  // namespace untorch::shims
