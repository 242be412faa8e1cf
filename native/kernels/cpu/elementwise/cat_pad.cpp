// Padding: a gather, row by row of the result, with a table of source offsets for each dimension. Bytes: the elements
// that are shown read once, the result written once. And windows.
#include "kernels/cat_pad.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

#include "base/dispatch.h"
#include "kernels/cpu/common/parallel_items.h"

namespace untorch::kernels::cpu {
namespace {

// The input position that output position i shows, or -1 for the constant.
std::int64_t source_of(Padding mode, std::int64_t i, const Pad::Dim& dim) {
  const std::int64_t size = dim.in_size;
  if (mode == Padding::kCircular) {
    // Negative padding crops first; what is left wraps around.
    const std::int64_t first = std::max<std::int64_t>(-dim.before, 0);
    const std::int64_t length = size - std::max<std::int64_t>(-dim.after, 0) - first;
    const std::int64_t at = i - std::max<std::int64_t>(dim.before, 0);
    return first + (at % length + length) % length;
  }
  const std::int64_t at = i - dim.before;
  if (at >= 0 && at < size) return at;
  if (mode == Padding::kConstant) return -1;
  if (mode == Padding::kReflect) return at < 0 ? -at : 2 * (size - 1) - at;
  return at < 0 ? 0 : size - 1;
}

}  // namespace

void pad(const Pad& p, Padding mode, DType dtype, void* out, const void* in, const void* value) {
  if (p.numel == 0) return;
  std::vector<std::vector<std::int64_t>> sources(static_cast<std::size_t>(p.ndim));  // element offsets, -1: constant
  for (int d = 0; d < p.ndim; ++d) {
    const Pad::Dim& dim = p.dims[d];
    for (std::int64_t i = 0; i < dim.out_size; ++i) {
      const std::int64_t from = source_of(mode, i, dim);
      sources[static_cast<std::size_t>(d)].push_back(from < 0 ? -1 : from * dim.in_stride);
    }
  }
  const std::int64_t length = p.dims[0].out_size, rows = p.numel / length;
  dispatch_width("pad", dtype, [&]<class T>() {
    T constant;
    std::memcpy(&constant, value, sizeof constant);
    const T* from = static_cast<const T*>(in);
    T* to = static_cast<T*>(out);
    const bool parallel = static_cast<double>(p.numel) > kParallelWork;
    for_each_item_grained(rows, 4096 / length + 1, parallel, [&](std::int64_t row) {
      std::int64_t rest = row, offset = 0;
      for (int d = 1; d < p.ndim; ++d) {
        const std::int64_t size = p.dims[d].out_size;
        const std::int64_t source = sources[static_cast<std::size_t>(d)][static_cast<std::size_t>(rest % size)];
        rest /= size;
        offset = source < 0 || offset < 0 ? -1 : offset + source;
      }
      T* line = to + row * length;
      const std::int64_t* source = sources[0].data();
      for (std::int64_t i = 0; i < length; ++i) {
        line[i] = offset < 0 || source[i] < 0 ? constant : from[offset + source[i]];
      }
    });
  });
}

void hann_window(void* out, DType dtype, std::int64_t n) {
  dispatch_floating("hann_window", dtype, [&]<class T>() {
    T* to = static_cast<T*>(out);
    // One period of the raised cosine, its last point left out.
    for (std::int64_t i = 0; i < n; ++i) {
      const double phase = 2 * std::numbers::pi * static_cast<double>(i) / static_cast<double>(n);
      to[i] = static_cast<T>(static_cast<compute_t<T>>(n == 1 ? 1.0 : 0.5 - 0.5 * std::cos(phase)));
    }
  });
}

}  // namespace untorch::kernels::cpu
