// embedding_bag (aoti_torch_cuda_*, and the older name for CUDA tensors). The four results are those of PyTorch's CUDA
// operator: the rows; the bag of each index; the number of rows in each bag; the winning rows of a maximum, which is
// empty for the other modes. Rows and offsets that do not exist are reported as cuda/device_error.h says.
#include "kernels/cuda/indexing/embedding_bag.h"

#include "shims/cuda/shim.h"
#include "shims/device_ops.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::cuda::BagMode;

namespace {

constexpr const char* kOp = "_embedding_bag";

void check_arguments(const Tensor& weight, const Tensor& indices, const Tensor& offsets, std::int64_t mode,
                     const Tensor* per_sample, bool include_last_offset, std::int64_t padding_idx) {
  check(weight.dim() == 2, kOp, ": argument 'weight' must be 2-D, got shape ", to_string(weight.sizes()));
  check(indices.dim() == 1, kOp, ": argument 'indices' must be 1-D, got shape ", to_string(indices.sizes()));
  check(offsets.dim() == 1, kOp, ": argument 'offsets' must be 1-D, got shape ", to_string(offsets.sizes()));
  for (const auto& [tensor, name] : {std::pair{&indices, "indices"}, std::pair{&offsets, "offsets"}}) {
    check(tensor->dtype() == DType::kInt32 || tensor->dtype() == DType::kInt64, kOp, ": argument '", name,
          "' must be int32 or int64, got ", dtype_name(tensor->dtype()));
  }
  if (!is_floating(weight.dtype())) {
    throw_error(ErrorKind::kUnsupported, kOp, ": dtype ", dtype_name(weight.dtype()),
                " is not supported, expected a floating type");
  }
  check(mode >= 0 && mode <= 2, kOp, ": argument 'mode' must be 0 (sum), 1 (mean) or 2 (max), got ", mode);
  if (per_sample != nullptr) {
    check(mode == 0, kOp, ": argument 'per_sample_weights' goes with mode 0 (sum) only, got mode ", mode);
    check(per_sample->dtype() == weight.dtype(), kOp, ": argument 'per_sample_weights' must be ",
          dtype_name(weight.dtype()), " like weight, got ", dtype_name(per_sample->dtype()));
    check(per_sample->dim() == 1 && per_sample->size(0) == indices.size(0), kOp,
          ": argument 'per_sample_weights' must have shape ", to_string(indices.sizes()), ", got ",
          to_string(per_sample->sizes()));
  }
  const std::int64_t rows = weight.size(0);
  check(padding_idx >= -rows && padding_idx < std::max<std::int64_t>(rows, 1), kOp,
        ": argument 'padding_idx' must be inside of the table's ", rows, " rows, got ", padding_idx);
  check(!include_last_offset || offsets.size(0) > 0, kOp,
        ": argument 'offsets' must hold at least one value with include_last_offset");
}

AOTITorchError shim(AtenTensorHandle weight_handle, AtenTensorHandle indices_handle, AtenTensorHandle offsets_handle,
                    std::int64_t mode, AtenTensorHandle* per_sample_weights, std::int32_t include_last_offset,
                    std::int64_t padding_idx, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2,
                    AtenTensorHandle* ret3) {
  return guarded(kOp, [&] {
    const Tensor& weight = cuda_input(weight_handle, kOp, "weight");
    const Tensor& indices = cuda_input(indices_handle, kOp, "indices");
    const Tensor& offsets = cuda_input(offsets_handle, kOp, "offsets");
    const Tensor* const per_sample = optional_cuda_input(per_sample_weights, kOp, "per_sample_weights");
    check_arguments(weight, indices, offsets, mode, per_sample, include_last_offset != 0, padding_idx);
    check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr && ret3 != nullptr, kOp, ": output pointer is null");
    const OnDevice on(kOp, weight, {&indices, &offsets, per_sample});

    const DType index_dtype =
        indices.dtype() == DType::kInt64 || offsets.dtype() == DType::kInt64 ? DType::kInt64 : DType::kInt32;
    const TensorPtr rows = to_dtype(indices, index_dtype), starts = to_dtype(offsets, index_dtype);
    const std::int64_t bags = offsets.size(0) - (include_last_offset != 0 ? 1 : 0), width = weight.size(1);
    TensorPtr out = Tensor::empty(Dims{bags, width}, weight.dtype(), on.device());
    // Zeros where no bag comes by: before the first offset after a fault, and the entry after the last bag.
    TensorPtr bag_of_index = Tensor::zeros(indices.sizes(), index_dtype, on.device());
    TensorPtr bag_size = Tensor::zeros(offsets.sizes(), index_dtype, on.device());
    TensorPtr winners = Tensor::empty(mode == 2 ? Dims{bags, width} : Dims{0}, index_dtype, on.device());
    const kernels::cuda::EmbeddingBag task{
        .table = weight.raw(),
        .rows = weight.size(0),
        .width = width,
        .row_stride = weight.stride(0),
        .column_stride = weight.stride(1),
        .indices = rows->raw(),
        .offsets = starts->raw(),
        .wide = index_dtype == DType::kInt64,
        .index_count = indices.size(0),
        .bags = bags,
        .scales = per_sample == nullptr ? nullptr : per_sample->raw(),
        .scale_stride = per_sample == nullptr ? 0 : per_sample->stride(0),
        .padding = padding_idx,
        .out = out->raw(),
        .bag_of_index = bag_of_index->raw(),
        .bag_size = bag_size->raw(),
        .winners = winners->raw(),
    };
    on.launched(kernels::cuda::embedding_bag(task, static_cast<BagMode>(mode), weight.dtype(),
                                             cuda::DeviceErrors::word(on.index()), on.stream()));
    give(ret0, std::move(out), kOp);
    give(ret1, std::move(bag_of_index), kOp);
    give(ret2, std::move(bag_size), kOp);
    give(ret3, std::move(winners), kOp);
  });
}

[[maybe_unused]] const bool registered = [] {
  cuda_ops.embedding_bag = shim;
  return true;
}();

}  // namespace

UNTORCH_SHIM aoti_torch_cuda__embedding_bag(AtenTensorHandle weight, AtenTensorHandle indices, AtenTensorHandle offsets,
                                            std::int32_t /*scale_grad_by_freq*/, std::int64_t mode,
                                            std::int32_t /*sparse*/, AtenTensorHandle* per_sample_weights,
                                            std::int32_t include_last_offset, std::int64_t padding_idx,
                                            AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2,
                                            AtenTensorHandle* ret3) {
  return shim(weight, indices, offsets, mode, per_sample_weights, include_last_offset, padding_idx, ret0, ret1, ret2,
              ret3);
}

UNTORCH_SHIM aoti_torch_cuda__embedding_bag_forward_only(AtenTensorHandle weight, AtenTensorHandle indices,
                                                         AtenTensorHandle offsets, std::int32_t /*scale_grad_by_freq*/,
                                                         std::int64_t mode, std::int32_t /*sparse*/,
                                                         AtenTensorHandle* per_sample_weights,
                                                         std::int32_t include_last_offset, std::int64_t padding_idx,
                                                         AtenTensorHandle* ret0, AtenTensorHandle* ret1,
                                                         AtenTensorHandle* ret2, AtenTensorHandle* ret3) {
  return shim(weight, indices, offsets, mode, per_sample_weights, include_last_offset, padding_idx, ret0, ret1, ret2,
              ret3);
}
