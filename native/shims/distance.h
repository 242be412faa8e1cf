// What cdist and the trilinear product are asked for, checked, on any device.
#pragma once

#include <vector>

#include "shims/shim.h"

namespace untorch::shims {

struct CdistProblem {
  std::int64_t batch = 1, rows = 0, columns = 0, length = 0;
  Dims left, right, sizes;  // x1 and x2 broadcast to the batch, and the result
};
CdistProblem cdist_problem(const Tensor& x1, const Tensor& x2, double p, std::int64_t mode);

struct TrilinearProblem {
  struct Loop {
    std::int64_t size, stride[3];  // of the three operands; 0 where one broadcasts
  };
  std::vector<Loop> outer, inner;   // dimensions that stay and that are summed, outermost first
  std::vector<std::int64_t> sizes;  // of the result
};
TrilinearProblem trilinear_problem(const Tensor& i1, const Tensor& i2, const Tensor& i3, DimSpan expand1,
                                   DimSpan expand2, DimSpan expand3, DimSpan sumdim);

}  // namespace untorch::shims
