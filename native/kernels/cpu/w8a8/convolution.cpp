// W8A8 convolution: brings the input into uint8 and whole words of four channels, and cuts the work for the threads.
#include "kernels/cpu/w8a8/convolution.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/convolution/amx_image.h"
#include "kernels/cpu/convolution/amx_parts.h"
#include "kernels/cpu/w8a8/convolution_levels.h"

namespace untorch::kernels {
namespace {

// Images with fewer channels are padded beforehand: a row of the kernel is then one run of consecutive words.
constexpr std::int64_t kFewChannels = 8;
constexpr std::int64_t kBlockPixels = 240;   // that pass over a panel's weights together
constexpr std::int64_t kTasksPerThread = 4;  // so that a thread that is held up costs a quarter of its share
constexpr float kLeastScale = 0x1p-126f;     // its reciprocal is finite

std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }
std::int64_t round_up(std::int64_t x, std::int64_t y) { return ceil_div(x, y) * y; }

template <class T, int kPurpose>
T* scratch(std::int64_t count) {
  thread_local std::vector<T> memory;
  if (memory.size() < static_cast<std::size_t>(count)) memory.resize(static_cast<std::size_t>(count));
  return memory.data();
}

struct Source {
  const void* data;
  bool is_float;
  ImageStrides strides;
  const float* line(std::int64_t offset) const { return static_cast<const float*>(data) + offset; }
  const std::uint8_t* bytes(std::int64_t offset) const { return static_cast<const std::uint8_t*>(data) + offset; }
};

// u = round(x / scale) + zero, for one image.
struct Quantization {
  float scale, inverse;
  std::int32_t zero;
};

double operations(const Int8Convolution& p) {
  return 2.0 * static_cast<double>(p.batch * p.output[0] * p.output[1]) *
         static_cast<double>(p.groups * p.out_channels * p.taps() * p.in_channels);
}

// Whether pixels' channels lie side by side; else rows' pixels do.
bool has_dense_pixels(const Int8Convolution& p, const ImageStrides& s) {
  return s.channel == 1 || p.groups * p.in_channels == 1;
}

FloatRange image_range(const Int8Convolution& p, const Source& from, std::int64_t image) {
  const ImageStrides& s = from.strides;
  const std::int64_t channels = p.groups * p.in_channels, rows = p.input[0], columns = p.input[1];
  std::vector<FloatRange> found(static_cast<std::size_t>(rows));
  for_each_item_grained(rows, 8, rows * columns * channels > kParallelWork, [&](std::int64_t y) {
    FloatRange& range = found[static_cast<std::size_t>(y)];
    const float* const line = from.line(image * s.batch + y * s.row);
    if (!has_dense_pixels(p, s)) {
      for (std::int64_t c = 0; c < channels; ++c) UNTORCH_ISA_CALL(extend_range)(line + c * s.channel, columns, range);
    } else if (s.pixel == channels) {
      UNTORCH_ISA_CALL(extend_range)(line, columns * channels, range);
    } else {
      for (std::int64_t x = 0; x < columns; ++x) UNTORCH_ISA_CALL(extend_range)(line + x * s.pixel, channels, range);
    }
  });
  FloatRange all;
  for (const FloatRange& row : found) {
    all.low = std::min(all.low, row.low), all.high = std::max(all.high, row.high);
    all.finite = all.finite && row.finite;
  }
  return all;
}

// As a row of int8_linear is quantized (int8_rows.isa.cpp).
Quantization quantization_of(ActivationRange kind, const FloatRange& range) {
  if (!range.finite) return {std::numeric_limits<float>::quiet_NaN(), 0.0f, 0};
  if (kind == ActivationRange::kSymmetric) {
    const float scale = std::max(std::max(range.high, -range.low) / 127.0f, kLeastScale);
    return {scale, 1.0f / scale, 128};
  }
  const float scale = std::max(range.high / 255.0f - range.low / 255.0f, kLeastScale), inverse = 1.0f / scale;
  return {scale, inverse, std::min(static_cast<std::int32_t>(std::nearbyintf(-range.low * inverse)), 255)};
}

// As PyTorch's choose_qparams does it, and int8_linear with kTensor.
Quantization quantization_of_tensor(const FloatRange& range, float least) {
  const float scale = std::max((range.high - range.low) / 255.0f, least);
  if (!range.finite || !std::isfinite(scale)) return {std::numeric_limits<float>::quiet_NaN(), 0.0f, 0};
  return {scale, 1.0f / scale, std::min(-static_cast<std::int32_t>(std::nearbyintf(range.low / scale)), 255)};
}

// `columns` pixels of a row, `step` apart, as bytes, `pixel` apart, each one's groups padded to `padded` channels.
void quantize_pixels(const Int8Convolution& p, const Source& from, std::int64_t offset, std::int64_t columns,
                     std::int64_t step, const Quantization& q, std::int64_t padded, std::int64_t pixel,
                     std::uint8_t* to) {
  const ImageStrides& s = from.strides;
  const std::int64_t c = p.in_channels, channels = p.groups * c;
  const auto convert = [&](std::int64_t at, std::int64_t count, std::uint8_t* out) {
    if (from.is_float) {
      UNTORCH_ISA_CALL(quantize_bytes)(from.line(at), count, q.inverse, q.zero, out);
    } else {
      std::copy_n(from.bytes(at), count, out);
    }
  };
  if (!has_dense_pixels(p, s)) {
    const std::int64_t reach = (columns - 1) * step + 1;
    std::uint8_t* const plane = scratch<std::uint8_t, 0>(reach);
    for (std::int64_t i = 0; i < channels; ++i) {
      convert(offset + i * s.channel, reach, plane);
      std::uint8_t* const out = to + i / c * padded + i % c;
      for (std::int64_t x = 0; x < columns; ++x) out[x * pixel] = plane[x * step];
    }
  } else if (padded == c && s.pixel * step == channels && pixel == channels) {
    convert(offset, columns * channels, to);
  } else if (padded == c) {
    for (std::int64_t x = 0; x < columns; ++x) convert(offset + x * step * s.pixel, channels, to + x * pixel);
  } else if (s.pixel * step == channels) {
    std::uint8_t* const line = scratch<std::uint8_t, 0>(columns * channels);
    convert(offset, columns * channels, line);
    for (std::int64_t i = 0; i < columns * p.groups; ++i) {
      std::copy_n(line + i * c, c, to + i / p.groups * pixel + i % p.groups * padded);
    }
  } else {
    for (std::int64_t x = 0; x < columns; ++x) {
      for (std::int64_t g = 0; g < p.groups; ++g) {
        convert(offset + x * step * s.pixel + g * c, c, to + x * pixel + g * padded);
      }
    }
  }
}

// The input's layout as the kernels read it.
struct Layout {
  std::int64_t channels;  // of a group, with the padding
  std::int64_t top, left, height, width;
  std::int64_t row() const { return width * pixel; }
  std::int64_t pixel;
};

std::uint8_t* make_input(const Int8Convolution& p, const Source& from, const std::vector<Quantization>& each,
                         const Layout& to) {
  const std::int64_t nbytes = p.batch * to.height * to.row();
  std::uint8_t* const made = scratch<std::uint8_t, 1>(nbytes + 64);
  const bool pads = to.channels != p.in_channels || to.height != p.input[0] || to.width != p.input[1];
  for_each_item_grained(p.batch * to.height, 8, nbytes > kParallelWork, [&](std::int64_t i) {
    const std::int64_t image = i / to.height, y = i % to.height - to.top;
    const Quantization& q = each[each.size() == 1 ? 0 : static_cast<std::size_t>(image)];
    std::uint8_t* const row = made + i * to.row();
    if (pads) std::fill_n(row, to.row(), static_cast<std::uint8_t>(q.zero));
    if (y < 0 || y >= p.input[0]) return;
    quantize_pixels(p, from, image * from.strides.batch + y * from.strides.row, p.input[1], 1, q, to.channels, to.pixel,
                    row + to.left * to.pixel);
  });
  return made;
}

void run_dense(const Int8ConvolutionCall& call) {
  const Int8Convolution& p = *call.problem;
  const std::int64_t pixels = p.output[0] * p.output[1];
  const std::int64_t tallest = UNTORCH_ISA_CALL(int8_convolution_tile_rows)(call.vnni);
  const PixelTiles tiles{p.batch, pixels, ceil_div(pixels, tallest)};
  const std::int64_t count = tiles.count(), panels = ceil_div(p.out_channels, kPackWidth);
  const std::int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  const std::int64_t per_tile = std::max<std::int64_t>(1, p.batch * pixels / count);
  const std::int64_t blocks = ceil_div(count, std::max<std::int64_t>(1, kBlockPixels / per_tile));
  // Too few blocks for the threads: the groups are cut, too, or the panels, to no less than two.
  const std::int64_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
  const std::int64_t most = p.groups > 1 ? p.groups : std::max<std::int64_t>(1, panels / 2);
  const std::int64_t parts = std::clamp<std::int64_t>(ceil_div(wanted, blocks), 1, most);
  const std::int64_t nbytes = UNTORCH_ISA_CALL(int8_convolution_workspace)(ceil_div(count, blocks) + 1, call.taps);
  for_each_item(blocks * parts, threads > 1 && operations(p) > 4e6, [&](std::int64_t i) {
    const std::int64_t block = i / parts, part = i % parts;
    const std::int64_t tile0 = count * block / blocks, tile1 = count * (block + 1) / blocks;
    const bool grouped = p.groups > 1;
    const std::int64_t size = grouped ? p.groups : panels;
    const std::int64_t first = size * part / parts, last = size * (part + 1) / parts;
    UNTORCH_ISA_CALL(int8_convolution_slice)
    (call, tiles, tile0, tile1, grouped ? first : 0, grouped ? last : 1, grouped ? 0 : first, grouped ? panels : last,
     scratch<char, 2>(nbytes));
  });
}

// By AMX, from the input where it lies or from an image of bytes. False if vectors are faster, with nothing done.
bool run_amx(const Int8ConvolutionCall& call, const Source& from, const std::vector<Quantization>& each,
             bool in_place) {
  const Int8Convolution& p = *call.problem;
  const ImageStrides& s = from.strides;
  const std::int64_t c = call.group_step, words = c / kInt8Group;
  AmxImage image = amx_image(p, amx_pixel(p.groups * c), each.size() > 1);
  if (!amx_pays(image, words, kAmxFewestInt8Words, kAmxFewestInt8Pixels)) return false;
  const void* data = from.data;
  if (in_place && is_dense_pointwise(p, s)) {
    image.pixel = s.pixel;
  } else {
    char* const made = amx_memory(image.nbytes());
    for_each_item_grained(image.rows(), 8, image.nbytes() > kParallelWork, [&](std::int64_t i) {
      const auto n = static_cast<std::size_t>(i / image.height % image.images);
      const Quantization& q = each[each.size() == 1 ? 0 : n];
      fill_amx_row(p, image, i, static_cast<std::uint8_t>(q.zero), made,
                   [&](std::int64_t at, std::int64_t y, std::int64_t x, std::int64_t count, char* to) {
                     quantize_pixels(p, from, at * s.batch + y * s.row + x * s.pixel, count, p.stride[1], q, c,
                                     image.pixel, reinterpret_cast<std::uint8_t*>(to));
                   });
    });
    data = made;
  }
  const AmxConvolution amx{image.lines,
                           data,
                           image.pixel,
                           image.taps.data(),
                           p.taps(),
                           words,
                           c,
                           p.weight,
                           ceil_div(p.out_channels, kPackWidth)};
  for_each_amx_part(amx_blocks(amx.lines, p.groups, amx.panels, operations(p) > 4e6), [&](const AmxPart& part) {
    UNTORCH_ISA_CALL(int8_convolution_amx_slice)(call, amx, part);
  });
  return true;
}

void run_depthwise(const Int8ConvolutionCall& call) {
  const Int8Convolution& p = *call.problem;
  const std::int64_t rows = p.batch * p.output[0];
  const std::int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  const bool parallel = threads > 1 && operations(p) > 5e5;
  const std::int64_t parts = parallel ? std::min(rows, kTasksPerThread * threads) : 1;
  for_each_item(parts, parallel, [&](std::int64_t i) {
    UNTORCH_ISA_CALL(int8_depthwise_slice)(call, rows * i / parts, rows * (i + 1) / parts);
  });
}

}  // namespace

