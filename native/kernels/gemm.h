// GEMM over matrices of any dtype and strides: one, batched, over groups (mixture of experts), and of 8-bit operands.
#pragma once

#include "kernels/cpu/gemm/gemm.h"  // Activation, and the CPU's GEMM of float32 and float64
#include "kernels/launcher.h"

namespace untorch::kernels {

// A batch of matrices of one dtype; strides in elements, any of them.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t batch = 1, rows = 0, cols = 0;
  std::int64_t batch_stride = 0, row_stride = 0, col_stride = 0;
  bool is_constant = false;  // a weight of the file: no kernel writes it

  Matrix transposed() const {
    return {data, dtype, batch, cols, rows, batch_stride, col_stride, row_stride, is_constant};
  }
};

// Grouped GEMM: group g has the rows of a and out, or the part of k, from ends[g - 1] (0 for the first) to ends[g].
// Sums run in float32. Strides are elements.
struct GroupedGemm {
  DType dtype = DType::kBFloat16;
  bool along_k = false;
  std::int64_t groups = 0;
  const void* ends = nullptr;  // int32
  std::int64_t ends_stride = 1;
  std::int64_t m = 0, n = 0, k = 0;  // of all groups together where they divide it
  const void* a = nullptr;           // [m, k]
  std::int64_t a_row = 0, a_col = 0;
  const void* b = nullptr;  // a [k, n] matrix for each group, or one [k, n] divided along k (b_group 0)
  std::int64_t b_group = 0, b_row = 0, b_col = 0;
  void* out = nullptr;  // [m, n], or one for each group (out_group) when they divide k
  std::int64_t out_group = 0, out_row = 0, out_col = 0;
  // CUDA alone.
  int num_sms = 0;
  bool has_wgmma = false, has_pdl = false;
  bool allow_tf32 = false;  // float32 operands may be rounded to TF32
};

// out[m, n] = sum over k of a[m, k] · b[k, n]: 8-bit integers into int32, which wraps around. Any strides (elements).
struct Int8Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t a_row = 0, a_col = 0;
  const void* b = nullptr;
  std::int64_t b_row = 0, b_col = 0;
  void* out = nullptr;
  std::int64_t out_row = 0, out_col = 0;
};

namespace cpu {

// False for a dtype that gemm has no kernel for. It has: floating, signed integer, uint8, complex64 and complex128.
bool has_gemm(DType dtype) noexcept;
// out = alpha · a · b + beta · out, for each matrix of the batch; beta 0 does not read out. One dtype: the half types
// are computed in float32 and rounded once, integers wrap around.
void gemm(const Matrix& a, const Matrix& b, const Matrix& out, double alpha, double beta);
// out = alpha · Σ a[i] · b[i] + beta · out: the batch is summed as well. out has one matrix.
void gemm_sum_batch(const Matrix& a, const Matrix& b, const Matrix& out, double alpha, double beta);
// float32, float16 or bfloat16. The first group whose end decreases or passes the whole, and nothing is written; -1
// when all are in order. Rows of out behind the last group become 0.
std::int64_t gemm_grouped(const GroupedGemm& p);
// a is int8 or uint8, b int8.
void gemm_int8(const Int8Gemm& p, DType a_dtype);

// values [m, n], row-major, float32 or float64: kRelu or kGelu in place.
void activate(DType dtype, std::int64_t m, std::int64_t n, Activation activation, void* values);
// oneDNN's elementwise post-ops that are no Activation, in place.
enum class PostOp : std::int8_t { kHardswish, kLeakyRelu, kHardtanh };
void post_op(PostOp op, std::int64_t count, float first, float second, float* values);
enum class BinaryPostOp : std::int8_t { kAdd, kSub, kMul };
void post_op(BinaryPostOp op, std::int64_t count, const float* other, float* values);

// values[i, j] *= scales[j]; values [m, n] row-major.
void scale_columns(std::int64_t m, std::int64_t n, const float* scales, float* values);
// The epilogue of a float8 GEMM, in place on its sums [m, n]: · row[i] · column[j] + bias[j], over `divisor`. Strides
// 0: one scale for all. bias may be null.
struct ScaleEpilogue {
  std::int64_t m = 0, n = 0;
  float* values = nullptr;
  const float *row = nullptr, *column = nullptr;
  std::int64_t row_stride = 0, column_stride = 0;
  const float* bias = nullptr;
  float divisor = 1.0f;
};
void scale_epilogue(const ScaleEpilogue& p);
// float8_e4m3fn or float8_e5m2 [m, n] of any strides to row-major float32, and dense float32 to float8 (saturating).
void float8_to_float(const Matrix& from, float* to);
void float_to_float8(std::int64_t count, const float* from, DType dtype, void* to);

}  // namespace cpu

namespace cuda {

// float32, float16 or bfloat16. Enqueues one kernel, which reads the ends on the device: those that decrease or pass
// the whole are cut to it. Rows of out behind the last group become 0.
int gemm_grouped(const GroupedGemm& p, Stream stream);
// Both operands int8.
int gemm_int8(const Int8Gemm& p, Stream stream);

// W8A16 GEMV for small M: out[i, j] = scales[j] · sum over c of x[i, c] · weight[j, c]. Everything is dense
// row-major, weight int8 [n, k], the rest of `dtype` (float32, float16, bfloat16). Sums run in float32, in a fixed
// order.
int w8a16_gemv(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, const void* x, const void* weight,
               const void* scales, void* out, Stream stream);
// out[i, j] = sums[i, j] · scales[j].
int scale_columns(std::int64_t m, std::int64_t n, DType dtype, const float* sums, const void* scales, void* out,
                  Stream stream);

// out[m, n] = sums[m, n] · row[m] · column[n] + bias[n]: the scales of an 8-bit GEMM, one for each row and column.
struct ScaledSums {
  std::int64_t m = 0, n = 0;
  const void* sums = nullptr;
  bool integer_sums = false;  // int32, instead of float32
  std::int64_t sums_row = 0;  // elements between rows
  const float *row = nullptr, *column = nullptr;
  bool one_column = false;     // column has one scale, for all
  const void* bias = nullptr;  // dense, of out's dtype, or null
  void* out = nullptr;
  DType dtype = DType::kFloat32;  // of out: float32, float16 or bfloat16
  std::int64_t out_row = 0;
};
int scale_rows_and_columns(const ScaledSums& p, Stream stream);

}  // namespace cuda

}  // namespace untorch::kernels
