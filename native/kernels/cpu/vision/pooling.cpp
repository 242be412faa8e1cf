// Pooling, parallel over output lines: a window is reduced in registers (row-major, a channel at a time) or in a row of
// channels (channels last, vectorised).
//
// Bytes: the input about once (overlapping windows hit L1), the output once; one operation an element of a window.
#include "kernels/pooling.h"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/dispatch.h"
#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/vision/pooling_rows.h"

namespace untorch::kernels::cpu {
namespace {

// The windows of one dimension: output i reads start[i], start[i] + step, … below stop[i]; covered[i] is the length
// that an average over padding divides by.
struct PoolWindows {
  std::vector<std::int64_t> start, stop, covered;
  std::int64_t step = 1;
};

// Addresses are data + n*batch + c*channel + the spatial strides; in elements.
struct PoolLayout {
  std::int64_t batch, channel, stride[3];
};

struct PoolShape {
  std::int64_t batch, channels;
  std::array<std::int64_t, 3> input, output;
  std::array<PoolWindows, 3> windows;
  PoolLayout in, out;
  // Channels innermost in memory: loops run over them last.
  bool channels_innermost;
};

// Sums of half types run in float, of integers in int64.
template <class T>
using sum_t = std::conditional_t<std::is_integral_v<T>, std::int64_t, compute_t<T>>;

template <class T>
bool is_nan(T value) {
  if constexpr (std::is_integral_v<T>) {
    return false;
  } else {
    const compute_t<T> v = value;
    return v != v;
  }
}

template <class T>
T lowest() {
  if constexpr (std::is_integral_v<T>) {
    return std::numeric_limits<T>::lowest();
  } else {
    return T(-std::numeric_limits<compute_t<T>>::infinity());
  }
}

struct Window {
  std::int64_t d0, d1, h0, h1, w0, w1, sd, sh, sw, covered;
  std::int64_t count() const { return (d1 - d0) * (h1 - h0) * (w1 - w0); }
};

Window window_at(const PoolShape& s, std::int64_t od, std::int64_t oh, std::int64_t ow) {
  const auto d = static_cast<std::size_t>(od), h = static_cast<std::size_t>(oh), w = static_cast<std::size_t>(ow);
  const auto& [wd, wh, ww] = s.windows;
  return {wd.start[d], wd.stop[d], wh.start[h], wh.stop[h], ww.start[w],
          ww.stop[w],  wd.step,    wh.step,     ww.step,    wd.covered[d] * wh.covered[h] * ww.covered[w]};
}

std::int64_t divisor_of(const Window& window, PoolDivisor divisor, std::int64_t fixed) {
  return divisor == PoolDivisor::kFixed ? fixed : divisor == PoolDivisor::kCovered ? window.covered : window.count();
}

bool worth_threads(const PoolShape& s) {
  double work = static_cast<double>(s.batch * s.channels);
  for (std::size_t d = 0; d < 3; ++d) work *= static_cast<double>(std::max(s.input[d], s.output[d]));
  return work > kParallelWork;
}

std::int64_t offset(const PoolLayout& l, std::int64_t n, std::int64_t c, std::int64_t d, std::int64_t h,
                    std::int64_t w) {
  return n * l.batch + c * l.channel + d * l.stride[0] + h * l.stride[1] + w * l.stride[2];
}

// Calls line(n, c, od, oh): c is -1 when the line holds all channels.
template <class Line>
void for_each_line(const PoolShape& s, Line&& line) {
  const std::int64_t lines = s.output[0] * s.output[1];
  if (s.channels_innermost) {
    for_each_item(s.batch * lines, worth_threads(s),
                  [&](std::int64_t i) { line(i / lines, std::int64_t{-1}, i % lines / s.output[1], i % s.output[1]); });
  } else {
    for_each_item_grained(s.batch * s.channels, 1, worth_threads(s), [&](std::int64_t i) {
      for (std::int64_t l = 0; l < lines; ++l) line(i / s.channels, i % s.channels, l / s.output[1], l % s.output[1]);
    });
  }
}

PoolWindows sliding_windows(std::int64_t input, std::int64_t output, std::int64_t kernel, std::int64_t stride,
                            std::int64_t padding, std::int64_t dilation) {
  PoolWindows windows;
  windows.step = dilation;
  for (std::int64_t i = 0; i < output; ++i) {
    std::int64_t start = i * stride - padding;
    const std::int64_t padded_stop = std::min(start + kernel, input + padding);
    windows.covered.push_back(padded_stop - start);
    const std::int64_t stop = std::min(start + (kernel - 1) * dilation + 1, input);
    if (start < 0) start += (-start + dilation - 1) / dilation * dilation;
    windows.start.push_back(start);
    windows.stop.push_back(std::max(stop, start));
  }
  return windows;
}

PoolWindows adaptive_windows(std::int64_t input, std::int64_t output) {
  PoolWindows windows;
  for (std::int64_t i = 0; i < output; ++i) {
    const std::int64_t start = i * input / output, stop = ((i + 1) * input + output - 1) / output;
    windows.start.push_back(start);
    windows.stop.push_back(stop);
    windows.covered.push_back(stop - start);
  }
  return windows;
}

PoolShape shape_of(const Pool& p) {
  PoolShape shape{p.batch, p.channels, std::to_array(p.input), std::to_array(p.output), {}, {}, {}, false};
  for (std::size_t d = 0; d < 3; ++d) {
    shape.windows[d] =
        p.adaptive ? adaptive_windows(p.input[d], p.output[d])
                   : sliding_windows(p.input[d], p.output[d], p.kernel[d], p.stride[d], p.padding[d], p.dilation[d]);
  }
  shape.in = {p.in_batch, p.in_channel, {p.in_at[0], p.in_at[1], p.in_at[2]}};
  const std::int64_t pixel = p.channels_last ? p.channels : 1, pixels = p.output[0] * p.output[1] * p.output[2];
  shape.out = {p.channels * pixels,
               p.channels_last ? 1 : pixels,
               {p.output[1] * p.output[2] * pixel, p.output[2] * pixel, pixel}};
  shape.channels_innermost = p.channels_last && p.in_channel == 1 && p.channels > 1;
  return shape;
}

template <class Fn>
void dispatch_pool(const char* op, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kUInt8:
      return fn.template operator()<std::uint8_t>();
    case DType::kInt8:
      return fn.template operator()<std::int8_t>();
    case DType::kInt16:
      return fn.template operator()<std::int16_t>();
    case DType::kInt32:
      return fn.template operator()<std::int32_t>();
    case DType::kInt64:
      return fn.template operator()<std::int64_t>();
    default:
      return dispatch_floating(op, dtype, std::forward<Fn>(fn));
  }
}

template <class T>
void average(const PoolShape& s, PoolDivisor divisor, std::int64_t fixed, const T* input, T* output) {
  using Sum = sum_t<T>;
  const auto mean = [&](Sum sum, const Window& window) {
    const std::int64_t by = divisor_of(window, divisor, fixed);
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(by == 0 ? 0 : sum / by);
    } else {
      return T(sum / static_cast<Sum>(by));
    }
  };
  for_each_line(s, [&](std::int64_t n, std::int64_t c, std::int64_t od, std::int64_t oh) {
    thread_local std::vector<Sum> sums;
    if (c < 0) sums.resize(static_cast<std::size_t>(s.channels));
    for (std::int64_t ow = 0; ow < s.output[2]; ++ow) {
      const Window k = window_at(s, od, oh, ow);
      if (c >= 0) {
        Sum sum = 0;
        for (std::int64_t d = k.d0; d < k.d1; ++d) {
          for (std::int64_t h = k.h0; h < k.h1; ++h) {
            const T* from = input + offset(s.in, n, c, d, h, 0);
            for (std::int64_t w = k.w0; w < k.w1; ++w) sum += static_cast<Sum>(from[w * s.in.stride[2]]);
          }
        }
        const bool empty = k.count() <= 0;  // a window wholly in the padding
        output[offset(s.out, n, c, od, oh, ow)] = empty ? T(0) : mean(sum, k);
        continue;
      }
      std::fill(sums.begin(), sums.end(), Sum(0));
      for (std::int64_t d = k.d0; d < k.d1; ++d) {
        for (std::int64_t h = k.h0; h < k.h1; ++h) {
          for (std::int64_t w = k.w0; w < k.w1; ++w) {
            const T* from = input + offset(s.in, n, 0, d, h, w);
            Sum* to = sums.data();
            for (std::int64_t i = 0; i < s.channels; ++i) to[i] += static_cast<Sum>(from[i]);
          }
        }
      }
      T* to = output + offset(s.out, n, 0, od, oh, ow);
      const bool empty = k.count() <= 0;
      for (std::int64_t i = 0; i < s.channels; ++i) {
        to[i] = empty ? T(0) : mean(sums[static_cast<std::size_t>(i)], k);
      }
    }
  });
}

