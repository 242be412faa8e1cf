// _fused_rms_norm: x * rsqrt(mean(x²) + eps) * weight over the trailing dimensions, and the reciprocal root itself.
#include <cmath>
#include <limits>

#include "kernels/cpu/common/parallel_items.h"
#include "shims/nn.h"
#include "shims/rms_norm.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char* kOp = "_fused_rms_norm";

template <class T, class W>
void normalise(const T* x, const W* weight, std::int64_t rows, std::int64_t width, double eps, T* out,
               compute_t<T>* reciprocal) {
  using C = compute_t<T>;
  const double work = static_cast<double>(rows) * static_cast<double>(width);
  kernels::for_each_item_grained(rows, 16, work > kernels::kParallelWork, [&](std::int64_t row) {
    const T* from = x + row * width;
    T* to = out + row * width;
    // Eight sums, so that the additions overlap and vectorise; their order does not depend on the threads.
    C sums[8] = {};
    std::int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
      for (std::int64_t k = 0; k < 8; ++k) sums[k] += static_cast<C>(from[i + k]) * static_cast<C>(from[i + k]);
    }
    for (; i < width; ++i) sums[0] += static_cast<C>(from[i]) * static_cast<C>(from[i]);
    const C sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    const C scale = C(1) / std::sqrt(sum / static_cast<C>(width) + static_cast<C>(eps));
    reciprocal[row] = scale;
    for (i = 0; i < width; ++i) {
      const C value = static_cast<C>(from[i]) * scale;
      to[i] = T(weight == nullptr ? value : value * static_cast<C>(weight[i]));
    }
  });
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu__fused_rms_norm(AtenTensorHandle input, const std::int64_t* normalized_shape,
                                            std::int64_t normalized_shape_len, AtenTensorHandle* weight, double* eps,
                                            AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded(kOp, [&] {
    const Tensor& x = cpu_input(input, kOp, "input");
    const Tensor* w = optional_cpu_input(weight, kOp, "weight");
    const DimSpan shape = ints(normalized_shape, normalized_shape_len);
    const auto [width, stat_sizes] = rms_norm_shape(kOp, x, w, shape);
    TensorPtr out = Tensor::empty(x.sizes(), x.dtype());
    const DType stat_dtype = x.dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    TensorPtr reciprocal = Tensor::empty(stat_sizes, stat_dtype);
    const TensorPtr rows = contiguous(x);
    dispatch_floating(kOp, x.dtype(), [&]<class T>() {
      using C = compute_t<T>;
      // Without an eps, the spacing of the type that the sums run in.
      const double epsilon = eps != nullptr ? *eps : static_cast<double>(std::numeric_limits<C>::epsilon());
      const TensorPtr scale = w == nullptr ? nullptr : contiguous(*to_dtype(*w, stat_dtype));
      const std::int64_t count = reciprocal->numel();
      normalise<T, C>(rows->data<T>(), scale == nullptr ? nullptr : scale->data<C>(), count, width, epsilon,
                      out->data<T>(), reciprocal->data<C>());
    });
    check(ret1 != nullptr, kOp, ": output pointer is null");
    give(ret0, std::move(out), kOp);
    give(ret1, std::move(reciprocal), kOp);
  });
}
