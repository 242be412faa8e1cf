// The checks that matrix products on the CPU and on GPUs share.
#include "shims/matmul_checks.h"

#include <algorithm>

namespace untorch::shims {

void check_rank(const char* op, const char* argument, const Tensor& tensor, std::int64_t dim) {
  check(tensor.dim() == dim, op, ": argument '", argument, "' must be ", dim, "-D, got shape ",
        to_string(tensor.sizes()));
}

void check_product(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b) {
  check(a.dtype() == b.dtype(), op, ": '", a_name, "' and '", b_name, "' must have the same dtype, got ",
        dtype_name(a.dtype()), " and ", dtype_name(b.dtype()));
  check(a.size(-1) == b.size(-2), op, ": the inner sizes differ: '", a_name, "' is ", to_string(a.sizes()), ", '",
        b_name, "' is ", to_string(b.sizes()));
  check(a.dim() != 3 || a.size(0) == b.size(0), op, ": the batch sizes differ: '", a_name, "' is ",
        to_string(a.sizes()), ", '", b_name, "' is ", to_string(b.sizes()));
}

void check_out(const char* op, const Tensor& out, DType dtype, DimSpan sizes) {
  check(out.dtype() == dtype, op, ": argument 'out' must be ", dtype_name(dtype), ", got ", dtype_name(out.dtype()));
  check(std::ranges::equal(DimSpan(out.sizes()), sizes), op, ": argument 'out' must have shape ", to_string(sizes),
        ", got ", to_string(out.sizes()));
}

void check_added(const char* op, const Tensor& self, DType dtype, DimSpan sizes) {
  check(self.dtype() == dtype, op, ": 'self' must have the operands' dtype ", dtype_name(dtype), ", got ",
        dtype_name(self.dtype()));
  const auto dim = static_cast<std::int64_t>(sizes.size());
  bool fits = self.dim() <= dim;
  for (std::int64_t d = 1; fits && d <= self.dim(); ++d) {
    fits = self.size(-d) == sizes[static_cast<std::size_t>(dim - d)] || self.size(-d) == 1;
  }
  check(fits, op, ": 'self' of shape ", to_string(self.sizes()), " does not broadcast to ", to_string(sizes));
}

}  // namespace untorch::shims
