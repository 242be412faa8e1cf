// GEMM dispatch: the instruction-set level, the blocking plan and the thread grid.
#include "kernels/cpu/gemm/gemm.h"

#include <omp.h>

#include <cstdlib>
#include <new>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/gemm/gemm_levels.h"
#include "kernels/cpu/gemm/gemm_operands.h"
#include "kernels/cpu/gemm/gemm_threads.h"

namespace untorch::kernels {
namespace {

// Memory that a thread keeps between calls.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  void* get(std::size_t nbytes) {
    if (nbytes > nbytes_) {
      std::free(data_);
      nbytes_ = 0;
      const std::size_t rounded = (nbytes + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(4096, rounded);
      if (data_ == nullptr) throw std::bad_alloc();
      nbytes_ = rounded;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  std::size_t nbytes_ = 0;
};
thread_local Scratch scratch;

template <class T>
GemmPlan plan_of(std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const T> a, MatrixRef<const T> b) {
  if constexpr (sizeof(T) == 4) return UNTORCH_ISA_CALL(plan_float)(m, n, k, a, b);
  if constexpr (sizeof(T) == 8) return UNTORCH_ISA_CALL(plan_double)(m, n, k, a, b);
}

template <class T>
void slice_of(const GemmPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k, T alpha, MatrixRef<const T> a,
              MatrixRef<const T> b, T beta, MatrixRef<T> c, void* workspace) {
  if constexpr (sizeof(T) == 4) UNTORCH_ISA_CALL(slice_float)(plan, m, n, k, alpha, a, b, beta, c, workspace);
  if constexpr (sizeof(T) == 8) UNTORCH_ISA_CALL(slice_double)(plan, m, n, k, alpha, a, b, beta, c, workspace);
}

template <class T>
void run(std::int64_t m, std::int64_t n, std::int64_t k, T alpha, MatrixRef<const T> a, MatrixRef<const T> b, T beta,
         MatrixRef<T> c, bool serial) {
  if (m <= 0 || n <= 0) return;
  orient(m, n, k, a, b, c);
  const GemmPlan plan = plan_of(m, n, k, a, b);
  const Grid grid = serial ? Grid{1, 1} : choose_grid(m, n, k, UNTORCH_ISA_CALL(tile_rows)(), kPackWidth);
  const std::size_t each = (plan.workspace + 4095) / 4096 * 4096;
  char* const workspace = static_cast<char*>(gemm_scratch(each * static_cast<std::size_t>(grid.rows * grid.cols)));
  on_grid(grid, m, n, UNTORCH_ISA_CALL(tile_rows)(), kPackWidth,
          [&](int index, std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1) {
            void* const own = workspace + static_cast<std::size_t>(index) * each;
            slice_of(plan, i1 - i0, j1 - j0, k, alpha, part(a, i0, 0), part(b, 0, j0), beta, part(c, i0, j0), own);
          });
}

}  // namespace

void* gemm_scratch(std::size_t nbytes) { return scratch.get(nbytes); }

void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, MatrixRef<const float> a,
          MatrixRef<const float> b, float beta, MatrixRef<float> c) {
  run(m, n, k, alpha, a, b, beta, c, false);
}
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, double alpha, MatrixRef<const double> a,
          MatrixRef<const double> b, double beta, MatrixRef<double> c) {
  run(m, n, k, alpha, a, b, beta, c, false);
}
void gemm_serial(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, MatrixRef<const float> a,
                 MatrixRef<const float> b, float beta, MatrixRef<float> c) {
  run(m, n, k, alpha, a, b, beta, c, true);
}
void gemm_serial(std::int64_t m, std::int64_t n, std::int64_t k, double alpha, MatrixRef<const double> a,
                 MatrixRef<const double> b, double beta, MatrixRef<double> c) {
  run(m, n, k, alpha, a, b, beta, c, true);
}

void pack_b(std::int64_t n, std::int64_t k, MatrixRef<const float> b, float* packed) {
  const Grid grid = choose_grid(64, n, k, 64, kPackWidth);
  on_grid(grid, 64, n, 64, kPackWidth, [&](int, std::int64_t, std::int64_t, std::int64_t j0, std::int64_t j1) {
    UNTORCH_ISA_CALL(pack_slice)(k, j1 - j0, part(b, 0, j0), packed + j0 * k);
  });
}

void gemm_packed(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* packed,
                 const float* bias, Epilogue epilogue, const float* residual, std::int64_t ldr, float* c,
                 std::int64_t ldc) {
  if (m <= 0 || n <= 0) return;
  const Grid grid = choose_grid(m, n, k, UNTORCH_ISA_CALL(tile_rows)(), kPackWidth);
  on_grid(grid, m, n, UNTORCH_ISA_CALL(tile_rows)(), kPackWidth,
          [&](int, std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1) {
            UNTORCH_ISA_CALL(packed_slice)
            (i1 - i0, j1 - j0, k, m, a + i0 * lda, lda, packed + j0 * k, bias == nullptr ? nullptr : bias + j0,
             epilogue, residual == nullptr ? nullptr : residual + i0 * ldr + j0, ldr, c + i0 * ldc + j0, ldc);
          });
}

void apply_activation(std::int64_t m, std::int64_t n, Activation activation, float* c, std::int64_t ldc) {
  if (m <= 0 || n <= 0) return;
  const Grid grid = choose_grid(m, n, 16, 1, kPackWidth);
  on_grid(grid, m, n, 1, kPackWidth, [&](int, std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1) {
    UNTORCH_ISA_CALL(activation_slice)(i1 - i0, j1 - j0, activation, c + i0 * ldc + j0, ldc);
  });
}

}  // namespace untorch::kernels
