// Distances between rows (cdist, pdist) and the trilinear sum of products.
#include "kernels/distance.h"

#include <algorithm>
#include <vector>

#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

struct CdistShape {
  std::int64_t batch = 1, rows = 0, columns = 0, length = 0;
  Dims left, right, sizes;  // x1 and x2 broadcast to the batch, and the result
};

CdistShape cdist_shape(const Op& op, const Tensor& x1, const Tensor& x2, double p, std::int64_t mode) {
  check(x1.dim() >= 2 && x2.dim() >= 2, op, ": x1 and x2 must be at least 2-D, got shapes ", to_string(x1.sizes()),
        " and ", to_string(x2.sizes()));
  check(x1.size(-1) == x2.size(-1), op, ": x1 and x2 must have rows of one length, got shapes ", to_string(x1.sizes()),
        " and ", to_string(x2.sizes()));
  check(x1.dtype() == x2.dtype(), op, ": x1 is ", dtype_name(x1.dtype()), " but x2 is ", dtype_name(x2.dtype()));
  check(p >= 0, op, ": argument 'p' must not be negative, got ", p);
  check(mode >= 0 && mode <= 2, op, ": argument 'compute_mode' must be 0, 1 or 2, got ", mode);
  CdistShape problem;
  const std::int64_t rows = problem.rows = x1.size(-2);
  const std::int64_t columns = problem.columns = x2.size(-2);
  const std::int64_t n = problem.length = x1.size(-1);
  const std::int64_t ndim = std::max(x1.dim(), x2.dim());
  Dims &lead1 = problem.left, &lead2 = problem.right, &sizes = problem.sizes;
  for (Dims* dims : {&lead1, &lead2, &sizes}) dims->resize(static_cast<std::size_t>(ndim));
  for (std::int64_t d = 0; d < ndim - 2; ++d) {
    const auto at = static_cast<std::size_t>(d);
    const std::int64_t d1 = d - (ndim - x1.dim()), d2 = d - (ndim - x2.dim());
    const std::int64_t a = d1 < 0 ? 1 : x1.size(d1), b = d2 < 0 ? 1 : x2.size(d2);
    check(a == b || a == 1 || b == 1, op, ": the batch dimensions of ", to_string(x1.sizes()), " and ",
          to_string(x2.sizes()), " do not broadcast");
    sizes[at] = lead1[at] = lead2[at] = a == 1 ? b : a;
    problem.batch *= sizes[at];
  }
  const auto last = static_cast<std::size_t>(ndim - 1);
  sizes[last - 1] = lead1[last - 1] = rows;
  sizes[last] = lead2[last - 1] = columns;
  lead1[last] = lead2[last] = n;
  return problem;
}

void check_dtype(const Op& op, DType dtype) {
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

// Sizes and strides with a size-1 dimension put in at each position named.
struct Expanded {
  std::vector<std::int64_t> sizes, strides;
};

Expanded expanded(const Op& op, const Tensor& tensor, DimSpan positions, std::int64_t ndim) {
  std::vector<bool> added(static_cast<std::size_t>(ndim), false);
  for (const std::int64_t position : positions) {
    added[static_cast<std::size_t>(normalize_dim(position, ndim, op))] = true;
  }
  Expanded out;
  std::size_t next = 0;
  for (std::size_t d = 0; d < added.size(); ++d) {
    check(added[d] || next < tensor.sizes().size(), op, ": an operand has the wrong number of dimensions, shape ",
          to_string(tensor.sizes()), " with expand ", to_string(positions));
    out.sizes.push_back(added[d] ? 1 : tensor.sizes()[next]);
    out.strides.push_back(added[d] || tensor.sizes()[next] == 1 ? 0 : tensor.strides()[next]);
    if (!added[d]) ++next;
  }
  return out;
}

// The iteration spaces of the result and of the sum, and the result's shape.
struct TrilinearSpaces {
  Strided<4> outer;
  Strided<3> inner;
  std::vector<std::int64_t> sizes;
};

TrilinearSpaces trilinear_spaces(const Op& op, const Tensor& i1, const Tensor& i2, const Tensor& i3, DimSpan expand1,
                                 DimSpan expand2, DimSpan expand3, DimSpan sumdim) {
  const std::int64_t ndim = i1.dim() + static_cast<std::int64_t>(expand1.size());
  check(i2.dim() + static_cast<std::int64_t>(expand2.size()) == ndim &&
            i3.dim() + static_cast<std::int64_t>(expand3.size()) == ndim,
        op, ": the operands must have one number of dimensions once expanded, got shapes ", to_string(i1.sizes()), ", ",
        to_string(i2.sizes()), " and ", to_string(i3.sizes()));
  check(i1.dtype() == i2.dtype() && i1.dtype() == i3.dtype(), op, ": the operands must have one dtype, got ",
        dtype_name(i1.dtype()), ", ", dtype_name(i2.dtype()), " and ", dtype_name(i3.dtype()));
  const Expanded operands[3] = {expanded(op, i1, expand1, ndim), expanded(op, i2, expand2, ndim),
                                expanded(op, i3, expand3, ndim)};
  std::vector<bool> summed(static_cast<std::size_t>(ndim), false);
  for (const std::int64_t d : sumdim) summed[static_cast<std::size_t>(normalize_dim(d, ndim, op))] = true;
  std::vector<std::int64_t> sizes[2], strides[2][3];  // dimensions that stay, and those that are summed
  for (std::size_t d = 0; d < summed.size(); ++d) {
    std::int64_t size = 1;
    for (const Expanded& operand : operands) {
      check(operand.sizes[d] == size || size == 1 || operand.sizes[d] == 1, op,
            ": the operands do not broadcast: ", to_string(i1.sizes()), ", ", to_string(i2.sizes()), " and ",
            to_string(i3.sizes()));
      if (operand.sizes[d] != 1) size = operand.sizes[d];
    }
    const std::size_t which = summed[d] ? 1 : 0;
    sizes[which].push_back(size);
    for (std::size_t k = 0; k < 3; ++k) strides[which][k].push_back(operands[k].strides[d]);
  }
  TrilinearSpaces out;
  out.sizes = sizes[0];
  const Dims out_strides = contiguous_strides(out.sizes);
  const bool fits = make_strided<4>(sizes[0], {out_strides, strides[0][0], strides[0][1], strides[0][2]}, out.outer) &&
                    make_strided<3>(sizes[1], {strides[1][0], strides[1][1], strides[1][2]}, out.inner);
  check(fits, op, ": the operands have more dimensions than the kernels take (", kMaxDims, ")");
  return out;
}

}  // namespace

