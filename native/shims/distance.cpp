// What cdist and the trilinear product are asked for, as PyTorch checks it.
#include "shims/distance.h"

#include <algorithm>

namespace untorch::shims {

CdistProblem cdist_problem(const Tensor& x1, const Tensor& x2, double p, std::int64_t mode) {
  constexpr const char* op = "_cdist_forward";
  check(x1.dim() >= 2 && x2.dim() >= 2, op, ": x1 and x2 must be at least 2-D, got shapes ", to_string(x1.sizes()),
        " and ", to_string(x2.sizes()));
  check(x1.size(-1) == x2.size(-1), op, ": x1 and x2 must have rows of one length, got shapes ", to_string(x1.sizes()),
        " and ", to_string(x2.sizes()));
  check(x1.dtype() == x2.dtype(), op, ": x1 is ", dtype_name(x1.dtype()), " but x2 is ", dtype_name(x2.dtype()));
  check(p >= 0, op, ": argument 'p' must not be negative, got ", p);
  check(mode >= 0 && mode <= 2, op, ": argument 'compute_mode' must be 0, 1 or 2, got ", mode);
  CdistProblem problem;
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

namespace {

// Sizes and strides with a size-1 dimension put in at each position named.
struct Expanded {
  std::vector<std::int64_t> sizes, strides;
};

Expanded expanded(const Tensor& tensor, DimSpan positions, std::int64_t ndim) {
  constexpr const char* op = "_trilinear";
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

}  // namespace

TrilinearProblem trilinear_problem(const Tensor& i1, const Tensor& i2, const Tensor& i3, DimSpan expand1,
                                   DimSpan expand2, DimSpan expand3, DimSpan sumdim) {
  constexpr const char* op = "_trilinear";
  const std::int64_t ndim = i1.dim() + static_cast<std::int64_t>(expand1.size());
  check(i2.dim() + static_cast<std::int64_t>(expand2.size()) == ndim &&
            i3.dim() + static_cast<std::int64_t>(expand3.size()) == ndim,
        op, ": the operands must have one number of dimensions once expanded, got shapes ", to_string(i1.sizes()), ", ",
        to_string(i2.sizes()), " and ", to_string(i3.sizes()));
  check(i1.dtype() == i2.dtype() && i1.dtype() == i3.dtype(), op, ": the operands must have one dtype, got ",
        dtype_name(i1.dtype()), ", ", dtype_name(i2.dtype()), " and ", dtype_name(i3.dtype()));
  const Expanded operands[3] = {expanded(i1, expand1, ndim), expanded(i2, expand2, ndim), expanded(i3, expand3, ndim)};
  std::vector<bool> summed(static_cast<std::size_t>(ndim), false);
  for (const std::int64_t d : sumdim) summed[static_cast<std::size_t>(normalize_dim(d, ndim, op))] = true;
  TrilinearProblem problem;
  for (std::size_t d = 0; d < summed.size(); ++d) {
    std::int64_t size = 1;
    for (const Expanded& operand : operands) {
      check(operand.sizes[d] == size || size == 1 || operand.sizes[d] == 1, op,
            ": the operands do not broadcast: ", to_string(i1.sizes()), ", ", to_string(i2.sizes()), " and ",
            to_string(i3.sizes()));
      if (operand.sizes[d] != 1) size = operand.sizes[d];
    }
    const TrilinearProblem::Loop loop{size, {operands[0].strides[d], operands[1].strides[d], operands[2].strides[d]}};
    (summed[d] ? problem.inner : problem.outer).push_back(loop);
    if (!summed[d]) problem.sizes.push_back(size);
  }
  return problem;
}

}  // namespace untorch::shims
