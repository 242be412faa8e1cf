// Convolution by tiled im2col and GEMM, transposed by GEMM and col2im, depthwise by vector kernels.
//
// Channels first: C[out, tile] = W[out, K] * columns[K, tile], K = (channel, tap); K is split by channels.
// Channels last:  C[tile, out] = rows[tile, K] * W[out, K]^T, K = (tap, channel); K is split by taps.
// A tile is some hundred output positions: its columns (at most 192 Ki elements a thread) stay in L2, and the whole
// im2col matrix never exists. Operations: 2 · outputs · K. The share of the roofline has not been measured.
#include "kernels/convolution.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/convolution/depthwise.h"
#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels::cpu {
namespace {

constexpr std::int64_t kColumnElements = 192 * 1024;  // per thread
constexpr std::int64_t kMaxTile = 768, kMinTile = 48, kTargetDepth = 384;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Position {
  std::int64_t d, h, w;
};

Position position_at(const std::array<std::int64_t, 3>& sizes, std::int64_t p) {
  return {p / (sizes[1] * sizes[2]), p / sizes[2] % sizes[1], p % sizes[2]};
}

// columns[(channel, tap)][first .. last) of the channels [c0, c1); plane: the group's first input channel.
template <class T>
void im2col(const ConvolutionShape& s, const T* plane, std::int64_t c0, std::int64_t c1, std::int64_t first,
            std::int64_t last, T* columns) {
  const std::int64_t tile = last - first, size = s.input_size();
  T* to = columns;
  for (std::int64_t c = c0; c < c1; ++c) {
    const T* channel = plane + c * size;
    for (std::int64_t kd = 0; kd < s.kernel[0]; ++kd) {
      for (std::int64_t kh = 0; kh < s.kernel[1]; ++kh) {
        for (std::int64_t kw = 0; kw < s.kernel[2]; ++kw, to += tile) {
          std::int64_t p = first;
          Position at = position_at(s.output, first);
          while (p < last) {
            const std::int64_t n = std::min(last - p, s.output[2] - at.w);
            T* row = to + (p - first);
            const std::int64_t id = at.d * s.stride[0] - s.padding[0] + kd * s.dilation[0];
            const std::int64_t ih = at.h * s.stride[1] - s.padding[1] + kh * s.dilation[1];
            if (id < 0 || id >= s.input[0] || ih < 0 || ih >= s.input[1]) {
              std::fill_n(row, n, T(0));
            } else {
              const T* from = channel + (id * s.input[1] + ih) * s.input[2];
              const std::int64_t step = s.stride[2];
              const std::int64_t start = at.w * step - s.padding[2] + kw * s.dilation[2];
              const std::int64_t lead = std::min(n, start < 0 ? ceil_div(-start, step) : 0);
              const std::int64_t room = s.input[2] - start;  // x is inside while x*step < room
              const std::int64_t stop = std::clamp(room <= 0 ? 0 : ceil_div(room, step), lead, n);
              std::fill_n(row, lead, T(0));
              if (step == 1) {
                if (stop > lead)
                  std::memcpy(row + lead, from + start + lead, sizeof(T) * static_cast<std::size_t>(stop - lead));
              } else {
                for (std::int64_t x = lead; x < stop; ++x) row[x] = from[start + x * step];
              }
              std::fill_n(row + stop, n - stop, T(0));
            }
            p += n;
            at.w = 0;
            if (++at.h == s.output[1]) {
              at.h = 0;
              ++at.d;
            }
          }
        }
      }
    }
  }
}

// rows[first .. last)[(tap, channel)] of the taps [t0, t1); image: the group's first channel of the first pixel.
template <class T>
void im2row(const ConvolutionShape& s, const T* image, std::int64_t t0, std::int64_t t1, std::int64_t first,
            std::int64_t last, T* rows) {
  const std::int64_t channels = s.in_channels, pitch = s.groups * channels;
  // Neighbouring taps of a line are neighbours in memory too when one group has all channels.
  const bool joined = s.groups == 1 && s.dilation[2] == 1;
  T* to = rows;
  for (std::int64_t p = first; p < last; ++p) {
    const Position at = position_at(s.output, p);
    const std::int64_t w0 = at.w * s.stride[2] - s.padding[2];
    for (std::int64_t tap = t0; tap < t1;) {
      const Position k = position_at(s.kernel, tap);
      const std::int64_t line = std::min(t1 - tap, s.kernel[2] - k.w);  // taps of this kernel line
      tap += line;
      const std::int64_t id = at.d * s.stride[0] - s.padding[0] + k.d * s.dilation[0];
      const std::int64_t ih = at.h * s.stride[1] - s.padding[1] + k.h * s.dilation[1];
      if (id < 0 || id >= s.input[0] || ih < 0 || ih >= s.input[1]) {
        to = std::fill_n(to, line * channels, T(0));
        continue;
      }
      const T* from = image + (id * s.input[1] + ih) * s.input[2] * pitch;
      if (joined) {
        const std::int64_t start = w0 + k.w;
        const std::int64_t lead = std::clamp<std::int64_t>(-start, 0, line);
        const std::int64_t stop = std::clamp<std::int64_t>(s.input[2] - start, lead, line);
        to = std::fill_n(to, lead * channels, T(0));
        for (std::int64_t i = (start + lead) * channels; i < (start + stop) * channels; ++i) *to++ = from[i];
        to = std::fill_n(to, (line - stop) * channels, T(0));
        continue;
      }
      for (std::int64_t x = 0; x < line; ++x) {
        const std::int64_t iw = w0 + (k.w + x) * s.dilation[2];
        to =
            iw < 0 || iw >= s.input[2] ? std::fill_n(to, channels, T(0)) : std::copy_n(from + iw * pitch, channels, to);
      }
    }
  }
}

// True when the columns are the input itself.
bool is_pointwise(const ConvolutionShape& s) {
  for (std::size_t d = 0; d < 3; ++d) {
    if (s.kernel[d] != 1 || s.stride[d] != 1 || s.padding[d] != 0) return false;
  }
  return true;
}

double work_of(const ConvolutionShape& s, std::int64_t positions) {
  return static_cast<double>(s.batch * s.groups * s.out_channels) * static_cast<double>(s.in_channels) *
         static_cast<double>(s.kernel_size()) * static_cast<double>(positions);
}

template <class T>
void im2col_gemm(const ConvolutionShape& s, const T* input, const T* weight, const T* bias, T* output) {
  const std::int64_t positions = s.output_size(), taps = s.kernel_size();
  const std::int64_t depth = s.in_channels * taps, images = s.batch * s.groups;
  if (images == 0 || positions == 0 || s.out_channels == 0) return;
  const bool direct = is_pointwise(s);
  const bool parallel = work_of(s, positions) > kParallelWork;
  const std::int64_t threads = parallel ? omp_get_max_threads() : 1;

  // The split of K: whole channels (channels first) or whole taps (channels last).
  const std::int64_t unit = std::max<std::int64_t>(s.channels_last ? s.in_channels : taps, 1);
  const std::int64_t units = s.channels_last ? taps : s.in_channels;
  const std::int64_t chunk =
      direct ? units : std::clamp<std::int64_t>(kTargetDepth / unit, 1, std::max<std::int64_t>(units, 1));
  std::int64_t tile = std::clamp<std::int64_t>(kColumnElements / (chunk * unit), kMinTile, kMaxTile);
  // Enough tiles for every thread, but no slivers.
  const std::int64_t wanted = ceil_div(2 * threads, images);
  tile = std::min(tile, std::max(kMinTile, (ceil_div(positions, wanted) + 15) / 16 * 16));
  tile = std::min(tile, positions);
  const std::int64_t tiles = ceil_div(positions, tile);
  // Few tiles (small images, many channels): split the output channels too.
  const std::int64_t blocks =
      std::clamp<std::int64_t>(ceil_div(threads, images * tiles), 1, std::max<std::int64_t>(s.out_channels / 64, 1));
  const std::int64_t block = ceil_div(s.out_channels, blocks);

  const std::int64_t in_image = s.groups * s.in_channels * s.input_size();
  const std::int64_t out_image = s.groups * s.out_channels * positions;
  for_each_item(images * tiles * blocks, parallel, [&](std::int64_t item) {
    const std::int64_t n = item / (s.groups * tiles * blocks), g = item / (tiles * blocks) % s.groups;
    const std::int64_t first = item / blocks % tiles * tile, last = std::min(first + tile, positions);
    const std::int64_t o0 = item % blocks * block, o1 = std::min(o0 + block, s.out_channels);
    if (o0 >= o1) return;
    const std::int64_t m = o1 - o0, t = last - first, out0 = g * s.out_channels + o0;
    thread_local std::vector<T> columns;
    if (!direct) columns.resize(static_cast<std::size_t>(std::max<std::int64_t>(chunk * unit * t, 1)));
    const T* filter = weight + out0 * depth;
    // Row i of the channels-first result is channel i; of the channels-last result, position i.
    const std::int64_t out_pitch = s.channels_last ? s.groups * s.out_channels : positions;
    T* to = output + n * out_image + (s.channels_last ? first * out_pitch + out0 : out0 * out_pitch + first);
    if (bias != nullptr || depth == 0) {
      if (s.channels_last) {
        for (std::int64_t p = 0; p < t; ++p) {
          for (std::int64_t o = 0; o < m; ++o) to[p * out_pitch + o] = bias != nullptr ? bias[out0 + o] : T(0);
        }
      } else {
        for (std::int64_t o = 0; o < m; ++o)
          std::fill_n(to + o * out_pitch, t, bias != nullptr ? bias[out0 + o] : T(0));
      }
    }
    for (std::int64_t u = 0; u < units && depth != 0; u += chunk) {
      const std::int64_t v = std::min(u + chunk, units), k = (v - u) * unit;
      const T beta = u == 0 && bias == nullptr ? T(0) : T(1);
      if (s.channels_last) {
        const T* image = input + n * in_image + g * s.in_channels;
        MatrixRef<const T> a{image + first * s.groups * s.in_channels, s.groups * s.in_channels, 1};
        if (!direct) {
          im2row(s, image, u, v, first, last, columns.data());
          a = {columns.data(), k, 1};
        }
        gemm_serial(t, m, k, T(1), a, MatrixRef<const T>{filter + u * unit, 1, depth}, beta,
                    MatrixRef<T>{to, out_pitch, 1});
      } else {
        const T* plane = input + n * in_image + g * s.in_channels * s.input_size();
        MatrixRef<const T> b{plane + first, positions, 1};
        if (!direct) {
          im2col(s, plane, u, v, first, last, columns.data());
          b = {columns.data(), t, 1};
        }
        gemm_serial(m, t, k, T(1), MatrixRef<const T>{filter + u * unit, depth, 1}, b, beta,
                    MatrixRef<T>{to, out_pitch, 1});
      }
    }
  });
}

template <class T>
void gemm_col2im(const ConvolutionShape& s, const T* input, const T* weight, const T* bias, T* output) {
  const std::int64_t in_size = s.input_size(), out_size = s.output_size(), taps = s.kernel_size();
  if (s.batch == 0 || s.groups == 0 || s.out_channels == 0 || out_size == 0) return;
  const bool parallel = work_of(s, in_size) > kParallelWork;
  const std::int64_t threads = parallel ? omp_get_max_threads() : 1;
  // An item owns some output channels of one image: no other thread adds to them.
  std::int64_t block = std::clamp<std::int64_t>(512 / std::max<std::int64_t>(taps, 1), 1, s.out_channels);
  block = std::min(block, std::max<std::int64_t>(1, ceil_div(s.batch * s.groups * s.out_channels, 2 * threads)));
  const std::int64_t blocks = ceil_div(s.out_channels, block);
  const std::int64_t tile =
      std::clamp<std::int64_t>(kColumnElements / std::max<std::int64_t>(block * taps, 1), kMinTile, kMaxTile);
  for_each_item(s.batch * s.groups * blocks, parallel, [&](std::int64_t item) {
    const std::int64_t n = item / (s.groups * blocks), g = item / blocks % s.groups;
    const std::int64_t o0 = item % blocks * block, o1 = std::min(o0 + block, s.out_channels);
    const std::int64_t out0 = g * s.out_channels + o0, m = (o1 - o0) * taps;
    T* to = output + (n * s.groups * s.out_channels + out0) * out_size;
    for (std::int64_t o = 0; o < o1 - o0; ++o)
      std::fill_n(to + o * out_size, out_size, bias != nullptr ? bias[out0 + o] : T(0));
    if (s.in_channels == 0) return;
    const T* from = input + (n * s.groups + g) * s.in_channels * in_size;
    const T* filter = weight + (g * s.in_channels * s.out_channels + o0) * taps;
    thread_local std::vector<T> columns;
    columns.resize(static_cast<std::size_t>(m * std::min(tile, in_size)));
    for (std::int64_t first = 0; first < in_size; first += tile) {
      const std::int64_t last = std::min(first + tile, in_size), t = last - first;
      gemm_serial(m, t, s.in_channels, T(1), MatrixRef<const T>{filter, 1, s.out_channels * taps},
                  MatrixRef<const T>{from + first, in_size, 1}, T(0), MatrixRef<T>{columns.data(), t, 1});
      const T* column = columns.data();
      for (std::int64_t o = 0; o < o1 - o0; ++o) {
        T* plane = to + o * out_size;
        for (std::int64_t tap = 0; tap < taps; ++tap, column += t) {
          const Position k = position_at(s.kernel, tap);
          Position at = position_at(s.input, first);
          std::int64_t p = first;
          while (p < last) {
            const std::int64_t run = std::min(last - p, s.input[2] - at.w);
            const std::int64_t od = at.d * s.stride[0] - s.padding[0] + k.d * s.dilation[0];
            const std::int64_t oh = at.h * s.stride[1] - s.padding[1] + k.h * s.dilation[1];
            if (od >= 0 && od < s.output[0] && oh >= 0 && oh < s.output[1]) {
              T* row = plane + (od * s.output[1] + oh) * s.output[2];
              const T* values = column + (p - first);
              std::int64_t ow = at.w * s.stride[2] - s.padding[2] + k.w * s.dilation[2];
              for (std::int64_t x = 0; x < run; ++x, ow += s.stride[2]) {
                if (ow >= 0 && ow < s.output[2]) row[ow] += values[x];
              }
            }
            p += run;
            at.w = 0;
            if (++at.h == s.input[1]) {
              at.h = 0;
              ++at.d;
            }
          }
        }
      }
    }
  });
}

template <class T>
void depthwise(const ConvolutionShape& s, const T* input, const T* weight, const T* bias, T* output) {
  const std::int64_t channels = s.groups * s.out_channels, taps = s.kernel_size(), in_size = s.input_size();
  const std::int64_t lines = s.output[0] * s.output[1];
  if (s.batch == 0 || channels == 0 || s.output_size() == 0) return;
  const bool parallel = work_of(s, s.output_size()) > kParallelWork;
  if (s.channels_last) {
    // One item is an output line of an image; the kernel runs over all channels of a pixel.
    const auto pixel_kernel = UNTORCH_ISA_CALL(depthwise_pixel<T>);
    for_each_item(s.batch * lines, parallel, [&](std::int64_t item) {
      thread_local std::vector<const T*> pixels, filters, lines_in, lines_filter;
      const std::int64_t n = item / lines, od = item % lines / s.output[1], oh = item % s.output[1];
      lines_in.clear();
      lines_filter.clear();
      for (std::int64_t kd = 0; kd < s.kernel[0]; ++kd) {
        for (std::int64_t kh = 0; kh < s.kernel[1]; ++kh) {
          const std::int64_t id = od * s.stride[0] - s.padding[0] + kd * s.dilation[0];
          const std::int64_t ih = oh * s.stride[1] - s.padding[1] + kh * s.dilation[1];
          if (id < 0 || id >= s.input[0] || ih < 0 || ih >= s.input[1]) continue;
          lines_in.push_back(input + (n * in_size + (id * s.input[1] + ih) * s.input[2]) * s.groups);
          lines_filter.push_back(weight + (kd * s.kernel[1] + kh) * s.kernel[2] * channels);
        }
      }
      pixels.resize(static_cast<std::size_t>(taps));
      filters.resize(static_cast<std::size_t>(taps));
      const T **pixel = pixels.data(), **filter = filters.data();
      const T *const *line_in = lines_in.data(), *const *line_filter = lines_filter.data();
      const auto count_lines = static_cast<std::int64_t>(lines_in.size());
      for (std::int64_t ow = 0; ow < s.output[2]; ++ow) {
        std::int64_t count = 0;
        for (std::int64_t l = 0; l < count_lines; ++l) {
          std::int64_t iw = ow * s.stride[2] - s.padding[2];
          for (std::int64_t kw = 0; kw < s.kernel[2]; ++kw, iw += s.dilation[2]) {
            if (iw < 0 || iw >= s.input[2]) continue;
            pixel[count] = line_in[l] + iw * s.groups;
            filter[count++] = line_filter[l] + kw * channels;
          }
        }
        pixel_kernel(channels, count, pixel, filter, bias, output + (item * s.output[2] + ow) * channels);
      }
    });
    return;
  }
  const auto row_kernel = UNTORCH_ISA_CALL(depthwise_row<T>);
  for_each_item(s.batch * channels, parallel, [&](std::int64_t item) {
    thread_local std::vector<const T*> rows, filters;
    const std::int64_t n = item / channels, c = item % channels;
    const T* plane = input + (n * s.groups + c / s.out_channels) * in_size;
    for (std::int64_t line = 0; line < lines; ++line) {
      rows.clear();
      filters.clear();
      const std::int64_t od = line / s.output[1], oh = line % s.output[1];
      for (std::int64_t kd = 0; kd < s.kernel[0]; ++kd) {
        for (std::int64_t kh = 0; kh < s.kernel[1]; ++kh) {
          const std::int64_t id = od * s.stride[0] - s.padding[0] + kd * s.dilation[0];
          const std::int64_t ih = oh * s.stride[1] - s.padding[1] + kh * s.dilation[1];
          if (id < 0 || id >= s.input[0] || ih < 0 || ih >= s.input[1]) continue;
          rows.push_back(plane + (id * s.input[1] + ih) * s.input[2]);
          filters.push_back(weight + c * taps + (kd * s.kernel[1] + kh) * s.kernel[2]);
        }
      }
      const DepthwiseRow row{static_cast<std::int64_t>(rows.size()),
                             s.kernel[2],
                             s.input[2],
                             s.output[2],
                             s.stride[2],
                             s.padding[2],
                             s.dilation[2]};
      row_kernel(row, rows.data(), filters.data(), bias != nullptr ? bias[c] : T(0),
                 output + (item * lines + line) * s.output[2]);
    }
  });
}

template <class Fn>
void dispatch(DType dtype, Fn&& fn) {
  if (dtype == DType::kFloat64) {
    fn.template operator()<double>();
  } else {
    fn.template operator()<float>();
  }
}

}  // namespace

void convolution(const ConvolutionShape& s, DType dtype, const void* input, const void* weight, const void* bias,
                 void* output) {
  dispatch(dtype, [&]<class T>() {
    im2col_gemm(s, static_cast<const T*>(input), static_cast<const T*>(weight), static_cast<const T*>(bias),
                static_cast<T*>(output));
  });
}

void convolution_transposed(const ConvolutionShape& s, DType dtype, const void* input, const void* weight,
                            const void* bias, void* output) {
  dispatch(dtype, [&]<class T>() {
    gemm_col2im(s, static_cast<const T*>(input), static_cast<const T*>(weight), static_cast<const T*>(bias),
                static_cast<T*>(output));
  });
}

void convolution_depthwise(const ConvolutionShape& s, DType dtype, const void* input, const void* weight,
                           const void* bias, void* output) {
  dispatch(dtype, [&]<class T>() {
    depthwise(s, static_cast<const T*>(input), static_cast<const T*>(weight), static_cast<const T*>(bias),
              static_cast<T*>(output));
  });
}

}  // namespace untorch::kernels::cpu
