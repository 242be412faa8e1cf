// untorch::paged_attention: writes new keys and values into the pool, then attends over each sequence's pages.
#include "kernels/paged_attention.h"

#include <cmath>
#include <cstdint>
#include <utility>

#include "shims/op.h"

namespace untorch::shims {
namespace {

constexpr std::int64_t kBlockUnit = 16;
constexpr std::int64_t kCodesAlignment = 16;  // bytes
constexpr std::int64_t kScaleBytes = 2;

void check_argument(const Op& op, const char* name, const Tensor& tensor, DType dtype, const Dims& shape) {
  check(tensor.dtype() == dtype, op, ": argument '", name, "' must be ", dtype_name(dtype), ", got ",
        dtype_name(tensor.dtype()));
  check(tensor.sizes() == shape, op, ": argument '", name, "' must have shape ", to_string(shape), ", got ",
        to_string(tensor.sizes()));
}

// [tokens, heads, width] whose last dimension is dense; a copy where it is not.
TensorPtr dense_rows(const Tensor& x) {
  return x.size(2) <= 1 || x.stride(2) == 1 ? std::make_unique<Tensor>(x) : clone_contiguous(x);
}

}  // namespace

// q [tokens, heads, width]; k and v [tokens, heads_kv, width or width_v], or both null: the pool is read only. pool
// [blocks, elements], of which a layer has heads_kv · block · (width + width_v) from `offset` on; written in place. A
// pool of int8 or float8_e4m3fn has codes, and behind them heads_kv · block scales of K and of V in bfloat16.
// block_table [sequences, columns], cu_seqlens_q [sequences + 1], seqlens_k [sequences], all int32; slot_mapping int64
// [tokens]; sinks and alibi float32 [heads]. Gives [tokens, heads, width_v].
UNTORCH_SHIM aoti_torch_cpu_paged_attention(AtenTensorHandle q, AtenTensorHandle* k, AtenTensorHandle* v,
                                            AtenTensorHandle pool, AtenTensorHandle block_table,
                                            AtenTensorHandle cu_seqlens_q, AtenTensorHandle seqlens_k,
                                            AtenTensorHandle slot_mapping, AtenTensorHandle* sinks,
                                            AtenTensorHandle* alibi, std::int64_t offset, std::int64_t block,
                                            std::int64_t heads_kv, std::int64_t width, std::int64_t width_v,
                                            double scale, std::int64_t window, std::int64_t chunk, double softcap,
                                            AtenTensorHandle* ret0) {
  constexpr Op op{"paged_attention", DeviceType::kCPU};
  return guarded(op, [&] {
    const Tensor &query = op.input(q, "q"), &pages = op.input(pool, "pool"),
                 &table = op.input(block_table, "block_table");
    const Tensor &ends = op.input(cu_seqlens_q, "cu_seqlens_q"), &lengths = op.input(seqlens_k, "seqlens_k");
    const Tensor& places = op.input(slot_mapping, "slot_mapping");
    const Tensor *key = op.optional_input(k, "k"), *value = op.optional_input(v, "v");
    const Tensor *sink = op.optional_input(sinks, "sinks"), *slope = op.optional_input(alibi, "alibi");
    const DType dtype = query.dtype();
    check(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16, op,
          ": argument 'q' must be float32, bfloat16 or float16, got ", dtype_name(dtype));
    check(query.dim() == 3, op, ": argument 'q' must be [tokens, heads, width], got shape ", to_string(query.sizes()));
    const std::int64_t tokens = query.size(0), heads = query.size(1);
    check(heads_kv > 0 && heads % heads_kv == 0, op, ": ", heads, " heads do not divide into ", heads_kv, " KV heads");
    check(width > 0 && width_v > 0 && query.size(2) == width, op, ": argument 'q' has width ", query.size(2),
          ", expected ", width);
    check(block > 0 && block % kBlockUnit == 0, op, ": argument 'block' must be a multiple of ", kBlockUnit, ", got ",
          block);
    check(window >= 0 && chunk >= 0, op, ": 'window' and 'chunk' must not be negative, got ", window, " and ", chunk);
    check((key == nullptr) == (value == nullptr), op, ": 'k' and 'v' must be both given or both absent");
    const bool has_codes = pages.dtype() == DType::kInt8 || pages.dtype() == DType::kFloat8E4M3FN;
    check(pages.dim() == 2 && (has_codes || pages.dtype() == dtype), op, ": argument 'pool' must be ",
          dtype_name(dtype), ", int8 or float8_e4m3fn [blocks, elements], got ", dtype_name(pages.dtype()), " ",
          to_string(pages.sizes()));
    check(pages.size(1) <= 1 || pages.stride(1) == 1, op, ": argument 'pool' must have dense blocks");
    check(!has_codes || (offset % kCodesAlignment == 0 && pages.stride(0) % kCodesAlignment == 0), op,
          ": the offset and the pool's stride must be multiples of ", kCodesAlignment, " in ",
          dtype_name(pages.dtype()), ", got ", offset, " and ", pages.stride(0));
    check(!has_codes || reinterpret_cast<std::uintptr_t>(pages.raw()) % kCodesAlignment == 0, op,
          ": argument 'pool' must begin at a multiple of ", kCodesAlignment, " bytes");
    const std::int64_t needed = heads_kv * block * (width + width_v + (has_codes ? 2 * kScaleBytes : 0));
    check(offset >= 0 && offset <= pages.size(1) && needed <= pages.size(1) - offset, op, ": the pool's blocks have ",
          pages.size(1), " elements, and the layer needs ", needed, " from ", offset, " on");
    check(table.dim() == 2, op, ": argument 'block_table' must be [sequences, columns], got shape ",
          to_string(table.sizes()));
    const std::int64_t sequences = table.size(0);
    check_argument(op, "block_table", table, DType::kInt32, Dims{sequences, table.size(1)});
    check_argument(op, "cu_seqlens_q", ends, DType::kInt32, Dims{sequences + 1});
    check_argument(op, "seqlens_k", lengths, DType::kInt32, Dims{sequences});
    check_argument(op, "slot_mapping", places, DType::kInt64, Dims{tokens});
    if (key != nullptr) {
      check_argument(op, "k", *key, dtype, Dims{tokens, heads_kv, width});
      check_argument(op, "v", *value, dtype, Dims{tokens, heads_kv, width_v});
    }
    if (sink != nullptr) check_argument(op, "sinks", *sink, DType::kFloat32, Dims{heads});
    if (slope != nullptr) check_argument(op, "alibi", *slope, DType::kFloat32, Dims{heads});
    const TensorPtr rows = dense_rows(query);
    const TensorPtr new_keys = key == nullptr ? nullptr : dense_rows(*key),
                    new_values = value == nullptr ? nullptr : dense_rows(*value);
    const TensorPtr pages_of = contiguous(table), ends_of = contiguous(ends), lengths_of = contiguous(lengths),
                    slots = contiguous(places);
    const TensorPtr logits = sink == nullptr ? nullptr : contiguous(*sink),
                    slopes = slope == nullptr ? nullptr : contiguous(*slope);
    TensorPtr out = Tensor::empty(Dims{tokens, heads, width_v}, dtype);
    const kernels::PagedAttention problem{.dtype = dtype,
                                          .pool_dtype = pages.dtype(),
                                          .tokens = tokens,
                                          .sequences = sequences,
                                          .heads = heads,
                                          .kv_heads = heads_kv,
                                          .width = width,
                                          .width_v = width_v,
                                          .scale = static_cast<float>(scale),
                                          .softcap = static_cast<float>(softcap),
                                          .window = window,
                                          .chunk = chunk,
                                          .q = rows->raw(),
                                          .q_token = rows->stride(0),
                                          .q_head = rows->stride(1),
                                          .k = key == nullptr ? nullptr : new_keys->raw(),
                                          .v = key == nullptr ? nullptr : new_values->raw(),
                                          .k_token = key == nullptr ? 0 : new_keys->stride(0),
                                          .k_head = key == nullptr ? 0 : new_keys->stride(1),
                                          .v_token = key == nullptr ? 0 : new_values->stride(0),
                                          .v_head = key == nullptr ? 0 : new_values->stride(1),
                                          .pool = pages.raw(),
                                          .blocks = pages.size(0),
                                          .pool_block = pages.size(0) > 1 ? pages.stride(0) : pages.size(1),
                                          .offset = offset,
                                          .block = block,
                                          .block_table = pages_of->data<std::int32_t>(),
                                          .table_columns = table.size(1),
                                          .cu_seqlens_q = ends_of->data<std::int32_t>(),
                                          .seqlens_k = lengths_of->data<std::int32_t>(),
                                          .slots = slots->data<std::int64_t>(),
                                          .sinks = sink == nullptr ? nullptr : logits->data<float>(),
                                          .alibi = slope == nullptr ? nullptr : slopes->data<float>(),
                                          .out = out->raw()};
    if (const kernels::cpu::PagedFault fault = kernels::cpu::check_paged(problem); fault.argument != nullptr) {
      throw_error(ErrorKind::kInvalidArgument, op, ": argument '", fault.argument, "' has a wrong value at ",
                  fault.index, ": ", fault.value);
    }
    kernels::cpu::paged_attention(problem);
    give(ret0, std::move(out), op);
  });
}

}  // namespace untorch::shims
