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

}  // namespace untorch::kernels

// n and m are those of the slice.
UNTORCH_ISA_DECLARE(GemmPlan plan_float(std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const float> a,
                                        MatrixRef<const float> b);
                    GemmPlan plan_double(std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const double> a,
                                         MatrixRef<const double> b);
                    void slice_float(const GemmPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                                     MatrixRef<const float> a, MatrixRef<const float> b, float beta, MatrixRef<float> c,
                                     void* workspace);
                    void slice_double(const GemmPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k,
                                      double alpha, MatrixRef<const double> a, MatrixRef<const double> b, double beta,
                                      MatrixRef<double> c, void* workspace);
                    void pack_slice(std::int64_t k, std::int64_t n, MatrixRef<const float> b, float* packed);
                    void packed_slice(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t total_m,
                                      const float* a, std::int64_t lda, const float* packed, const float* bias,
                                      Epilogue epilogue, const float* residual, std::int64_t ldr, float* c,
                                      std::int64_t ldc);
                    void activation_slice(std::int64_t m, std::int64_t n, Activation activation, float* c,
                                          std::int64_t ldc);
                    int tile_rows();)
