// The image that convolutions by AMX read, and the lines of pixels that they compute.
//
//   [phase][image][height][width][pixel]       phase (py, px): padded rows y ≡ py and columns x ≡ px, modulo the stride
//
// This is an implicit GEMM without an offset table. Tap (ky, kx) of output pixel (y, x) is pixel
// (y + ky·dilation / stride, x + kx·dilation / stride) of the phase of (ky·dilation, kx·dilation) modulo the stride.
// With output pixels numbered as the image's, each tap reads at a constant offset, and 16 consecutive pixels are the
// rows of a tile with a constant stride, for any stride and padding of the convolution. The columns at the end of a row
// that are no output are computed and discarded: 2 of 58 for a 3×3 kernel on 56×56.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "kernels/cpu/common/amx_limits.h"
#include "kernels/cpu/convolution/amx_lines.h"

namespace untorch::kernels {

struct AmxImage {
  std::array<std::int64_t, 2> phases;
  std::int64_t images, height, width;  // of a phase
  std::int64_t pixel;                  // bytes from a pixel to the next
  AmxLines lines;
  std::vector<std::int64_t> taps;  // bytes from an output pixel's own to what each tap reads

  std::int64_t rows() const noexcept { return phases[0] * images * height; }
  // Tiles read behind the last pixel.
  std::int64_t nbytes() const noexcept { return (phases[1] * rows() * width + kAmxTilePixels) * pixel; }
};

// per_image: no line has pixels of two images.
template <class Problem>
AmxImage amx_image(const Problem& p, std::int64_t pixel, bool per_image) {
  AmxImage to{};
  std::array<std::int64_t, 2> size{};
  for (std::size_t d = 0; d < 2; ++d) {
    const std::int64_t reach = (p.kernel[d] - 1) * p.dilation[d];
    to.phases[d] = std::min(p.stride[d], reach + 1);
    size[d] = p.output[d] + reach / p.stride[d];
  }
  to.images = p.batch, to.height = size[0], to.width = size[1], to.pixel = pixel;
  for (std::int64_t ky = 0; ky < p.kernel[0]; ++ky) {
    for (std::int64_t kx = 0; kx < p.kernel[1]; ++kx) {
      const std::int64_t y = ky * p.dilation[0], x = kx * p.dilation[1];
      const std::int64_t phase = y % p.stride[0] * to.phases[1] + x % p.stride[1];
      to.taps.push_back(((phase * p.batch * to.height + y / p.stride[0]) * to.width + x / p.stride[1]) * pixel);
    }
  }
  AmxLines& l = to.lines;
  l = {p.batch, to.height * to.width, p.output[0], to.width, p.output[1]};
  if (to.height == p.output[0] && (p.batch == 1 || !per_image)) l.count = 1, l.rows *= p.batch;
  if (l.pitch == l.width) l.width = l.pitch = l.pitch * l.rows, l.rows = 1;
  return to;
}

// Whether there are enough pixels, enough of them count, and steps along k are long enough. words: of a tap's channels,
// 4 bytes each.
inline bool amx_pays(const AmxImage& image, std::int64_t words, int fewest_words, int fewest_pixels) {
  const AmxLines& l = image.lines;
  return amx_step(words) >= fewest_words && l.length() >= fewest_pixels &&
         l.length() <= kAmxMostWaste * l.rows * l.width;
}

// Whether a 1×1 kernel reads every pixel once, all of them a constant stride apart.
template <class Problem, class Strides>
bool is_dense_pointwise(const Problem& p, const Strides& s) {
  return p.taps() == 1 && p.stride[0] == 1 && p.stride[1] == 1 && p.padding[0] == 0 && p.padding[1] == 0 &&
         (p.input[0] == 1 || s.row == p.input[1] * s.pixel) &&
         (p.batch == 1 || s.batch == p.input[0] * p.input[1] * s.pixel);
}

// Fills row `item` of image.rows(). `padding` is a byte; convert(image, y, x, count, to) writes `count` pixels of the
// input from (y, x) on, a stride apart.
template <class Problem, class Convert>
void fill_amx_row(const Problem& p, const AmxImage& image, std::int64_t item, std::uint8_t padding, char* made,
                  Convert&& convert) {
  const std::int64_t py = item / (image.images * image.height), n = item / image.height % image.images;
  const std::int64_t y = item % image.height * p.stride[0] + py - p.padding[0];
  const bool inside = y >= 0 && y < p.input[0];
  for (std::int64_t px = 0; px < image.phases[1]; ++px) {
    const std::int64_t row =
        (py * image.phases[1] + px) * image.images * image.height + item % (image.images * image.height);
    char* const to = made + row * image.width * image.pixel;
    // Columns x·stride + shift of the input.
    const std::int64_t stride = p.stride[1], shift = px - p.padding[1];
    const auto reaching = [&](std::int64_t column) {  // the first x whose column is no less
      return std::clamp<std::int64_t>(column <= shift ? 0 : (column - shift + stride - 1) / stride, 0, image.width);
    };
    const std::int64_t x0 = inside ? reaching(0) : image.width, x1 = inside ? std::max(x0, reaching(p.input[1])) : x0;
    std::fill_n(to, x0 * image.pixel, static_cast<char>(padding));
    if (x1 > x0) convert(n, y, x0 * stride + shift, x1 - x0, to + x0 * image.pixel);
    std::fill_n(to + x1 * image.pixel, (image.width - x1) * image.pixel, static_cast<char>(padding));
  }
}

}  // namespace untorch::kernels
