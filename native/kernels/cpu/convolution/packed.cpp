// Packed convolution: chooses the kernel, pads images with few channels, and cuts the work for the threads.
#include "kernels/cpu/convolution/packed.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/convolution/amx_image.h"
#include "kernels/cpu/convolution/amx_parts.h"
#include "kernels/cpu/convolution/packed_levels.h"

namespace untorch::kernels {
namespace {

// Images with fewer channels are padded beforehand: a row of the kernel is then one run of consecutive floats.
constexpr std::int64_t kFewChannels = 8;
constexpr std::int64_t kBlockPixels = 240;   // that pass over a panel's weights together
constexpr std::int64_t kTasksPerThread = 4;  // so that a thread that is held up costs a quarter of its share

using Pair = std::array<std::int64_t, 2>;

std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

void* workspace(std::int64_t nbytes) {
  thread_local std::vector<char> memory;
  if (memory.size() < static_cast<std::size_t>(nbytes)) memory.resize(static_cast<std::size_t>(nbytes));
  return memory.data();
}

const float* zeros(std::int64_t count) {
  thread_local std::vector<float> memory;
  if (memory.size() < static_cast<std::size_t>(count)) memory.resize(static_cast<std::size_t>(count), 0.0f);
  return memory.data();
}

double operations(const PackedConvolution& p) {
  return 2.0 * static_cast<double>(p.batch * p.output[0] * p.output[1]) *
         static_cast<double>(p.groups * p.out_channels * p.reduction());
}

// [batch, padded height, padded width, channels] of an input of any strides: what the kernel's windows cover.
void pad(const PackedConvolution& p, const float* input, const ImageStrides& from, float* padded,
         const ImageStrides& to, std::int64_t height, std::int64_t width) {
  const std::int64_t channels = p.in_channels;
  const std::int64_t x0 = std::min(p.padding[1], width), x1 = std::clamp(p.padding[1] + p.input[1], x0, width);
  for_each_item_grained(p.batch * height, 8, p.batch * height * width * channels > kParallelWork, [&](std::int64_t i) {
    float* const row = padded + i / height * to.batch + i % height * to.row;
    const std::int64_t y = i % height - p.padding[0];
    if (y < 0 || y >= p.input[0]) {
      std::fill_n(row, width * channels, 0.0f);
      return;
    }
    std::fill_n(row, x0 * channels, 0.0f);
    std::fill_n(row + x1 * channels, (width - x1) * channels, 0.0f);
    const float* const line = input + i / height * from.batch + y * from.row - p.padding[1] * from.pixel;
    if (from.channel == 1 && from.pixel == channels) {
      std::copy_n(line + x0 * channels, (x1 - x0) * channels, row + x0 * channels);
      return;
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      const float* const plane = line + c * from.channel;
      for (std::int64_t x = x0; x < x1; ++x) row[x * channels + c] = plane[x * from.pixel];
    }
  });
}

// Tiles stay in an output row where the kernel may reach into padding: taps above and below the image are then skipped
// for the whole tile. Short rows would make small tiles, though.
PixelTiles tiles_of(const PackedConvolution& p) {
  const std::int64_t tallest = UNTORCH_ISA_CALL(convolution_tile_rows)();
  const std::int64_t per_row = ceil_div(p.output[1], tallest);
  const bool by_row = p.padding[0] > 0 && p.output[1] / per_row >= std::min<std::int64_t>(4, tallest);
  if (by_row) return {p.batch * p.output[0], p.output[1], per_row};
  const std::int64_t pixels = p.output[0] * p.output[1];
  return {p.batch, pixels, ceil_div(pixels, tallest)};
}

// The work cut for the threads: blocks of tiles; where these are too few, of the groups, too, or of the panels, no less
// than two.
struct Blocks {
  PixelTiles tiles;
  std::int64_t count, parts;
  bool parallel;

