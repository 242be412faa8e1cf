// A weight in int4 on the CPU: tiles of rows are shared among the threads.
#include "kernels/cpu/quantize/int4.h"

#include <algorithm>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/quantize/int4_levels.h"

namespace untorch::kernels {

void quantize_int4(const Int4Quantization& p) {
  const std::int64_t tiles = p.padded_rows / kInt4Rows, width = std::max<std::int64_t>(p.padded_k * kInt4Rows, 1);
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 15) / width), runs = (tiles + grain - 1) / grain;
  for_each_item(runs, static_cast<double>(tiles) * static_cast<double>(width) > kParallelWork, [&](std::int64_t run) {
    UNTORCH_ISA_CALL(int4_tiles)(p, run * grain, std::min(tiles, (run + 1) * grain));
  });
}

}  // namespace untorch::kernels
