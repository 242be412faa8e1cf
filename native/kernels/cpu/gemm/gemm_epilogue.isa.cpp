// Activations and residuals of gemm_packed, through the library's vector mathematics.
#include "kernels/cpu/gemm/gemm_epilogue.h"

#include "kernels/cpu/gemm/gemm_levels.h"
#include "kernels/cpu/vecmath/inline.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
constexpr int N = kLanes<float>;

[[gnu::always_inline]] inline V gelu(V x) {
  const V half = 0.5f * x;
  return half * vecmath::verf(x * 0.707106781f) + half;
}
[[gnu::always_inline]] inline V gelu_tanh(V x) {
  const V inner = 0.797884561f * (x + 0.044715f * x * x * x);
  const V half = 0.5f * x;
  return half * vecmath::vtanh(inner) + half;
}
[[gnu::always_inline]] inline V relu(V x) { return x < 0.0f ? V{} : x; }  // NaN stays NaN

// c = f(c) + residual, row by row; the tail of a row through a vector of its own.
template <class Fn>
[[gnu::always_inline]] inline void apply(std::int64_t rows, std::int64_t cols, const float* residual, std::int64_t ldr,
                                         float* c, std::int64_t ldc, Fn&& f) {
  for (std::int64_t i = 0; i < rows; ++i, c += ldc) {
    std::int64_t j = 0;
    for (; j + N <= cols; j += N) {
      V v = f(load(c + j));
      if (residual != nullptr) v += load(residual + j);
      store(c + j, v);
    }
    if (j < cols) {
      float tail[N] = {};
      for (std::int64_t x = j; x < cols; ++x) tail[x - j] = c[x];
      store(tail, f(load(tail)));
      for (std::int64_t x = j; x < cols; ++x) c[x] = residual != nullptr ? tail[x - j] + residual[x] : tail[x - j];
    }
    if (residual != nullptr) residual += ldr;
  }
}

}  // namespace

void apply_epilogue(std::int64_t rows, std::int64_t cols, Activation activation, const float* residual,
                    std::int64_t ldr, float* c, std::int64_t ldc) {
  switch (activation) {
    case Activation::kNone:
      return apply(rows, cols, residual, ldr, c, ldc, [](V x) { return x; });
    case Activation::kRelu:
      return apply(rows, cols, residual, ldr, c, ldc, [](V x) { return relu(x); });
    case Activation::kGelu:
      return apply(rows, cols, residual, ldr, c, ldc, [](V x) { return gelu(x); });
    case Activation::kGeluTanh:
      return apply(rows, cols, residual, ldr, c, ldc, [](V x) { return gelu_tanh(x); });
    case Activation::kSilu:
      return apply(rows, cols, residual, ldr, c, ldc, [](V x) { return x * vecmath::vsigmoid(x); });
    case Activation::kTanh:
      return apply(rows, cols, residual, ldr, c, ldc, [](V x) { return vecmath::vtanh(x); });
    case Activation::kSigmoid:
      return apply(rows, cols, residual, ldr, c, ldc, [](V x) { return vecmath::vsigmoid(x); });
  }
}

void activation_slice(std::int64_t m, std::int64_t n, Activation activation, float* c, std::int64_t ldc) {
  apply_epilogue(m, n, activation, nullptr, 0, c, ldc);
}

}  // namespace untorch::kernels::UNTORCH_ISA
