// GEMM by cuBLASLt, opened when the first call needs it (native/cuda/library_search.h).
//
// Everything here is row-major, as tensors are; cuBLAS's column-major view of it stays inside blas.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "cuda/driver.h"

namespace untorch::cuda {

// An operand as a matrix whose rows lie `ld` elements apart; `transposed`: that is so of its transpose.
struct BlasOperand {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  bool transposed = false;
  std::int64_t ld = 0;
  std::int64_t batch_stride = 0;  // elements
};

enum class BlasActivation : std::uint8_t { kNone, kRelu, kGeluTanh };

// d = activation(alpha · a[m, k] · b[k, n] + beta · c + bias[n]), `batch` times.
struct BlasGemm {
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
  BlasOperand a, b;
  const void* c = nullptr;  // of d's dtype; not read when beta is 0
  std::int64_t ldc = 0, c_batch_stride = 0;
  void* d = nullptr;
  DType d_dtype = DType::kFloat32;
  std::int64_t ldd = 0, d_batch_stride = 0;
  double alpha = 1.0, beta = 0.0;
  const void* bias = nullptr;  // a dense vector, or null
  DType bias_dtype = DType::kFloat32;
  BlasActivation activation = BlasActivation::kNone;
  // Scales of float8 operands and of a float8 result, on the device; null: 1.
  const float *scale_a = nullptr, *scale_b = nullptr, *scale_d = nullptr;
  bool rowwise_scales = false;  // scale_a has m values and scale_b has n, instead of one each
  // scale_a has one for each 128 along k of a row of a, [⌈k / 128⌉][m] with m a multiple of 4; scale_b one for 128 ×
  // 128 of b, [⌈n / 128⌉][⌈k / 128⌉, padded to a multiple of 4].
  bool scales_of_128 = false;
  // Block scales of E2M1 operands (two per byte), in cuBLASLt's tiles: E4M3 for each 16 along k; null for others.
  const void *block_scale_a = nullptr, *block_scale_b = nullptr;
  bool fast_accumulation = false;
};

// Enqueues the GEMM on the stream; the device must be current. False when the library has no algorithm for these
// types, sizes and alignments. Throws kUnsupported when cuBLASLt is not installed or cannot be started here.
// float32 is computed in float32 (in TF32 when that is allowed), the half types and float8 accumulate in float32.
bool blas_gemm(const char* op, const BlasGemm& gemm, int device, Stream stream);

// Opens cuBLASLt and says which version it is ("13.1.0"); null when it cannot be opened, and why in `reason`.
const char* try_blas(std::string* reason) noexcept;

}  // namespace untorch::cuda