  std::int64_t first_tile(std::int64_t block) const { return tiles.count() * block / count; }
};

Blocks blocks_of(const PackedConvolution& p) {
  Blocks to{tiles_of(p), 0, 0, false};
  const std::int64_t count = to.tiles.count(), panels = ceil_div(p.out_channels, kPackWidth);
  const std::int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  const std::int64_t per_tile = std::max<std::int64_t>(1, p.batch * p.output[0] * p.output[1] / count);
  to.count = ceil_div(count, std::max<std::int64_t>(1, kBlockPixels / per_tile));
  const std::int64_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
  const std::int64_t most = p.groups > 1 ? p.groups : std::max<std::int64_t>(1, panels / 2);
  to.parts = std::clamp<std::int64_t>(ceil_div(wanted, to.count), 1, most);
  to.parallel = threads > 1 && operations(p) > 1e6;
  return to;
}

void run_part(const ConvolutionCall& call, const Blocks& b, std::int64_t block, std::int64_t part) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t panels = ceil_div(p.out_channels, kPackWidth);
  const std::int64_t nbytes =
      UNTORCH_ISA_CALL(convolution_workspace)(ceil_div(b.tiles.count(), b.count) + 1, call.taps, call.weights);
  const bool grouped = p.groups > 1;
  const std::int64_t size = grouped ? p.groups : panels;
  const std::int64_t first = size * part / b.parts, last = size * (part + 1) / b.parts;
  UNTORCH_ISA_CALL(convolution_slice)
  (call, b.tiles, b.first_tile(block), b.first_tile(block + 1), grouped ? first : 0, grouped ? last : 1,
   grouped ? 0 : first, grouped ? panels : last, workspace(nbytes));
}

void run(const ConvolutionCall& call) {
  const Blocks b = blocks_of(*call.problem);
  for_each_item(b.count * b.parts, b.parallel, [&](std::int64_t i) { run_part(call, b, i / b.parts, i % b.parts); });
}

void run_depthwise(const ConvolutionCall& call) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t rows = p.batch * p.output[0];
  const std::int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  const bool parallel = threads > 1 && operations(p) > 2e5;
  const std::int64_t tasks = parallel ? kTasksPerThread * threads : 1, panels = ceil_div(p.groups, kPackWidth);
  const std::int64_t nbytes = UNTORCH_ISA_CALL(depthwise_workspace)(p.taps());
  // Parts of few rows would read the rows between them twice: channels are cut first.
  if (rows < 8 * tasks && panels >= tasks && UNTORCH_ISA_CALL(depthwise_by_channels)(p)) {
    for_each_item(tasks, parallel, [&](std::int64_t i) {
      const std::int64_t last = std::min(p.groups, panels * (i + 1) / tasks * kPackWidth);
      UNTORCH_ISA_CALL(depthwise_slice)(call, 0, rows, panels * i / tasks * kPackWidth, last, workspace(nbytes));
    });
    return;
  }
  const std::int64_t parts = std::min(rows, tasks);
  for_each_item(parts, parallel, [&](std::int64_t i) {
    UNTORCH_ISA_CALL(depthwise_slice)(call, rows * i / parts, rows * (i + 1) / parts, 0, p.groups, workspace(nbytes));
  });
}

void run_small_groups(const ConvolutionCall& call) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t rows = p.batch * p.output[0], panels = p.groups * p.out_channels / kPackWidth;
  const std::int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  const bool parallel = threads > 1 && operations(p) > 2e5;
  const std::int64_t tasks = parallel ? kTasksPerThread * threads : 1;
  const bool by_channels = rows < 8 * tasks && panels >= tasks;
  const std::int64_t size = by_channels ? panels : rows, parts = std::min(size, tasks);
  for_each_item(parts, parallel, [&](std::int64_t i) {
    const std::int64_t first = size * i / parts, last = size * (i + 1) / parts;
    UNTORCH_ISA_CALL(small_groups_slice)
    (call, by_channels ? 0 : first, by_channels ? rows : last, by_channels ? first * kPackWidth : 0,
     (by_channels ? last : panels) * kPackWidth);
  });
}

constexpr std::int64_t kWinogradBytes = 768 << 10;  // of transformed input in the L2