std::int64_t Int8Convolution::words() const noexcept {
  return depthwise() ? ceil_div(taps(), kInt8Group) : taps() * ceil_div(in_channels, kInt8Group);
}

std::int64_t Int8Convolution::padded_outputs() const noexcept {
  return depthwise() ? round_up(groups, kPackWidth) : groups * round_up(out_channels, kPackWidth);
}

std::int64_t Int8Convolution::weight_size() const noexcept { return padded_outputs() * words() * kInt8Group; }

void int8_convolution(const Int8Convolution& p, const void* input, bool input_is_float, ImageStrides strides,
                      const void* residual, void* output) {
  const std::int64_t pixels = p.batch * p.output[0] * p.output[1];
  if (pixels == 0 || p.groups * p.out_channels == 0) return;
  const Source from{input, input_is_float, strides};
  std::vector<Quantization> each{{p.input_scale.scale, 1.0f / p.input_scale.scale, p.input_scale.zero}};
  if (input_is_float && p.range == ActivationRange::kTensor) {
    FloatRange all;
    for (std::int64_t n = 0; n < p.batch; ++n) {
      const FloatRange range = image_range(p, from, n);
      all.low = std::min(all.low, range.low), all.high = std::max(all.high, range.high);
      all.finite = all.finite && range.finite;
    }
    each.front() = quantization_of_tensor(all, p.input_scale.scale);
  } else if (input_is_float && p.range != ActivationRange::kStatic) {
    each.clear();
    for (std::int64_t n = 0; n < p.batch; ++n) each.push_back(quantization_of(p.range, image_range(p, from, n)));
  }
  const auto images = static_cast<std::int64_t>(each.size());

  const bool depthwise = p.depthwise();
  const std::int64_t c = depthwise ? 1 : round_up(p.in_channels, kInt8Group);
  const bool few = !depthwise && p.groups == 1 && c <= kFewChannels && p.kernel[1] > 1 && p.dilation[1] == 1;
  const bool in_place = !input_is_float && has_dense_pixels(p, strides) && c == p.in_channels && !few;
  Int8ConvolutionCall call{};
  call.problem = &p, call.vnni = cpu_has_vnni(), call.residual = residual, call.output = output;
  call.group_step = c, call.taps = p.taps(), call.run = c / kInt8Group;

  const std::int64_t padded = p.padded_outputs(), pixel = p.groups * c;
  const bool bytes = p.output_scale.scale != 0.0f;
  const Activation a = p.epilogue.activation;
  const bool clamps = a == Activation::kNone || ((a == Activation::kRelu || a == Activation::kRelu6) &&
                                                 (residual == nullptr || p.epilogue.residual_first));
  const float unit = bytes && clamps ? p.output_scale.scale : 1.0f;
  std::uint8_t* const zeros = scratch<std::uint8_t, 3>(images * pixel);
  std::int32_t* const start = scratch<std::int32_t, 4>(images * padded);
  float* const factor = scratch<float, 5>((images + 1) * padded);
  float* const bias = factor + images * padded;
  for (std::int64_t n = 0; n < images; ++n) {
    const Quantization& q = each[static_cast<std::size_t>(n)];
    std::fill_n(zeros + n * pixel, pixel, static_cast<std::uint8_t>(q.zero));
    for (std::int64_t j = 0; j < padded; ++j) {
      start[n * padded + j] = -q.zero * p.column_sums[j];
      factor[n * padded + j] = q.scale * p.scale[j] / unit;
    }
  }
  const std::int64_t of_group = depthwise ? padded : padded / p.groups, outputs = depthwise ? p.groups : p.out_channels;
  for (std::int64_t j = 0; j < padded; ++j) {
    const std::int64_t group = j / of_group, channel = j % of_group;
    bias[j] = p.bias == nullptr || channel >= outputs ? 0.0f : p.bias[group * outputs + channel] / unit;
  }
  call.zeros = zeros, call.start = start, call.factor = factor, call.bias = bias;
  call.zeros_step = images == 1 ? 0 : pixel, call.channel_step = images == 1 ? 0 : padded;
  if (!depthwise && cpu_has_amx() && run_amx(call, from, each, in_place)) return;
  if (in_place) {
    call.input = from.bytes(0);
    call.batch_step = strides.batch, call.row_step = strides.row, call.pixel_step = strides.pixel;
  } else {
    Layout to{c, 0, 0, p.input[0], p.input[1], p.groups * c};
    if (few) {
      to.top = p.padding[0], to.left = p.padding[1];
      to.height =
          std::max((p.output[0] - 1) * p.stride[0] + (p.kernel[0] - 1) * p.dilation[0] + 1, to.top + p.input[0]);
      to.width = std::max((p.output[1] - 1) * p.stride[1] + p.kernel[1], to.left + p.input[1]);
      call.taps = p.kernel[0], call.run = p.kernel[1] * c / kInt8Group;
    }
    call.input = make_input(p, from, each, to) + to.top * to.row() + to.left * to.pixel;
    call.pixel_step = to.pixel, call.row_step = to.row(), call.batch_step = to.height * to.row();
  }
  depthwise ? run_depthwise(call) : run_dense(call);
}

}  // namespace untorch::kernels
