// Deformable convolution: im2col with bilinear samples, then a GEMM with the weights, image by image and group by
// group.
//
// Layout: columns [channels / groups · kernel, out height · out width], row-major; output = weight · columns + bias.
// Bound by the GEMM for many output channels, else by the four reads of each sample.
#include <cmath>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/detection.h"
#include "kernels/gemm.h"

namespace untorch::kernels::cpu {
namespace {

template <class T>
T sample(const T* plane, std::int64_t height, std::int64_t width, T y, T x) {
  // NaN is outside, too.
  if (!(y > T(-1) && y < static_cast<T>(height) && x > T(-1) && x < static_cast<T>(width))) return T(0);
  const auto top = static_cast<std::int64_t>(std::floor(y)), left = static_cast<std::int64_t>(std::floor(x));
  const T down = y - static_cast<T>(top), across = x - static_cast<T>(left), up = T(1) - down, back = T(1) - across;
  const auto at = [&](std::int64_t row, std::int64_t column) {
    return row >= 0 && row < height && column >= 0 && column < width ? plane[row * width + column] : T(0);
  };
  return up * back * at(top, left) + up * across * at(top, left + 1) + down * back * at(top + 1, left) +
         down * across * at(top + 1, left + 1);
}

// One row of columns: a channel of the image at one place of the kernel, for all outputs.
template <class T>
void fill_row(const DeformConv& p, std::int64_t image, std::int64_t channel, std::int64_t place, T* row) {
  const std::int64_t kernel = p.kernel_h * p.kernel_w, outputs = p.out_h * p.out_w, pixels = p.height * p.width;
  const std::int64_t group = channel / (p.channels / p.offset_groups);
  const T* const plane = static_cast<const T*>(p.input) + (image * p.channels + channel) * pixels;
  const T* const dy =
      static_cast<const T*>(p.offset) + ((image * p.offset_groups + group) * kernel + place) * 2 * outputs;
  const T* const dx = dy + outputs;
  const T* const mask = p.mask == nullptr ? nullptr
                                          : static_cast<const T*>(p.mask) +
                                                ((image * p.offset_groups + group) * kernel + place) * outputs;
  const std::int64_t y0 = place / p.kernel_w * p.dilation_h - p.pad_h, x0 = place % p.kernel_w * p.dilation_w - p.pad_w;
  for (std::int64_t i = 0; i < outputs; ++i) {
    const T y = static_cast<T>(i / p.out_w * p.stride_h + y0) + dy[i],
            x = static_cast<T>(i % p.out_w * p.stride_w + x0) + dx[i];
    const T value = sample(plane, p.height, p.width, y, x);
    row[i] = mask == nullptr ? value : mask[i] * value;
  }
}

template <class T>
void convolve(const DeformConv& p) {
  const std::int64_t kernel = p.kernel_h * p.kernel_w, outputs = p.out_h * p.out_w;
  const std::int64_t channels = p.channels / p.groups, filters = p.out_channels / p.groups, rows = channels * kernel;
  std::vector<T> columns(static_cast<std::size_t>(rows * outputs));
  for (std::int64_t image = 0; image < p.batch; ++image) {
    for (std::int64_t group = 0; group < p.groups; ++group) {
      for_each_item(rows, static_cast<double>(rows * outputs) * 8 > kParallelWork, [&](std::int64_t row) {
        fill_row(p, image, group * channels + row / kernel, row % kernel, columns.data() + row * outputs);
      });
      T* const out = static_cast<T*>(p.out) + (image * p.out_channels + group * filters) * outputs;
      for (std::int64_t f = 0; f < filters; ++f) {
        const T start = p.bias == nullptr ? T(0) : static_cast<const T*>(p.bias)[group * filters + f];
        for (std::int64_t i = 0; i < outputs; ++i) out[f * outputs + i] = start;
      }
      const auto matrix = [&](const void* data, std::int64_t m, std::int64_t n) {
        return Matrix{const_cast<void*>(data), p.dtype, 1, m, n, 0, n, 1};
      };
      gemm(matrix(static_cast<const T*>(p.weight) + group * filters * rows, filters, rows),
           matrix(columns.data(), rows, outputs), matrix(out, filters, outputs), 1, 1);
    }
  }
}

}  // namespace

void deform_conv2d(const DeformConv& p) {
  if (p.dtype == DType::kFloat64) {
    convolve<double>(p);
  } else {
    convolve<float>(p);
  }
}

}  // namespace untorch::kernels::cpu