void run_winograd(const ConvolutionCall& call) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t count = p.batch * ((p.output[0] + 1) / 2) * ((p.output[1] + 1) / 2);
  const std::int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  const std::int64_t most = std::max<std::int64_t>(12, kWinogradBytes / (64 * p.in_channels) / 12 * 12);
  std::int64_t blocks = ceil_div(count, most);
  if (threads > 1) blocks = std::max(blocks, std::min(ceil_div(count, std::int64_t{12}), kTasksPerThread * threads));
  const std::int64_t nbytes = UNTORCH_ISA_CALL(winograd_workspace)(ceil_div(count, blocks) + 1, p.in_channels);
  for_each_item(blocks, threads > 1 && operations(p) > 1e6, [&](std::int64_t i) {
    UNTORCH_ISA_CALL(winograd_slice)(call, count * i / blocks, count * (i + 1) / blocks, workspace(nbytes));
  });
}

// A 1×1 kernel that reads every pixel once, in memory order.
bool is_gemm(const PackedConvolution& p, const ImageStrides& s) {
  return p.groups == 1 && s.channel == 1 && is_dense_pointwise(p, s);
}

constexpr std::int64_t kWidenedBytes = 512 << 10;  // of weights that stay in the L2

// A GEMM with a weight in pairs, by the float32 kernels: its panels are widened once, a block of columns at a time.
void run_widened_gemm(const ConvolutionCall& call) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t pixels = p.batch * p.output[0] * p.output[1], n = p.out_channels, k = p.in_channels;
  const std::int64_t panel = k * kPackWidth, panels = ceil_div(n, kPackWidth);
  const std::int64_t most = std::clamp<std::int64_t>(kWidenedBytes / 4 / panel, 4, panels + 4);
  const std::int64_t blocks = ceil_div(panels, most), each = ceil_div(panels, blocks);
  thread_local std::vector<float> memory;
  if (memory.size() < static_cast<std::size_t>(each * panel)) memory.resize(static_cast<std::size_t>(each * panel));
  float* const wide = memory.data();
  const auto* const pairs = reinterpret_cast<const std::uint32_t*>(call.weight);
  for (std::int64_t first = 0; first < panels; first += each) {
    const std::int64_t count = std::min(each, panels - first), column = first * kPackWidth;
    for_each_item_grained(count, 2, count * panel > kParallelWork, [&](std::int64_t i) {
      UNTORCH_ISA_CALL(widen_bf16_pairs)(pairs + (first + i) * panel / 2, k / 2, wide + i * panel);
    });
    gemm_packed(pixels, std::min(count * kPackWidth, n - column), k, call.input, call.strides.pixel, wide,
                call.bias == nullptr ? nullptr : call.bias + column, p.epilogue,
                call.residual == nullptr ? nullptr : call.residual + column, n, call.output + column, n);
  }
}

