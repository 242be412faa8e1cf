// What follows a convolution, on one value in registers.
#pragma once

#include "kernels/convolution.h"
#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

// NaN stays. C: float or double.
template <class C>
__device__ __forceinline__ C activated(C x, const ConvolutionEpilogue& epilogue) {
  const auto clamped = [](C value, C least, C most) { return value < least ? least : value > most ? most : value; };
  switch (epilogue.activation) {
    case FusedUnary::kNone:
      return x;
    case FusedUnary::kRelu:
      return x < C(0) ? C(0) : x;
    case FusedUnary::kSigmoid:
      return C(1) / (C(1) + exp(-x));
    case FusedUnary::kTanh:
      return tanh(x);
    case FusedUnary::kSwish:
      return x / (C(1) + exp(-x));
    case FusedUnary::kHardswish:
      return x * clamped(x + C(3), C(0), C(6)) / C(6);
    case FusedUnary::kHardsigmoid:
      return clamped(x + C(3), C(0), C(6)) / C(6);
    case FusedUnary::kHardtanh:
      return clamped(x, static_cast<C>(epilogue.a), static_cast<C>(epilogue.b));
    case FusedUnary::kLeakyRelu:
      return x < C(0) ? x * static_cast<C>(epilogue.a) : x;
    case FusedUnary::kGelu:
      return x * C(0.5) * (C(1) + erf(x * C(0.70710678118654752)));
    case FusedUnary::kGeluTanh:
      return x * C(0.5) * (C(1) + tanh(C(0.79788456080286536) * (x + C(0.044715) * x * x * x)));
  }
  return x;
}

}  // namespace untorch::kernels::cuda
