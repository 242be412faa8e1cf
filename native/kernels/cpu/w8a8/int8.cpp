// W8A8 linear layer on the CPU: rows are quantized once, then a grid of threads multiplies.
#include "kernels/cpu/w8a8/int8.h"

#include <omp.h>

#include <cstddef>

#include "kernels/cpu/gemm/gemm_operands.h"
#include "kernels/cpu/gemm/gemm_threads.h"
#include "kernels/cpu/w8a8/int8_levels.h"

namespace untorch::kernels {
namespace {

// Values below which a thread of its own does not pay for quantizing.
constexpr std::int64_t kValuesPerThread = 1 << 16;
constexpr std::size_t kLine = 64;

std::size_t lines(std::size_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

void quantize(const Int8Linear& p, bool vnni, const Int8Rows& rows) {
  std::int64_t parts = omp_in_parallel() != 0 ? 1 : p.m * p.k / kValuesPerThread;
  if (parts > omp_get_max_threads()) parts = omp_get_max_threads();
  if (parts > p.m) parts = p.m;
  if (parts <= 1) {
    UNTORCH_ISA_CALL(quantize_rows)(p, vnni, 0, p.m, rows);
    return;
  }
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(parts))
  for (std::int64_t part = 0; part < parts; ++part) {
    UNTORCH_ISA_CALL(quantize_rows)(p, vnni, p.m * part / parts, p.m * (part + 1) / parts, rows);
  }
}

}  // namespace

void int8_linear(const Int8Linear& p) {
  if (p.m <= 0 || p.n <= 0) return;
  const bool vnni = cpu_has_vnni();
  const std::int64_t stride = UNTORCH_ISA_CALL(row_words)(p.k, vnni), panels = units(p.n, kPackWidth);
  const auto m = static_cast<std::size_t>(p.m);
  const std::size_t words = lines(m * static_cast<std::size_t>(stride) * sizeof(std::uint32_t));
  const std::size_t scales = lines(m * sizeof(float)), zeros = lines(m * sizeof(std::int32_t));
  const std::size_t bias_bytes = static_cast<std::size_t>(panels * kPackWidth) * sizeof(float);
  char* const scratch = static_cast<char*>(gemm_scratch(words + scales + zeros + bias_bytes));
  const Int8Rows rows{reinterpret_cast<std::uint32_t*>(scratch), stride, reinterpret_cast<float*>(scratch + words),
                      reinterpret_cast<std::int32_t*>(scratch + words + scales)};
  auto* const bias = reinterpret_cast<float*>(scratch + words + scales + zeros);
  quantize(p, vnni, rows);
  UNTORCH_ISA_CALL(widen_bias)(p, bias);
  const std::int64_t unit = UNTORCH_ISA_CALL(int8_tile_rows)(vnni);
  // A group of four costs about what one multiply-add in float32 does.
  const Grid grid = choose_grid(p.m, p.n, units(p.k, kInt8Group), unit, kPackWidth);
  on_grid(grid, p.m, p.n, unit, kPackWidth,
          [&](int, std::int64_t row, std::int64_t row_end, std::int64_t col, std::int64_t col_end) {
            UNTORCH_ISA_CALL(gemm_int8_slice)(p, vnni, rows, bias, row, row_end, col, col_end);
          });
}

}  // namespace untorch::kernels
