// searchsorted, bucketize and histc (aoti_torch_cuda_*).
#include "kernels/cuda/sort/searchsorted.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/elementwise/copy.h"
#include "shims/cuda/lanes.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// The contract, without touching the device.
void check_search(const Tensor& sequence, DimSpan value_sizes, DType common, bool int32, const Tensor* sorter,
                  const char* op) {
  check(sequence.dim() > 0, op, ": the sorted sequence must have at least one dimension");
  if (sequence.dim() != 1) {
    check(static_cast<std::int64_t>(value_sizes.size()) == sequence.dim() &&
              std::equal(value_sizes.begin(), value_sizes.end() - 1, sequence.sizes().begin()),
          op, ": the sorted sequence must be 1-D or agree with the values in all but the last dimension, got ",
          to_string(sequence.sizes()), " and ", to_string(value_sizes));
  }
  const std::int64_t n = sequence.size(-1);
  check(!int32 || n < (std::int64_t{1} << 31), op, ": ", n, " boundaries do not fit int32 positions; use int64");
  if (sorter != nullptr) {
    check(sorter->dtype() == DType::kInt64 && sorter->sizes() == sequence.sizes(), op, ": 'sorter' is ",
          dtype_name(sorter->dtype()), " ", to_string(sorter->sizes()), ", expected int64 ",
          to_string(sequence.sizes()));
  }
  if (common != DType::kBool && !is_integral(common) && !is_floating(common)) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(common), " is not supported");
  }
}

// `wanted`: dense and of the common dtype.
void search(const OnDevice& on, const Tensor& sequence, const Tensor& wanted, bool int32, bool right,
            const Tensor* sorter, AtenTensorHandle* ret0, const char* op) {
  TensorPtr out = Tensor::empty(wanted.sizes(), int32 ? DType::kInt32 : DType::kInt64, sequence.device());
  const std::int64_t total = wanted.numel();
  if (total != 0) {
    const TensorPtr sorted = to_dtype(sequence, wanted.dtype());
    const TensorPtr order = sorter == nullptr ? nullptr : contiguous(*sorter);
    on.launched(kernels::cuda::search(
        sorted->raw(), sequence.size(-1), wanted.raw(), total, sequence.dim() == 1 ? total : wanted.size(-1),
        wanted.dtype(), order ? order->data<std::int64_t>() : nullptr, right, out->raw(), int32, on.stream()));
  }
  give(ret0, std::move(out), op);
}

bool from_right(std::int32_t right, const char** side) {
  if (side == nullptr || *side == nullptr) return right != 0;
  const std::string name = *side;
  check(name == "left" || name == "right", "searchsorted: 'side' is \"", name, "\", expected \"left\" or \"right\"");
  check(right == 0 || name == "right", "searchsorted: 'side' is \"left\" but 'right' is true");
  return name == "right";
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_searchsorted_Tensor(AtenTensorHandle sorted_sequence, AtenTensorHandle self,
                                                 std::int32_t out_int32, std::int32_t right, const char** side,
                                                 AtenTensorHandle* sorter, AtenTensorHandle* ret0) {
  return guarded("searchsorted", [&] {
    const char* op = "searchsorted";
    const Tensor& sequence = cuda_input(sorted_sequence, op, "sorted_sequence");
    const Tensor& values = cuda_input(self, op, "self");
    const Tensor* order = optional_cuda_input(sorter, op, "sorter");
    const DType common = promote_types(sequence.dtype(), values.dtype());
    const bool to_right = from_right(right, side);
    check_search(sequence, values.sizes(), common, out_int32 != 0, order, op);
    const OnDevice on(op, sequence, {&values, order});
    search(on, sequence, *to_dtype(values, common), out_int32 != 0, to_right, order, ret0, op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_searchsorted_Scalar(AtenTensorHandle sorted_sequence, double self, std::int32_t out_int32,
                                                 std::int32_t right, const char** side, AtenTensorHandle* sorter,
                                                 AtenTensorHandle* ret0) {
  return guarded("searchsorted", [&] {
    const char* op = "searchsorted";
    const Tensor& sequence = cuda_input(sorted_sequence, op, "sorted_sequence");
    check(sequence.dim() == 1, "searchsorted: a scalar needs a 1-D sorted sequence, got ", sequence.dim(), "-D");
    const Tensor* order = optional_cuda_input(sorter, op, "sorter");
    const DType common = result_type_with_double(sequence);
    const bool to_right = from_right(right, side);
    check_search(sequence, {}, common, out_int32 != 0, order, op);
    const TensorPtr scalar = scalar_tensor(self, common);
    const OnDevice on(op, sequence, {order});
    const TensorPtr wanted = Tensor::empty(DimSpan{}, common, sequence.device());
    on.launched(kernels::cuda::fill(strided<1>(op, wanted->sizes(), {wanted.get()}), wanted->raw(), scalar->raw(),
                                    static_cast<int>(element_size(common)), on.stream()));
    search(on, sequence, *wanted, out_int32 != 0, to_right, order, ret0, op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_bucketize_Tensor(AtenTensorHandle self, AtenTensorHandle boundaries,
                                              std::int32_t out_int32, std::int32_t right, AtenTensorHandle* ret0) {
  return guarded("bucketize", [&] {
    const char* op = "bucketize";
    const Tensor& values = cuda_input(self, op, "self");
    const Tensor& edges = cuda_input(boundaries, op, "boundaries");
    check(edges.dim() == 1, "bucketize: 'boundaries' must be 1-D, got ", edges.dim(), "-D");
    const DType common = promote_types(edges.dtype(), values.dtype());
    check_search(edges, values.sizes(), common, out_int32 != 0, nullptr, op);
    const OnDevice on(op, values, {&edges});
    search(on, edges, *to_dtype(values, common), out_int32 != 0, right != 0, nullptr, ret0, op);
  });
}

// Where the range is that of the data it stays on the device, so a range that is not finite is not an error there: the
// counts are NaN.
UNTORCH_SHIM aoti_torch_cuda_histc(AtenTensorHandle self, std::int64_t bins, double min, double max,
                                   AtenTensorHandle* ret0) {
  return guarded("histc", [&] {
    const Tensor& t = cuda_input(self, "histc", "self");
    check(bins > 0, "histc: 'bins' is ", bins, ", expected 1 or more");
    check(std::isfinite(min) && std::isfinite(max), "histc: range [", min, ", ", max, "] is not finite");
    check(min <= max, "histc: 'max' is ", max, ", expected more than 'min' ", min);
    if (!is_integral(t.dtype()) && !is_floating(t.dtype())) {
      throw_error(ErrorKind::kUnsupported, "histc: dtype ", dtype_name(t.dtype()), " is not supported");
    }
    const OnDevice on("histc", t);
    TensorPtr out = Tensor::empty(DimSpan(&bins, 1), t.dtype(), t.device());
    const TensorPtr dense = contiguous(t);
    const StorageRef scratch = on.scratch(kernels::cuda::histogram_scratch(bins));
    on.launched(kernels::cuda::histogram(dense->raw(), t.numel(), t.dtype(), bins, min, max, out->raw(),
                                         scratch->data(), on.stream()));
    give(ret0, std::move(out), "histc");
  });
}
