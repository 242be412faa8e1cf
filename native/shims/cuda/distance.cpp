// Distances between rows (cdist, pdist) and the trilinear product on CUDA.
//
// The Euclidean cdist is computed from differences whatever compute_mode asks for: that is more exact than PyTorch's
// matrix product, and as quick at the row lengths that are used.
#include "shims/distance.h"

#include "kernels/cuda/reduce/distance.h"
#include "shims/cuda/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

void check_wide(const char* op, DType dtype) {
  if (dtype == DType::kFloat32 || dtype == DType::kFloat64) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype),
              " is not supported, expected float32 or float64");
}

// Row-major in the broadcast shape.
TensorPtr broadcast(const Tensor& tensor, const Dims& sizes) {
  if (tensor.sizes() == sizes) return contiguous(tensor);
  TensorPtr out = Tensor::empty(sizes, tensor.dtype(), tensor.device());
  copy(*out, tensor);
  return out;
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda__cdist_forward(AtenTensorHandle x1, AtenTensorHandle x2, double p,
                                            std::int64_t* compute_mode, AtenTensorHandle* ret0) {
  constexpr const char* op = "_cdist_forward";
  return guarded(op, [&] {
    const Tensor &left = cuda_input(x1, op, "x1"), &right = cuda_input(x2, op, "x2");
    const CdistProblem problem = cdist_problem(left, right, p, compute_mode == nullptr ? 0 : *compute_mode);
    check_wide(op, left.dtype());
    const OnDevice on(op, left, {&right});
    TensorPtr out = Tensor::empty(problem.sizes, left.dtype(), left.device());
    if (out->numel() != 0) {
      const TensorPtr a = broadcast(left, problem.left), b = broadcast(right, problem.right);
      on.launched(kernels::cuda::distances(problem.batch, problem.rows, problem.columns, problem.length, p, false,
                                           left.dtype(), a->raw(), b->raw(), out->raw(), on.stream()));
    }
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda__pdist_forward(AtenTensorHandle self, double p, AtenTensorHandle* ret0) {
  constexpr const char* op = "_pdist_forward";
  return guarded(op, [&] {
    const Tensor& input = cuda_input(self, op, "self");
    check(input.dim() == 2, op, ": argument 'self' must be 2-D, got shape ", to_string(input.sizes()));
    check(p >= 0, op, ": argument 'p' must not be negative, got ", p);
    check_wide(op, input.dtype());
    const std::int64_t rows = input.size(0);
    const OnDevice on(op, input);
    TensorPtr out = Tensor::empty(Dims{rows < 2 ? 0 : rows * (rows - 1) / 2}, input.dtype(), input.device());
    if (out->numel() != 0) {
      const TensorPtr x = contiguous(input);
      on.launched(kernels::cuda::distances(1, rows, rows, input.size(1), p, true, input.dtype(), x->raw(), x->raw(),
                                           out->raw(), on.stream()));
    }
    give(ret0, std::move(out), op);
  });
}

// unroll_dim is a hint on the order of the work, it does not change the result.
UNTORCH_SHIM aoti_torch_cuda__trilinear(AtenTensorHandle i1, AtenTensorHandle i2, AtenTensorHandle i3,
                                        const std::int64_t* expand1, std::int64_t expand1_len,
                                        const std::int64_t* expand2, std::int64_t expand2_len,
                                        const std::int64_t* expand3, std::int64_t expand3_len,
                                        const std::int64_t* sumdim, std::int64_t sumdim_len,
                                        std::int64_t /*unroll_dim*/, AtenTensorHandle* ret0) {
  constexpr const char* op = "_trilinear";
  return guarded(op, [&] {
    const Tensor &a = cuda_input(i1, op, "i1"), &b = cuda_input(i2, op, "i2"), &c = cuda_input(i3, op, "i3");
    const TrilinearProblem problem = trilinear_problem(a, b, c, ints(expand1, expand1_len), ints(expand2, expand2_len),
                                                       ints(expand3, expand3_len), ints(sumdim, sumdim_len));
    if (!is_floating(a.dtype())) {
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(a.dtype()),
                  " is not supported on CUDA, expected float16, bfloat16, float32 or float64");
    }
    const Dims out_strides = contiguous_strides(problem.sizes);
    std::vector<std::int64_t> strides[3], inner_sizes, inner_strides[3];
    for (int k = 0; k < 3; ++k) {
      for (const auto& loop : problem.outer) strides[k].push_back(loop.stride[k]);
      for (const auto& loop : problem.inner) inner_strides[k].push_back(loop.stride[k]);
    }
    for (const auto& loop : problem.inner) inner_sizes.push_back(loop.size);
    Strided<4> outer;
    Strided<3> inner;
    const bool fits = make_strided<4>(problem.sizes, {out_strides, strides[0], strides[1], strides[2]}, outer) &&
                      make_strided<3>(inner_sizes, {inner_strides[0], inner_strides[1], inner_strides[2]}, inner);
    check(fits, op, ": the operands have more dimensions than the kernels take (", kMaxDims, ")");
    const OnDevice on(op, a, {&b, &c});
    TensorPtr out = Tensor::empty(DimSpan{problem.sizes}, a.dtype(), a.device());
    on.launched(kernels::cuda::trilinear(outer, inner, a.dtype(), a.raw(), b.raw(), c.raw(), out->raw(), on.stream()));
    give(ret0, std::move(out), op);
  });
}
