// The arguments of Fourier transforms, as PyTorch checks them.
#include "shims/fft.h"

#include <algorithm>
#include <cmath>

namespace untorch::shims {

std::vector<std::int64_t> fft_dims(const char* op, const Tensor& self, DimSpan dims) {
  std::vector<std::int64_t> out;
  for (const std::int64_t dim : dims) {
    const std::int64_t d = normalize_dim(dim, self.dim(), op);
    check(std::find(out.begin(), out.end(), d) == out.end(), op,
          ": argument 'dim' names a dimension twice: ", to_string(dims));
    check(self.size(d) > 0, op, ": dimension ", d, " of shape ", to_string(self.sizes()), " is empty");
    out.push_back(d);
  }
  return out;
}

double fft_scale(const char* op, std::int64_t normalization, const Tensor& self,
                 const std::vector<std::int64_t>& dims) {
  double count = 1;
  for (const std::int64_t d : dims) count *= static_cast<double>(self.size(d));
  switch (normalization) {
    case 0:
      return 1.0;
    case 1:
      return 1.0 / std::sqrt(count);
    case 2:
      return 1.0 / count;
    default:
      check(false, op, ": argument 'normalization' must be 0 (none), 1 (by root n) or 2 (by n), got ", normalization);
      return 0.0;
  }
}

}  // namespace untorch::shims
