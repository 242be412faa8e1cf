// W4A8 linear layer on the CPU: rows are quantized once, then threads multiply panels of 16 columns.
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

// Bytes from a row of values to the next. Those of a tile start in different sets of L1.
std::int64_t stride_of(std::int64_t k, bool amx) { return amx ? lines(k) | kLine : k; }

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
          UNTORCH_ISA_CALL(quantize_parts)(calls[i], row, row_end, rows[i]);
        });
  };
  if (parts <= 1) return part_of(0, values);
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(parts))
  for (std::int64_t part = 0; part < parts; ++part) part_of(values * part / parts, values * (part + 1) / parts);
}

// Rows that stay in L2 while the panels of a thread pass.
void multiply(const W4A8Linear& p, bool vnni, const W4A8Rows& rows, std::int64_t panel, std::int64_t panel_end) {
  if (rows.amx) return UNTORCH_ISA_CALL(w4a8_amx_slice)(p, rows, panel, panel_end);
  const std::int64_t unit = UNTORCH_ISA_CALL(w4a8_rows)();
  const std::int64_t most = std::max(kRowBytes / std::max(p.k, kLine) / unit, std::int64_t{1}) * unit;
  for (std::int64_t row = 0; row < p.m; row += most) {
    UNTORCH_ISA_CALL(w4a8_slice)(p, vnni, rows, row, std::min(row + most, p.m), panel, panel_end);
  }
}

// Of a panel, in multiply-adds: reading its weights costs about what four rows do.
std::int64_t panel_cost(const W4A8Linear& p) { return (p.m + 3) * std::max(p.k, std::int64_t{1}); }
std::int64_t panels_of(const W4A8Linear& p) { return units(p.n, kW4A8Columns); }

}  // namespace

void w4a8_linears(const W4A8Linear* calls, std::int64_t count) {
  W4A8Rows one;
  std::vector<W4A8Rows> several(count > 1 ? static_cast<std::size_t>(count) : 0);
  W4A8Rows* const rows = count > 1 ? several.data() : &one;
  const auto rows_of = [&](std::int64_t i) {
    return rows[i].amx ? units(calls[i].m, kAmxTileRows) * kAmxTileRows : calls[i].m;
  };
  const auto values_of = [&](std::int64_t i) { return lines(rows_of(i) * rows[i].stride); };
  const auto scales_of = [&](std::int64_t i) { return lines(rows_of(i) * (calls[i].k / kW4A8Part) * 4); };
  const auto sums_of = [&](std::int64_t i) { return lines(rows_of(i) * (calls[i].k / calls[i].group) * 4); };
  std::int64_t bytes = 0, cost = 0, work = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    rows[i].amx = calls[i].m >= kAmxFewestW4A8Rows && calls[i].k > 0 && cpu_has_amx();
    rows[i].stride = stride_of(calls[i].k, rows[i].amx);
    bytes += values_of(i) + scales_of(i) + sums_of(i);
    cost += panels_of(calls[i]) * panel_cost(calls[i]);
    // A step of eight k costs about what two multiply-adds in float32 do.
    work += calls[i].m * calls[i].n * std::max(units(calls[i].k, 4), std::int64_t{1});
  }
  if (work <= 0) return;
  char* next = static_cast<char*>(gemm_scratch(static_cast<std::size_t>(bytes)));
  for (std::int64_t i = 0; i < count; ++i) {
    rows[i].values = reinterpret_cast<std::int8_t*>(next), next += values_of(i);
    rows[i].scales = reinterpret_cast<float*>(next), next += scales_of(i);
    rows[i].sums = reinterpret_cast<float*>(next), rows[i].shifts = reinterpret_cast<std::int32_t*>(next);
    next += sums_of(i);
    // Of a tile's rows behind the last, whose sums nobody reads; what was in memory may be slow to multiply.
    const std::int64_t parts = calls[i].k / kW4A8Part, groups = calls[i].k / calls[i].group;
    std::fill(rows[i].scales + calls[i].m * parts, rows[i].scales + rows_of(i) * parts, 0.0f);
    std::fill(rows[i].sums + calls[i].m * groups, rows[i].sums + rows_of(i) * groups, 0.0f);
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
