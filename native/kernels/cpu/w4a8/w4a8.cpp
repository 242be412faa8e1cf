// W4A8 linear layer on the CPU: rows are quantized once, or rounded to bfloat16 for AMX, then threads multiply panels
// of 16 columns.
#include "kernels/cpu/w4a8/w4a8.h"

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/cpu/common/amx_limits.h"
#include "kernels/cpu/gemm/gemm_operands.h"
#include "kernels/cpu/gemm/gemm_threads.h"
#include "kernels/cpu/w4a8/w4a8_levels.h"

namespace untorch::kernels {
namespace {

// Values below which a thread of its own does not pay for quantizing.
constexpr std::int64_t kValuesPerThread = 1 << 15;
// Bytes of quantized rows that stay in L2 while the panels of a thread pass.
constexpr std::int64_t kRowBytes = 1 << 18;
constexpr std::int64_t kLine = 64;
constexpr std::int64_t kAmxTileRows = 16;

std::int64_t lines(std::int64_t nbytes) { return units(nbytes, kLine) * kLine; }

bool takes_amx(const W4A8Linear& p) { return p.m >= kAmxFewestW4A8Rows && p.k > 0 && cpu_has_amx(); }

// Bytes of the arrays of a call's rows.
struct Sizes {
  std::int64_t values = 0, scales = 0, sums = 0, bf16 = 0;
  std::int64_t all() const { return values + scales + sums + bf16; }
};

Sizes sizes_of(const W4A8Linear& p) {
  if (takes_amx(p)) return {.bf16 = units(p.m, kAmxTileRows) * kAmxTileRows * w4a8_amx_stride(p.k) * 2};
  return {.values = lines(p.m * p.k),
          .scales = lines(p.m * (p.k / kW4A8Part) * 4),
          .sums = lines(p.m * (p.k / p.group) * 4)};
}

// Calls body(call, first, end) for the items from `begin` to `stop` of all calls, of which call i has sizes(i) that
// cost costs(i) each. An item belongs to the range in which it starts.
template <class Sizes, class Costs, class Body>
void on_items(std::int64_t calls, std::int64_t begin, std::int64_t stop, Sizes&& sizes, Costs&& costs, Body&& body) {
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < calls && at < stop; ++i) {
    const std::int64_t size = sizes(i), cost = costs(i);
    const std::int64_t first = begin <= at ? 0 : std::min(units(begin - at, cost), size),
                       end = std::min(units(stop - at, cost), size);
    if (first < end) body(i, first, end);
    at += size * cost;
  }
}

void quantize(const W4A8Linear* calls, std::int64_t count, const W4A8Rows* rows) {
  std::int64_t values = 0, all_rows = 0;
  for (std::int64_t i = 0; i < count; ++i) values += calls[i].m * calls[i].k, all_rows += calls[i].m;
  std::int64_t parts = omp_in_parallel() != 0 ? 1 : values / kValuesPerThread;
  parts = std::min({parts, std::int64_t{omp_get_max_threads()}, all_rows});
  const auto part_of = [&](std::int64_t begin, std::int64_t stop) {
    on_items(
        count, begin, stop, [&](std::int64_t i) { return calls[i].m; }, [&](std::int64_t i) { return calls[i].k; },
        [&](std::int64_t i, std::int64_t row, std::int64_t row_end) {
          if (rows[i].bf16 != nullptr) return UNTORCH_ISA_CALL(round_rows)(calls[i], row, row_end, rows[i].bf16);
          UNTORCH_ISA_CALL(quantize_parts)(calls[i], row, row_end, rows[i]);
        });
  };
  if (parts <= 1) return part_of(0, values);
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(parts))
  for (std::int64_t part = 0; part < parts; ++part) part_of(values * part / parts, values * (part + 1) / parts);
}

// Rows that stay in L2 while the panels of a thread pass.
void multiply(const W4A8Linear& p, bool vnni, const W4A8Rows& rows, std::int64_t panel, std::int64_t panel_end) {
  if (rows.bf16 != nullptr) return UNTORCH_ISA_CALL(w4a8_amx_slice)(p, rows.bf16, panel, panel_end);
  const std::int64_t unit = UNTORCH_ISA_CALL(w4a8_rows)();
  const std::int64_t most = std::max(kRowBytes / std::max(p.k, kLine) / unit, std::int64_t{1}) * unit;
  for (std::int64_t row = 0; row < p.m; row += most) {
    UNTORCH_ISA_CALL(w4a8_slice)(p, vnni, rows, row, std::min(row + most, p.m), panel, panel_end);
  }
}

// Of a panel, in multiply-adds by vectors: reading its weights costs about what four rows do, dequantizing them for AMX
// about what eight do, and eight rows by AMX about what one does.
std::int64_t panel_cost(const W4A8Linear& p) {
  return (takes_amx(p) ? p.m / 8 + 8 : p.m + 3) * std::max(p.k, std::int64_t{1});
}
std::int64_t panels_of(const W4A8Linear& p) { return units(p.n, kW4A8Columns); }

}  // namespace

void w4a8_linears(const W4A8Linear* calls, std::int64_t count) {
  W4A8Rows one{};
  std::vector<W4A8Rows> several(count > 1 ? static_cast<std::size_t>(count) : 0);
  W4A8Rows* const rows = count > 1 ? several.data() : &one;
  std::int64_t bytes = 0, cost = 0, work = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    bytes += sizes_of(calls[i]).all();
    cost += panels_of(calls[i]) * panel_cost(calls[i]);
    // A step of eight k costs about what two multiply-adds in float32 do.
    work += calls[i].m * calls[i].n * std::max(units(calls[i].k, 4), std::int64_t{1});
  }
  if (work <= 0) return;
  char* next = static_cast<char*>(gemm_scratch(static_cast<std::size_t>(bytes)));
  for (std::int64_t i = 0; i < count; ++i) {
    const Sizes sizes = sizes_of(calls[i]);
    if (sizes.bf16 > 0) rows[i].bf16 = reinterpret_cast<std::uint16_t*>(next);
    next += sizes.bf16;
    rows[i].values = reinterpret_cast<std::int8_t*>(next), next += sizes.values;
    rows[i].scales = reinterpret_cast<float*>(next), next += sizes.scales;
    rows[i].sums = reinterpret_cast<float*>(next), rows[i].shifts = reinterpret_cast<std::int32_t*>(next);
    next += sizes.sums;
  }
  quantize(calls, count, rows);
  const bool vnni = cpu_has_vnni();
  const Grid grid = choose_grid(1, work, 1, 1, 1);
  const std::int64_t parts = grid.rows * grid.cols;
  const auto part_of = [&](std::int64_t begin, std::int64_t stop) {
    on_items(
        count, begin, stop, [&](std::int64_t i) { return panels_of(calls[i]); },
        [&](std::int64_t i) { return panel_cost(calls[i]); },
        [&](std::int64_t i, std::int64_t panel, std::int64_t panel_end) {
          multiply(calls[i], vnni, rows[i], panel, panel_end);
        });
  };
  if (parts <= 1) return part_of(0, cost);
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(parts))
  for (std::int64_t part = 0; part < parts; ++part) part_of(cost * part / parts, cost * (part + 1) / parts);
}

void w4a8_linear(const W4A8Linear& p) { w4a8_linears(&p, 1); }

}  // namespace untorch::kernels
