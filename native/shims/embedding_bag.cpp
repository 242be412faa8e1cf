// embedding_bag: rows of a table summed, averaged or maximised over bags of indices. The four results are PyTorch's on
// each device: the rows; the bag of each index; the size of each bag; the winning row of a maximum.
#include "kernels/embedding_bag.h"

#include <algorithm>

#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::BagMode;
using kernels::EmbeddingBag;

namespace {

constexpr const char* kOp = "_embedding_bag";

struct Arguments {
  const Tensor &weight, &indices, &offsets;
  BagMode mode;
  const Tensor* per_sample;
  bool last_offset;  // the offsets end with the number of indices
  std::int64_t padding_idx;
  DType index_dtype;  // of the results

  std::int64_t bags() const { return offsets.size(0) - (last_offset ? 1 : 0); }
};

struct Results {
  TensorPtr out, bag_of_index, bag_size, winners;
};

void check_arguments(const Op& op, const Arguments& a, std::int64_t mode) {
  check(a.weight.dim() == 2, op, ": argument 'weight' must be 2-D, got shape ", to_string(a.weight.sizes()));
  check(a.indices.dim() == 1, op, ": argument 'indices' must be 1-D, got shape ", to_string(a.indices.sizes()));
  check(a.offsets.dim() == 1, op, ": argument 'offsets' must be 1-D, got shape ", to_string(a.offsets.sizes()));
  for (const auto& [tensor, name] : {std::pair{&a.indices, "indices"}, std::pair{&a.offsets, "offsets"}}) {
    check(tensor->dtype() == DType::kInt32 || tensor->dtype() == DType::kInt64, op, ": argument '", name,
          "' must be int32 or int64, got ", dtype_name(tensor->dtype()));
  }
  if (!is_floating(a.weight.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(a.weight.dtype()),
                " is not supported, expected a floating type");
  }
  check(mode >= 0 && mode <= 2, op, ": argument 'mode' must be 0 (sum), 1 (mean) or 2 (max), got ", mode);
  if (const Tensor* const scales = a.per_sample; scales != nullptr) {
    check(mode == 0, op, ": argument 'per_sample_weights' goes with mode 0 (sum) only, got mode ", mode);
    check(scales->dtype() == a.weight.dtype(), op, ": argument 'per_sample_weights' must be ",
          dtype_name(a.weight.dtype()), " like weight, got ", dtype_name(scales->dtype()));
    check(scales->dim() == 1 && scales->size(0) == a.indices.size(0), op,
          ": argument 'per_sample_weights' must have shape ", to_string(a.indices.sizes()), ", got ",
          to_string(scales->sizes()));
  }
  // -1 means none: PyTorch's Python side has wrapped negative rows already.
  const std::int64_t rows = a.weight.size(0);
  check(a.padding_idx >= -rows && a.padding_idx < std::max<std::int64_t>(rows, 1), op,
        ": argument 'padding_idx' must be inside of the table's ", rows, " rows, got ", a.padding_idx);
  check(!a.last_offset || a.offsets.size(0) > 0, op,
        ": argument 'offsets' must hold at least one value with include_last_offset");
}

// All but the results. `rows` and `starts`: indices and offsets in one dtype.
EmbeddingBag bag_params(const Arguments& a, const Tensor& rows, const Tensor& starts) {
  EmbeddingBag params;
  params.table = a.weight.raw();
  params.rows = a.weight.size(0);
  params.width = a.weight.size(1);
  params.row_stride = a.weight.stride(0);
  params.column_stride = a.weight.stride(1);
  params.indices = rows.raw();
  params.offsets = starts.raw();
  params.wide = rows.dtype() == DType::kInt64;
  params.index_count = a.indices.size(0);
  params.bags = a.bags();
  params.scales = a.per_sample == nullptr ? nullptr : a.per_sample->raw();
  params.scale_stride = a.per_sample == nullptr ? 0 : a.per_sample->stride(0);
  params.padding = a.padding_idx;
  return params;
}

// All but the rows feed the backward pass. A plain sum over rows without gaps leaves them empty or zero.
Results on_cpu(const Arguments& a, bool forward_only) {
  const TensorPtr rows = to_dtype(a.indices, DType::kInt64), starts = to_dtype(a.offsets, DType::kInt64);
  const bool fast = a.mode == BagMode::kSum && a.padding_idx < 0 && a.weight.stride(1) == 1 &&
                    (a.per_sample == nullptr || a.per_sample->stride(0) == 1) && a.weight.dtype() != DType::kFloat64;
  const Dims each{a.bags()}, table{a.bags(), a.weight.size(1)};
  Results out;
  out.out = Tensor::empty(table, a.weight.dtype());
  const TensorPtr bag_of_index = Tensor::zeros(fast ? Dims{0} : a.indices.sizes(), DType::kInt64),
                  used = Tensor::empty(each, DType::kInt64),
                  winners = Tensor::zeros(a.mode == BagMode::kMax ? table : Dims{0}, DType::kInt64);
  EmbeddingBag params = bag_params(a, *rows, *starts);
  params.out = out.out->raw();
  params.bag_of_index = fast ? nullptr : bag_of_index->raw();
  params.bag_size = used->raw();
  params.winners = winners->raw();
  kernels::cpu::embedding_bag(params, a.mode, a.weight.dtype(), a.last_offset);
  out.bag_of_index = to_dtype(*bag_of_index, a.index_dtype);
  if (a.mode == BagMode::kSum) {
    out.bag_size = Tensor::zeros(forward_only ? a.offsets.sizes() : each, a.index_dtype);
  } else {
    out.bag_size = to_dtype(*used, a.index_dtype);
  }
  out.winners = a.mode == BagMode::kMax ? to_dtype(*winners, a.index_dtype) : clone_contiguous(*out.bag_size);
  return out;
}

[[maybe_unused]] Results on_cuda(const OnDevice& on, const Arguments& a) {
  const TensorPtr rows = to_dtype(a.indices, a.index_dtype), starts = to_dtype(a.offsets, a.index_dtype);
  const Dims table{a.bags(), a.weight.size(1)};
  Results out;
  out.out = Tensor::empty(table, a.weight.dtype(), on.device());
  // Zeros where no bag comes by: before the first offset after a fault, and the entry after the last bag.
  out.bag_of_index = Tensor::zeros(a.indices.sizes(), a.index_dtype, on.device());
  out.bag_size = Tensor::zeros(a.offsets.sizes(), a.index_dtype, on.device());
  out.winners = Tensor::empty(a.mode == BagMode::kMax ? table : Dims{0}, a.index_dtype, on.device());
  EmbeddingBag params = bag_params(a, *rows, *starts);
  params.out = out.out->raw();
  params.bag_of_index = out.bag_of_index->raw();
  params.bag_size = out.bag_size->raw();
  params.winners = out.winners->raw();
  on.launched(kernels::cuda::embedding_bag(params, a.mode, a.weight.dtype(), on.faults(), on.stream()));
  return out;
}

void embedding_bag(const Op& op, AtenTensorHandle weight, AtenTensorHandle indices, AtenTensorHandle offsets,
                   std::int64_t mode, AtenTensorHandle* per_sample_weights, bool last_offset, std::int64_t padding_idx,
                   bool forward_only, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2,
                   AtenTensorHandle* ret3) {
  const Tensor &ix = op.input(indices, "indices"), &cuts = op.input(offsets, "offsets");
  const bool wide = ix.dtype() == DType::kInt64 || cuts.dtype() == DType::kInt64;
  const Arguments a{op.input(weight, "weight"),
                    ix,
                    cuts,
                    static_cast<BagMode>(mode),
                    op.optional_input(per_sample_weights, "per_sample_weights"),
                    last_offset,
                    padding_idx,
                    wide ? DType::kInt64 : DType::kInt32};
  check_arguments(op, a, mode);
  check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr && ret3 != nullptr, op, ": output pointer is null");
  Results results;
  run(
      op, {&a.weight, &ix, &cuts, a.per_sample}, [&] { results = on_cpu(a, forward_only); },
      [&](const auto& on) { results = on_cuda(on, a); });
  give(ret0, std::move(results.out), op);
  give(ret1, std::move(results.bag_of_index), op);
  give(ret2, std::move(results.bag_size), op);
  give(ret3, std::move(results.winners), op);
}

}  // namespace

