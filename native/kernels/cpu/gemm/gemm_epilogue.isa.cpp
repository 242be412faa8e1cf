// Activations and residuals of packed GEMMs and convolutions, through the library's vector mathematics.
#include "kernels/cpu/gemm/gemm_epilogue.h"

#include "kernels/cpu/gemm/gemm_levels.h"
#include "kernels/cpu/vecmath/inline.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
constexpr int N = kLanes<float>;

[[gnu::always_inline]] inline V relu(V x) { return vecmath::at_least(x, V{}); }
[[gnu::always_inline]] inline V relu6(V x) { return vecmath::between(x, 0.0f, 6.0f); }
[[gnu::always_inline]] inline V hardsigmoid(V x) { return relu6(x + 3.0f) * (1.0f / 6.0f); }
[[gnu::always_inline]] inline V hardswish(V x) { return x * relu6(x + 3.0f) * (1.0f / 6.0f); }

// c = f(c) + residual or, kFirst, f(c + residual), row by row; the tail of a row through a vector of its own.
template <bool kFirst, class Fn>
[[gnu::always_inline]] inline void apply(std::int64_t rows, std::int64_t cols, const float* residual, std::int64_t ldr,
                                         float* c, std::int64_t ldc, Fn&& f) {
  const auto one = [&](V v, V added) { return kFirst ? f(v + added) : f(v) + added; };
  for (std::int64_t i = 0; i < rows; ++i, c += ldc) {
    std::int64_t j = 0;
    if (residual == nullptr) {
      for (; j + N <= cols; j += N) store(c + j, f(load(c + j)));
    } else {
      for (; j + N <= cols; j += N) store(c + j, one(load(c + j), load(residual + j)));
    }
    if (j < cols) {
      float tail[N] = {}, added[N] = {};
      for (std::int64_t x = j; x < cols; ++x) tail[x - j] = c[x];
      for (std::int64_t x = j; x < cols && residual != nullptr; ++x) added[x - j] = residual[x];
      store(tail, residual == nullptr ? f(load(tail)) : one(load(tail), load(added)));
      for (std::int64_t x = j; x < cols; ++x) c[x] = tail[x - j];
    }
    if (residual != nullptr) residual += ldr;
  }
}

template <bool kFirst>
void dispatch(std::int64_t rows, std::int64_t cols, Activation activation, const float* residual, std::int64_t ldr,
              float* c, std::int64_t ldc) {
  switch (activation) {
    case Activation::kNone:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return x; });
    case Activation::kRelu:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return relu(x); });
    case Activation::kGelu:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return vecmath::vgelu(x); });
    case Activation::kGeluTanh:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return vecmath::vgelu_tanh(x); });
    case Activation::kSilu:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return vecmath::vsilu(x); });
    case Activation::kTanh:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return vecmath::vtanh(x); });
    case Activation::kSigmoid:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return vecmath::vsigmoid(x); });
    case Activation::kRelu6:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return relu6(x); });
    case Activation::kHardswish:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return hardswish(x); });
    case Activation::kHardsigmoid:
      return apply<kFirst>(rows, cols, residual, ldr, c, ldc, [](V x) { return hardsigmoid(x); });
  }
}

}  // namespace

void apply_epilogue(std::int64_t rows, std::int64_t cols, Epilogue epilogue, const float* residual, std::int64_t ldr,
                    float* c, std::int64_t ldc) {
  if (epilogue.residual_first && residual != nullptr) {
    return dispatch<true>(rows, cols, epilogue.activation, residual, ldr, c, ldc);
  }
  dispatch<false>(rows, cols, epilogue.activation, residual, ldr, c, ldc);
}

void activation_slice(std::int64_t m, std::int64_t n, Activation activation, float* c, std::int64_t ldc) {
  apply_epilogue(m, n, {activation, false}, nullptr, 0, c, ldc);
}

}  // namespace untorch::kernels::UNTORCH_ISA