UNTORCH_OP(_cdist_forward,
           (AtenTensorHandle x1, AtenTensorHandle x2, double p, std::int64_t* compute_mode, AtenTensorHandle* ret0), x1,
           x2, p, compute_mode, ret0) {
  const Tensor &left = op.input(x1, "x1"), &right = op.input(x2, "x2");
  const std::int64_t mode = compute_mode == nullptr ? 0 : *compute_mode;
  const CdistShape shape = cdist_shape(op, left, right, p, mode);
  check_dtype(op, left.dtype());
  op.check_same_device({&left, &right});
  TensorPtr out = Tensor::empty(shape.sizes, left.dtype(), left.device());
  if (out->numel() != 0) {
    constexpr std::int64_t kManyRows = 25;
    const bool by_gemm = p == 2.0 && shape.length > 0 &&
                         (mode == 1 || (mode == 0 && (shape.rows > kManyRows || shape.columns > kManyRows)));
    const TensorPtr a = broadcast(left, shape.left), b = broadcast(right, shape.right);
    const kernels::Distances problem{.batch = shape.batch,
                                     .rows = shape.rows,
                                     .columns = shape.columns,
                                     .length = shape.length,
                                     .p = p,
                                     .by_gemm = by_gemm,
                                     .dtype = left.dtype(),
                                     .left = a->raw(),
                                     .right = b->raw(),
                                     .out = out->raw()};
    run(
        op, {&left, &right}, [&] { kernels::cpu::distances(problem); },
        [&](const auto& on) { return kernels::cuda::distances(problem, on.stream()); });
  }
  give(ret0, std::move(out), op);
}

UNTORCH_OP(_pdist_forward, (AtenTensorHandle self, double p, AtenTensorHandle* ret0), self, p, ret0) {
  const Tensor& input = op.input(self, "self");
  check(input.dim() == 2, op, ": argument 'self' must be 2-D, got shape ", to_string(input.sizes()));
  check(p >= 0, op, ": argument 'p' must not be negative, got ", p);
  check_dtype(op, input.dtype());
  const std::int64_t rows = input.size(0);
  TensorPtr out = Tensor::empty(Dims{rows < 2 ? 0 : rows * (rows - 1) / 2}, input.dtype(), input.device());
  if (out->numel() != 0) {
    const TensorPtr x = contiguous(input);
    const kernels::Distances problem{.rows = rows,
                                     .columns = rows,
                                     .length = input.size(1),
                                     .p = p,
                                     .condensed = true,
                                     .dtype = input.dtype(),
                                     .left = x->raw(),
                                     .right = x->raw(),
                                     .out = out->raw()};
    run(
        op, {&input}, [&] { kernels::cpu::distances(problem); },
        [&](const auto& on) { return kernels::cuda::distances(problem, on.stream()); });
  }
  give(ret0, std::move(out), op);
}

// unroll_dim is a hint on the order of the work, it does not change the result.
UNTORCH_OP(_trilinear,
           (AtenTensorHandle i1, AtenTensorHandle i2, AtenTensorHandle i3, const std::int64_t* expand1,
            std::int64_t expand1_len, const std::int64_t* expand2, std::int64_t expand2_len,
            const std::int64_t* expand3, std::int64_t expand3_len, const std::int64_t* sumdim, std::int64_t sumdim_len,
            std::int64_t unroll_dim, AtenTensorHandle* ret0),
           i1, i2, i3, expand1, expand1_len, expand2, expand2_len, expand3, expand3_len, sumdim, sumdim_len, unroll_dim,
           ret0) {
  (void)unroll_dim;
  const Tensor &a = op.input(i1, "i1"), &b = op.input(i2, "i2"), &c = op.input(i3, "i3");
  const TrilinearSpaces spaces = trilinear_spaces(op, a, b, c, ints(expand1, expand1_len), ints(expand2, expand2_len),
                                                  ints(expand3, expand3_len), ints(sumdim, sumdim_len));
  if (!is_floating(a.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(a.dtype()),
                " is not supported, expected float16, bfloat16, float32 or float64");
  }
  op.check_same_device({&a, &b, &c});
  TensorPtr out = Tensor::empty(DimSpan{spaces.sizes}, a.dtype(), a.device());
  if (out->numel() != 0) {
    const kernels::Trilinear problem{spaces.outer, spaces.inner, a.dtype(), a.raw(), b.raw(), c.raw(), out->raw()};
    run(
        op, {&a, &b, &c}, [&] { kernels::cpu::trilinear(problem); },
        [&](const auto& on) { return kernels::cuda::trilinear(problem, on.stream()); });
  }
  give(ret0, std::move(out), op);
}
