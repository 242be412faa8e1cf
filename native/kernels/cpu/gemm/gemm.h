// GEMM of float32 and float64 on the CPU, and of packed B with an epilogue. Raw pointers, row-major unless a stride
// says otherwise; threads are OpenMP's.
#pragma once

#include <cstdint>

namespace untorch::kernels {

enum class Activation : int {
  kNone = 0,
  kRelu = 1,
  kGelu = 2,
  kGeluTanh = 3,
  kSilu = 4,
  kTanh = 5,
  kSigmoid = 6,
  kRelu6 = 7,
  kHardswish = 8,
  kHardsigmoid = 9
};

// What happens to a tile of the result: activation(x) + residual, or activation(x + residual).
struct Epilogue {
  Activation activation = Activation::kNone;
  bool residual_first = false;
};

// A matrix by the address of its first element and its two strides, in elements.
template <class T>
struct MatrixRef {
  T* data;
  std::int64_t row_stride, col_stride;
};

// C = beta·C + alpha·A·B, with A [m, k], B [k, n], C [m, n]. beta 0 does not read C (NaN there does not spread).
// Any strides. T is float or double. Throws std::bad_alloc.
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, MatrixRef<const float> a,
          MatrixRef<const float> b, float beta, MatrixRef<float> c);
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, double alpha, MatrixRef<const double> a,
          MatrixRef<const double> b, double beta, MatrixRef<double> c);
// The same on the calling thread alone, for callers that are parallel themselves.
void gemm_serial(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, MatrixRef<const float> a,
                 MatrixRef<const float> b, float beta, MatrixRef<float> c);
void gemm_serial(std::int64_t m, std::int64_t n, std::int64_t k, double alpha, MatrixRef<const double> a,
                 MatrixRef<const double> b, double beta, MatrixRef<double> c);

// Packed right-hand sides: [ceil(n/16)][k][16] floats, zero-padded in n; the layout does not depend on the CPU.
inline constexpr std::int64_t kPackWidth = 16;
inline std::int64_t packed_size(std::int64_t n, std::int64_t k) {
  return (n + kPackWidth - 1) / kPackWidth * k * kPackWidth;
}
void pack_b(std::int64_t n, std::int64_t k, MatrixRef<const float> b, float* packed);

// C = epilogue(A·B + bias), A [m, k] row-major with stride lda, B packed, C [m, n] row-major with stride ldc. bias [n]
// and the epilogue's residual [m, n] (row-major, stride ldr) may be null. C may overlap none of the others.
void gemm_packed(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* packed,
                 const float* bias, Epilogue epilogue, const float* residual, std::int64_t ldr, float* c,
                 std::int64_t ldc);

// The 16-bit floating-point formats; their elements travel as bits.
enum class HalfType : int { kBFloat16 = 0, kFloat16 = 1 };

// gemm and gemm_serial in a half type: sums in float32, rounded once.
void gemm_half(HalfType type, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
               MatrixRef<const std::uint16_t> a, MatrixRef<const std::uint16_t> b, float beta,
               MatrixRef<std::uint16_t> c);
void gemm_half_serial(HalfType type, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                      MatrixRef<const std::uint16_t> a, MatrixRef<const std::uint16_t> b, float beta,
                      MatrixRef<std::uint16_t> c);

// gemm_packed in a half type; bias and residual too. B is packed in pairs along k, [ceil(n/16)][ceil(k/2)][16][2],
// zero-padded.
void gemm_half_packed(HalfType type, std::int64_t m, std::int64_t n, std::int64_t k, const std::uint16_t* a,
                      std::int64_t lda, const std::uint16_t* packed, const std::uint16_t* bias, Epilogue epilogue,
                      const std::uint16_t* residual, std::int64_t ldr, std::uint16_t* c, std::int64_t ldc);

// C = activation(C), C [m, n] row-major with stride ldc.
void apply_activation(std::int64_t m, std::int64_t n, Activation activation, float* c, std::int64_t ldc);

}  // namespace untorch::kernels
