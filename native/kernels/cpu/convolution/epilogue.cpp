// The fused epilogue of a convolution: a binary step and an activation over the dense result, in place.
//
// Runs of 8 Ki elements in memory order, one a thread at a time. Bytes: the result once read and written, `other` once
// read; bound by DRAM but for the exponentials, which are libm's.
#include <algorithm>
#include <cmath>

#include "base/dispatch.h"
#include "kernels/convolution.h"
#include "kernels/cpu/common/parallel_items.h"

namespace untorch::kernels::cpu {
namespace {

template <class C>
C apply(const ConvolutionEpilogue& e, C x) {
  switch (e.activation) {
    case FusedUnary::kNone:
      return x;
    case FusedUnary::kRelu:
      return x < C(0) ? C(0) : x;
    case FusedUnary::kSigmoid:
      return C(1) / (C(1) + std::exp(-x));
    case FusedUnary::kTanh:
      return std::tanh(x);
    case FusedUnary::kSwish:
      return x / (C(1) + std::exp(-x));
    case FusedUnary::kHardswish:
      return x * std::clamp(x + C(3), C(0), C(6)) / C(6);
    case FusedUnary::kHardsigmoid:
      return std::clamp(x + C(3), C(0), C(6)) / C(6);
    case FusedUnary::kHardtanh:
      return std::clamp(x, static_cast<C>(e.a), static_cast<C>(e.b));
    case FusedUnary::kLeakyRelu:
      return x > C(0) ? x : x * static_cast<C>(e.a);
    case FusedUnary::kGelu:
      return C(0.5) * x * (C(1) + std::erf(x * C(0.70710678118654752440)));
    case FusedUnary::kGeluTanh:
      return C(0.5) * x * (C(1) + std::tanh(C(0.79788456080286535588) * (x + C(0.044715) * x * x * x)));
  }
  return x;
}

// The elements in memory order, in parallel runs.
template <class Fn>
void for_each_run(std::int64_t numel, Fn&& fn) {
  constexpr std::int64_t kRun = 8192;
  for_each_item((numel + kRun - 1) / kRun, static_cast<double>(numel) > kParallelWork,
                [&](std::int64_t run) { fn(run * kRun, std::min(numel, (run + 1) * kRun)); });
}

}  // namespace

void convolution_epilogue(const ConvolutionEpilogue& epilogue, DType dtype, std::int64_t numel, const void* other,
                          void* output) {
  if (epilogue.empty()) return;
  dispatch_floating("convolution", dtype, [&]<class T>() {
    using C = compute_t<T>;
    T* data = static_cast<T*>(output);
    const T* right = static_cast<const T*>(other);
    const FusedBinary binary = epilogue.binary;
    for_each_run(numel, [&](std::int64_t first, std::int64_t last) {
      if (binary == FusedBinary::kNone) {
        for (std::int64_t i = first; i < last; ++i) data[i] = T(apply(epilogue, static_cast<C>(data[i])));
        return;
      }
      for (std::int64_t i = first; i < last; ++i) {
        const C a = static_cast<C>(data[i]), b = static_cast<C>(right[i]);
        const C both = binary == FusedBinary::kAdd   ? a + b
                       : binary == FusedBinary::kSub ? a - b
                       : binary == FusedBinary::kMul ? a * b
                                                     : a / b;
        data[i] = T(apply(epilogue, both));
      }
    });
  });
}

}  // namespace untorch::kernels::cpu
