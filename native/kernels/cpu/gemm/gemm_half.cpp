// Dispatch of the GEMM in bfloat16 and float16: the instruction-set level, AVX512_BF16, AMX, the thread grid.
#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/gemm/gemm_levels.h"
#include "kernels/cpu/gemm/gemm_operands.h"
#include "kernels/cpu/gemm/gemm_threads.h"

namespace untorch::kernels {
namespace {

using Bits = std::uint16_t;

// Calls body(i0, i1, j0, j1, workspace) for each part of the grid.
template <class Body>
void on_parts(const HalfPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k, bool serial, Body&& body) {
  const Grid grid = serial ? Grid{1, 1} : choose_grid(m, n, k, plan.rows, kPackWidth);
  const std::size_t each = (plan.workspace + 4095) / 4096 * 4096;
  char* const workspace = static_cast<char*>(gemm_scratch(each * static_cast<std::size_t>(grid.rows * grid.cols)));
  on_grid(grid, m, n, plan.rows, kPackWidth,
          [&](int index, std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1) {
            body(i0, i1, j0, j1, workspace + static_cast<std::size_t>(index) * each);
          });
}

void run(HalfType type, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, MatrixRef<const Bits> a,
         MatrixRef<const Bits> b, float beta, MatrixRef<Bits> c, bool serial) {
  if (m <= 0 || n <= 0) return;
  orient(m, n, k, a, b, c);
  const HalfPlan plan =
      UNTORCH_ISA_CALL(plan_half)(type, m, n, k, a, b, false, cpu_has_fast_bf16(), cpu_has_amx(), true);
  on_parts(plan, m, n, k, serial, [&](std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1, void* own) {
    const MatrixRef<Bits> to = part(c, i0, j0);
    const HalfResult result{to.data, to.row_stride, to.col_stride, alpha, beta, nullptr, {}, nullptr, 0};
    UNTORCH_ISA_CALL(slice_half)(type, plan, i1 - i0, j1 - j0, k, part(a, i0, 0), part(b, 0, j0), result, own);
  });
}

}  // namespace

void gemm_half(HalfType type, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, MatrixRef<const Bits> a,
               MatrixRef<const Bits> b, float beta, MatrixRef<Bits> c) {
  run(type, m, n, k, alpha, a, b, beta, c, false);
}

void gemm_half_serial(HalfType type, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                      MatrixRef<const Bits> a, MatrixRef<const Bits> b, float beta, MatrixRef<Bits> c) {
  run(type, m, n, k, alpha, a, b, beta, c, true);
}

void gemm_half_packed(HalfType type, std::int64_t m, std::int64_t n, std::int64_t k, const Bits* a, std::int64_t lda,
                      const Bits* packed, const Bits* bias, Epilogue epilogue, const Bits* residual, std::int64_t ldr,
                      Bits* c, std::int64_t ldc) {
  if (m <= 0 || n <= 0) return;
  const MatrixRef<const Bits> rows{a, lda, 1};
  const HalfPlan plan =
      UNTORCH_ISA_CALL(plan_half)(type, m, n, k, rows, {packed, 1, k}, true, cpu_has_fast_bf16(), cpu_has_amx(), true);
  on_parts(plan, m, n, k, false, [&](std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1, void* own) {
    const HalfResult result{c + i0 * ldc + j0,
                            ldc,
                            1,
                            1.0f,
                            0.0f,
                            bias == nullptr ? nullptr : bias + j0,
                            epilogue,
                            residual == nullptr ? nullptr : residual + i0 * ldr + j0,
                            ldr};
    const auto* const panels = reinterpret_cast<const std::uint32_t*>(packed) + j0 * ((k + 1) / 2);
    UNTORCH_ISA_CALL(packed_slice_half)
    (type, plan, i1 - i0, j1 - j0, k, part(rows, i0, 0), panels, result, own);
  });
}

}  // namespace untorch::kernels