// The image of bfloat16 that AMX reads, then its tiles. False if vectors are faster, with nothing done.
bool run_amx(const ConvolutionCall& call) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t channels = p.groups * p.in_channels;
  const AmxImage image = amx_image(p, amx_pixel(2 * channels), false);
  if (!amx_pays(image, p.in_channels / 2, kAmxFewestWords, 1)) return false;
  const std::int64_t panels = ceil_div(p.out_channels, kPackWidth);
  AmxConvolution amx{image.lines,       nullptr,     image.pixel, image.taps.data(), p.taps(), p.in_channels / 2,
                     2 * p.in_channels, call.weight, panels};
  const ImageStrides& s = call.strides;
  const auto round = [&](std::int64_t count, const float* from, std::int64_t step, char* to) {
    UNTORCH_ISA_CALL(round_to_bf16)
    (count, channels, from, step, reinterpret_cast<std::uint16_t*>(to), image.pixel / 2);
  };
  const AmxBlocks blocks = amx_blocks(amx.lines, p.groups, panels, operations(p) > 1e6);
  if (blocks.parts == 1 && is_dense_pointwise(p, s)) {  // each block rounds its own pixels
    for_each_amx_part(blocks, [&](const AmxPart& part) {
      const std::int64_t first = part.tile0 * kAmxTilePixels, last = part.tile1 * kAmxTilePixels;
      char* const made = amx_memory((last - first) * image.pixel);
      round(std::min(last, image.lines.length()) - first, call.input + first * s.pixel, s.pixel, made);
      AmxConvolution own = amx;
      own.image = made - first * image.pixel;
      UNTORCH_ISA_CALL(convolution_amx_slice)(call, own, part);
    });
    return true;
  }
  char* const made = amx_memory(image.nbytes());
  for_each_item_grained(image.rows(), 8, p.batch * p.input[0] * p.input[1] * channels > kParallelWork, [&](auto i) {
    fill_amx_row(p, image, i, 0, made, [&](auto n, auto y, auto x, std::int64_t count, char* to) {
      round(count, call.input + n * s.batch + y * s.row + x * s.pixel, p.stride[1] * s.pixel, to);
    });
  });
  amx.image = made;
  for_each_amx_part(blocks, [&](const AmxPart& part) { UNTORCH_ISA_CALL(convolution_amx_slice)(call, amx, part); });
  return true;
}

// A 1×1 kernel that reads every pixel once: each block rounds its own pixels. False if threads share blocks, with
// nothing done.
bool run_pointwise_bf16(ConvolutionCall call) {
  const PackedConvolution& p = *call.problem;
  const Blocks b = blocks_of(p);
  if (b.parts > 1) return false;
  const std::int64_t channels = p.groups * p.in_channels, step = call.strides.pixel;
  const float* const input = call.input;
  PackedConvolution pairs = p;
  pairs.in_channels /= 2;
  call.problem = &pairs, call.run = pairs.in_channels;
  call.strides = {p.input[0] * p.input[1] * channels / 2, 1, p.input[1] * channels / 2, channels / 2};
  for_each_item(b.count, b.parallel, [&](std::int64_t block) {
    const std::int64_t first = b.tiles.first(b.first_tile(block)), last = b.tiles.first(b.first_tile(block + 1));
    thread_local std::vector<std::uint32_t> memory;
    const auto size = static_cast<std::size_t>((last - first) * channels / 2);
    if (memory.size() < size) memory.resize(size);
    UNTORCH_ISA_CALL(round_to_bf16)
    (last - first, channels, input + first * step, step, reinterpret_cast<std::uint16_t*>(memory.data()), channels);
    ConvolutionCall own = call;
    own.input = reinterpret_cast<const float*>(memory.data()) - first * channels / 2;
    run_part(own, b, block, 0);
  });
  return true;
}

// Rounds the pixels that the kernel reads to a dense image of bfloat16; a 1×1 kernel's stride is then 1.
void run_bf16(ConvolutionCall call) {
  PackedConvolution p = *call.problem;
  call.problem = &p;
  if (cpu_has_amx() && run_amx(call)) return;
  call.zeros = zeros(p.groups * p.in_channels);
  call.weights = ConvolutionWeights::kWidened;
  if (!cpu_has_fast_bf16()) return is_gemm(p, call.strides) ? run_widened_gemm(call) : run(call);
  call.weights = ConvolutionWeights::kPairs;
  if (is_dense_pointwise(p, call.strides) && run_pointwise_bf16(call)) return;
  const std::int64_t channels = p.groups * p.in_channels;
  Pair step{1, 1};
  if (p.taps() == 1 && p.padding == Pair{0, 0}) {
    step = p.stride;
    p.input = p.output, p.stride = {1, 1};
  }
  thread_local std::vector<std::uint32_t> image;
  image.resize(static_cast<std::size_t>(p.batch * p.input[0] * p.input[1] * channels / 2));
  auto* const rounded = reinterpret_cast<std::uint16_t*>(image.data());
  const std::int64_t width = p.input[1];
  for_each_item_grained(
      p.batch * p.input[0], 8, p.batch * p.input[0] * width * channels > kParallelWork, [&](std::int64_t i) {
        const float* const line =
            call.input + i / p.input[0] * call.strides.batch + i % p.input[0] * step[0] * call.strides.row;
        UNTORCH_ISA_CALL(round_to_bf16)
        (width, channels, line, step[1] * call.strides.pixel, rounded + i * width * channels, channels);
      });
  p.in_channels /= 2;
  call.input = reinterpret_cast<const float*>(rounded);
  call.run = p.in_channels;
  call.strides = {p.input[0] * width * channels / 2, 1, width * channels / 2, channels / 2};
  run(call);
}

}  // namespace

