// The GEMM's serial drivers, one set for each instruction-set level (see isa.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels {

// The blocking plan. Chosen once from the whole problem, so that slices of it give the same bits.
struct GemmPlan {
  bool dot;             // dot products along k, no packing
  bool b_in_place;      // B is read where it lies
  bool a_in_place;      // so is A
  std::int64_t kc;      // k is cut into pieces of this length
  std::int64_t mc, nc;  // rows of A and columns of B that pass together

  // Bytes of scratch for one thread.
  std::size_t workspace;
};

// The same for a half type.
struct HalfPlan {
  bool dot;                 // dot products along k, no packing
  bool bf16;                // AVX512_BF16 multiplies
  bool amx;                 // AMX does, and AVX512_BF16 what is left of k
  bool widens;              // B is widened once for several tiles of rows, not in each
  std::int64_t rows;        // of a tile, at most
  std::int64_t kc, mc, nc;  // as above; B is packed for nc columns and all of k
  std::size_t workspace;
};

// C = epilogue(alpha·sums + bias) + beta·C, with C of any strides; the residual may be null.
struct HalfResult {
  std::uint16_t* c;
  std::int64_t row_stride, col_stride;
  float alpha, beta;
  const std::uint16_t* bias;
  Epilogue epilogue;
  const std::uint16_t* residual;
  std::int64_t ldr;
};

}  // namespace untorch::kernels

// n and m are those of the slice. dots: whether few rows may be multiplied without packing B.
UNTORCH_ISA_DECLARE(
    GemmPlan plan_float(std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const float> a,
                        MatrixRef<const float> b);
    GemmPlan plan_double(std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const double> a,
                         MatrixRef<const double> b);
    void slice_float(const GemmPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                     MatrixRef<const float> a, MatrixRef<const float> b, float beta, MatrixRef<float> c,
                     void* workspace);
    void slice_double(const GemmPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k, double alpha,
                      MatrixRef<const double> a, MatrixRef<const double> b, double beta, MatrixRef<double> c,
                      void* workspace);
    void pack_slice(std::int64_t k, std::int64_t n, MatrixRef<const float> b, float* packed);
    void packed_slice(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t total_m, const float* a,
                      std::int64_t lda, const float* packed, const float* bias, Epilogue epilogue,
                      const float* residual, std::int64_t ldr, float* c, std::int64_t ldc);
    void activation_slice(std::int64_t m, std::int64_t n, Activation activation, float* c, std::int64_t ldc);
    HalfPlan plan_half(HalfType type, std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const std::uint16_t> a,
                       MatrixRef<const std::uint16_t> b, bool packed, bool bf16, bool amx, bool dots);
    void slice_half(HalfType type, const HalfPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k,
                    MatrixRef<const std::uint16_t> a, MatrixRef<const std::uint16_t> b, const HalfResult& result,
                    void* workspace);
    void packed_slice_half(HalfType type, const HalfPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k,
                           MatrixRef<const std::uint16_t> a, const std::uint32_t* packed, const HalfResult& result,
                           void* workspace);
    int tile_rows();)
