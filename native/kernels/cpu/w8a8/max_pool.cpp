// Maximum pooling of bytes: the rows of each window, then a vector of channels at a time over all of them.
#include "kernels/cpu/w8a8/max_pool.h"

#include <vector>

#include "kernels/cpu/common/parallel_items.h"

namespace untorch::kernels {

void byte_max_pool(const ByteMaxPool& p) {
  const std::int64_t work = p.batch * p.output[0] * p.output[1] * p.channels * p.kernel[0] * p.kernel[1] / 16;
  for_each_item_grained(p.batch * p.output[0], 4, static_cast<double>(work) > kParallelWork, [&](std::int64_t i) {
    thread_local std::vector<const std::uint8_t*> rows;
    const std::uint8_t* const image = p.x + i / p.output[0] * p.input[0] * p.input[1] * p.channels;
    const std::int64_t top = i % p.output[0] * p.stride[0] - p.padding[0];
    for (std::int64_t x = 0; x < p.output[1]; ++x) {
      rows.clear();
      const std::int64_t left = x * p.stride[1] - p.padding[1];
      for (std::int64_t ky = 0; ky < p.kernel[0]; ++ky) {
        const std::int64_t iy = top + ky * p.dilation[0];
        if (iy < 0 || iy >= p.input[0]) continue;
        for (std::int64_t kx = 0; kx < p.kernel[1]; ++kx) {
          const std::int64_t ix = left + kx * p.dilation[1];
          if (ix >= 0 && ix < p.input[1]) rows.push_back(image + (iy * p.input[1] + ix) * p.channels);
        }
      }
      std::uint8_t* const out = p.out + (i * p.output[1] + x) * p.channels;
      if (rows.empty()) {  // a window of padding alone
        for (std::int64_t c = 0; c < p.channels; ++c) out[c] = 0;
        continue;
      }
      UNTORCH_ISA_CALL(max_bytes)(rows.data(), static_cast<std::int64_t>(rows.size()), p.channels, out);
    }
  });
}

}  // namespace untorch::kernels