bool serves_bf16(const PackedConvolution& p) {
  return !p.winograd && !p.small_groups && !p.depthwise() && p.in_channels % 2 == 0 && !pads_beforehand(p);
}

bool serves_winograd(const PackedConvolution& p) {
  return p.groups == 1 && p.kernel == Pair{3, 3} && p.stride == Pair{1, 1} && p.dilation == Pair{1, 1} &&
         p.in_channels % kPackWidth == 0 && p.out_channels % kPackWidth == 0;
}

bool serves_small_groups(const PackedConvolution& p) {
  return p.groups > 1 && p.in_channels == p.out_channels && (p.in_channels == 4 || p.in_channels == 8) &&
         p.groups * p.in_channels % kPackWidth == 0 && p.kernel == Pair{3, 3} && p.dilation == Pair{1, 1} &&
         (p.stride == Pair{1, 1} || p.stride == Pair{2, 2});
}

std::int64_t packed_convolution_size(const PackedConvolution& p) {
  if (p.winograd) return 16 * p.in_channels * p.out_channels;
  if (p.depthwise()) return ceil_div(p.groups, kPackWidth) * p.taps() * kPackWidth;
  if (p.small_groups) return p.groups * p.out_channels * p.reduction();
  return p.groups * packed_size(p.out_channels, p.reduction());
}

bool pads_beforehand(const PackedConvolution& p) {
  return !p.winograd && p.groups == 1 && p.in_channels <= kFewChannels && p.kernel[1] > 1 && p.dilation[1] == 1;
}

void convolution_packed(const PackedConvolution& p, const float* input, ImageStrides strides, const void* packed,
                        const float* bias, const float* residual, float* output) {
  const std::int64_t pixels = p.batch * p.output[0] * p.output[1];
  if (pixels == 0 || p.groups * p.out_channels == 0) return;
  const auto* const weight = static_cast<const float*>(packed);
  if (p.bf16) return run_bf16({&p, input, strides, p.taps(), p.in_channels, weight, bias, residual, output, nullptr});
  if (is_gemm(p, strides)) {
    const std::int64_t n = p.out_channels;
    return gemm_packed(pixels, n, p.in_channels, input, strides.pixel, weight, bias, p.epilogue, residual, n, output,
                       n);
  }
  ConvolutionCall call{&p, input, strides, p.taps(), p.in_channels, weight, bias, residual, output, nullptr};
  if (pads_beforehand(p)) {
    const std::int64_t height = (p.output[0] - 1) * p.stride[0] + (p.kernel[0] - 1) * p.dilation[0] + 1;
    const std::int64_t width = (p.output[1] - 1) * p.stride[1] + p.kernel[1], channels = p.in_channels;
    thread_local std::vector<float> padded;
    padded.resize(static_cast<std::size_t>(p.batch * height * width * channels));
    const ImageStrides to{height * width * channels, 1, width * channels, channels};
    pad(p, input, strides, padded.data(), to, height, width);
    call.input = padded.data() + p.padding[0] * to.row + p.padding[1] * to.pixel;
    call.strides = to;
    call.taps = p.kernel[0], call.run = p.kernel[1] * channels;
    return run(call);
  }
  call.zeros = zeros(p.groups * p.in_channels);
  if (p.winograd) return run_winograd(call);
  if (p.small_groups) return run_small_groups(call);
  p.depthwise() ? run_depthwise(call) : run(call);
}

}  // namespace untorch::kernels
