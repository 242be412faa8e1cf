// W8A8 linear layer on the CPU: rows are quantized once, then a grid of threads multiplies.
#include "kernels/cpu/w8a8/int8.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kernels/cpu/gemm/gemm_operands.h"
#include "kernels/cpu/gemm/gemm_threads.h"
#include "kernels/cpu/w8a8/int8_levels.h"

namespace untorch::kernels {
namespace {

// Values below which a thread of its own does not pay for quantizing.
constexpr std::int64_t kValuesPerThread = 1 << 16;
constexpr std::size_t kLine = 64;

std::size_t lines(std::size_t nbytes) { return (nbytes + kLine - 1) / kLine * kLine; }

// Into how many threads' shares of rows x is cut.
std::int64_t parts_of(const Int8Linear& p) {
  const std::int64_t parts = omp_in_parallel() != 0 ? 1 : p.m * p.k / kValuesPerThread;
  return std::min<std::int64_t>({parts, omp_get_max_threads(), p.m});
}

// kTensor as kStatic, with the arithmetic of PyTorch's choose_qparams. What is not finite makes the scale NaN.
Int8Linear with_range(const Int8Linear& p) {
  const std::int64_t parts = std::max<std::int64_t>(parts_of(p), 1);
  std::vector<RowsRange> found(static_cast<std::size_t>(parts));
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(parts)) if (parts > 1)
  for (std::int64_t part = 0; part < parts; ++part) {
    UNTORCH_ISA_CALL(range_of_rows)
    (p, p.m * part / parts, p.m * (part + 1) / parts, found[static_cast<std::size_t>(part)]);
  }
  RowsRange all;
  for (const RowsRange& range : found) {
    all.low = std::min(all.low, range.low), all.high = std::max(all.high, range.high);
    all.finite = all.finite && range.finite;
  }
  Int8Linear made = p;
  made.range = ActivationRange::kStatic;
  made.input_zero = 0;
  const float scale = std::max((all.high - all.low) / 255.0f, p.input_scale);
  made.input_scale = all.finite && std::isfinite(scale) ? scale : std::numeric_limits<float>::quiet_NaN();
  if (std::isnan(made.input_scale)) return made;
  made.input_zero = std::min(-static_cast<std::int32_t>(std::nearbyintf(all.low / scale)), 255);
  return made;
}

void quantize(const Int8Linear& p, bool vnni, const Int8Rows& rows) {
  const std::int64_t parts = parts_of(p);
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

void int8_linear(const Int8Linear& given) {
  if (given.m <= 0 || given.n <= 0) return;
  const Int8Linear p = given.range == ActivationRange::kTensor ? with_range(given) : given;
  const bool vnni = cpu_has_vnni(), amx = UNTORCH_ISA_CALL(takes_amx)(p) && cpu_has_amx();
  const std::int64_t stride = UNTORCH_ISA_CALL(row_words)(p.k, vnni), panels = units(p.n, kPackWidth);
  const std::int64_t unit = UNTORCH_ISA_CALL(int8_tile_rows)(vnni, amx);
  const auto m = static_cast<std::size_t>(p.m), padded = static_cast<std::size_t>(units(p.m, unit) * unit);
  const std::size_t words = lines(padded * static_cast<std::size_t>(stride) * sizeof(std::uint32_t));
  const std::size_t scales = lines(m * sizeof(float)), zeros = lines(m * sizeof(std::int32_t));
  const std::size_t bias_bytes = static_cast<std::size_t>(panels * kPackWidth) * sizeof(float);
  char* const scratch = static_cast<char*>(gemm_scratch(words + scales + zeros + bias_bytes));
  const Int8Rows rows{reinterpret_cast<std::uint32_t*>(scratch), stride, reinterpret_cast<float*>(scratch + words),
                      reinterpret_cast<std::int32_t*>(scratch + words + scales)};
  auto* const bias = reinterpret_cast<float*>(scratch + words + scales + zeros);
  quantize(p, vnni, rows);
  UNTORCH_ISA_CALL(widen_bias)(p, bias);
  // A group of four costs about what one multiply-add in float32 does.
  const Grid grid = choose_grid(p.m, p.n, units(p.k, kInt8Group), unit, kPackWidth);
  on_grid(grid, p.m, p.n, unit, kPackWidth,
          [&](int, std::int64_t row, std::int64_t row_end, std::int64_t col, std::int64_t col_end) {
            UNTORCH_ISA_CALL(gemm_int8_slice)(p, vnni, amx, rows, bias, row, row_end, col, col_end);
          });
}

}  // namespace untorch::kernels
