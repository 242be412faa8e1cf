// A weight in int8 on the CPU: rows are shared among the threads.
#include "kernels/cpu/quantize/int8.h"

#include <algorithm>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/quantize/int8_levels.h"

namespace untorch::kernels {

void quantize_int8(const Int8Quantization& p) {
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 16) / std::max<std::int64_t>(p.k, 1));
  const std::int64_t runs = (p.rows + grain - 1) / grain;
  for_each_item(runs, static_cast<double>(p.rows) * static_cast<double>(p.k) > kParallelWork, [&](std::int64_t run) {
    UNTORCH_ISA_CALL(int8_rows)(p, run * grain, std::min(p.rows, (run + 1) * grain));
  });
}

}  // namespace untorch::kernels