// Two of the arguments are for the backward pass alone.
#define UNTORCH_EMBEDDING_BAG(name, forward_only)                                                                 \
  UNTORCH_OP_AS(                                                                                                  \
      "_embedding_bag", name,                                                                                     \
      (AtenTensorHandle weight, AtenTensorHandle indices, AtenTensorHandle offsets,                               \
       [[maybe_unused]] std::int32_t scale_grad_by_freq, std::int64_t mode, [[maybe_unused]] std::int32_t sparse, \
       AtenTensorHandle * per_sample_weights, std::int32_t include_last_offset, std::int64_t padding_idx,         \
       AtenTensorHandle * ret0, AtenTensorHandle * ret1, AtenTensorHandle * ret2, AtenTensorHandle * ret3),       \
      weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset,        \
      padding_idx, ret0, ret1, ret2, ret3) {                                                                      \
    embedding_bag(op, weight, indices, offsets, mode, per_sample_weights, include_last_offset != 0, padding_idx,  \
                  forward_only, ret0, ret1, ret2, ret3);                                                          \
  }
UNTORCH_EMBEDDING_BAG(_embedding_bag, false)
UNTORCH_EMBEDDING_BAG(_embedding_bag_forward_only, true)
#undef UNTORCH_EMBEDDING_BAG

UNTORCH_SHIM aoti_torch__embedding_bag(AtenTensorHandle weight, AtenTensorHandle indices, AtenTensorHandle offsets,
                                       std::int32_t /*scale_grad_by_freq*/, std::int32_t mode, std::int32_t /*sparse*/,
                                       AtenTensorHandle per_sample_weights, std::int32_t include_last_offset,
                                       std::int32_t padding_idx, AtenTensorHandle* ret0, AtenTensorHandle* ret1,
                                       AtenTensorHandle* ret2, AtenTensorHandle* ret3) {
  return guarded(kOp, [&] {
    embedding_bag(Op::of(kOp, weight, "weight"), weight, indices, offsets, mode, &per_sample_weights,
                  include_last_offset != 0, padding_idx, false, ret0, ret1, ret2, ret3);
  });
}