template <class T>
void maximum(const PoolShape& s, const T* input, T* output, std::int64_t* indices) {
  for_each_line(s, [&](std::int64_t n, std::int64_t c, std::int64_t od, std::int64_t oh) {
    for (std::int64_t ow = 0; ow < s.output[2]; ++ow) {
      const Window k = window_at(s, od, oh, ow);
      const std::int64_t nowhere = (k.d0 * s.input[1] + k.h0) * s.input[2] + k.w0;
      if (c >= 0) {
        T best = lowest<T>();
        std::int64_t at = nowhere;
        for (std::int64_t d = k.d0; d < k.d1; d += k.sd) {
          for (std::int64_t h = k.h0; h < k.h1; h += k.sh) {
            const T* from = input + offset(s.in, n, c, d, h, 0);
            for (std::int64_t w = k.w0; w < k.w1; w += k.sw) {
              const T value = from[w * s.in.stride[2]];
              if (value > best || is_nan(value)) {
                best = value;
                at = (d * s.input[1] + h) * s.input[2] + w;
              }
            }
          }
        }
        const std::int64_t to = offset(s.out, n, c, od, oh, ow);
        output[to] = best;
        indices[to] = at;
        continue;
      }
      const std::int64_t to = offset(s.out, n, 0, od, oh, ow);
      T* best = output + to;
      std::int64_t* at = indices + to;
      std::fill_n(best, s.channels, lowest<T>());
      std::fill_n(at, s.channels, nowhere);
      for (std::int64_t d = k.d0; d < k.d1; d += k.sd) {
        for (std::int64_t h = k.h0; h < k.h1; h += k.sh) {
          for (std::int64_t w = k.w0; w < k.w1; w += k.sw) {
            const T* from = input + offset(s.in, n, 0, d, h, w);
            const std::int64_t here = (d * s.input[1] + h) * s.input[2] + w;
            if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
              UNTORCH_ISA_CALL(max_channels<T>)(s.channels, from, here, best, at);
              continue;
            }
            for (std::int64_t i = 0; i < s.channels; ++i) {
              const bool better = from[i] > best[i] || is_nan(from[i]);
              best[i] = better ? from[i] : best[i];
              at[i] = better ? here : at[i];
            }
          }
        }
      }
    }
  });
}

}  // namespace

void avg_pool(const Pool& pool, PoolDivisor divisor, std::int64_t fixed, DType dtype, const void* input, void* output) {
  const PoolShape shape = shape_of(pool);
  dispatch_pool("avg_pool", dtype, [&]<class T>() {
    average(shape, divisor, fixed, static_cast<const T*>(input), static_cast<T*>(output));
  });
}

void max_pool(const Pool& pool, DType dtype, const void* input, void* output, std::int64_t* indices) {
  const PoolShape shape = shape_of(pool);
  dispatch_pool("max_pool", dtype,
                [&]<class T>() { maximum(shape, static_cast<const T*>(input), static_cast<T*>(output), indices); });
}

}  // namespace untorch::kernels::cpu
