// Object detection: non-maximum suppression, pooling of regions of interest, deformable convolution.
#pragma once

#include <cstddef>

#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

// Boxes [n, 4] of corners x1, y1, x2, y2, row-major; `order` their numbers, best score first (equal ones by number).
struct Nms {
  const void* boxes = nullptr;
  const std::int64_t* order = nullptr;
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;  // float16 (CUDA only), float32, float64
  double threshold = 0;
};

// Averages of bilinear samples of `input` [batch, channels, height, width] in a grid over each region, into `out`
// [regions, channels, pooled_height, pooled_width]; all row-major. `rois` [regions, 5]: the image of the batch and the
// corners x1, y1, x2, y2. sampling_ratio: samples along each side of a bin; not positive: by the region's size.
struct RoiAlign {
  const void *input = nullptr, *rois = nullptr;
  void* out = nullptr;
  DType dtype = DType::kFloat32;  // float16, float32, float64
  std::int64_t batch = 0, channels = 0, height = 0, width = 0;
  std::int64_t regions = 0, pooled_height = 0, pooled_width = 0;
  double spatial_scale = 1;
  std::int64_t sampling_ratio = -1;
  bool aligned = false;
};

// The poolings whose bins have channels of their own (ps), or whose bins are whole pixels (pool). `index` is int32 of
// out's shape: of roi_pool the pixel that each maximum is from (-1: an empty bin), of the others the channel read.
struct RoiPool {
  RoiAlign regions;  // its `aligned` is not read; the output has channels / (pooled size) channels with ps
  std::int32_t* index = nullptr;
};

// Convolution of `input` [batch, channels, height, width] at positions that `offset` [batch, 2 · offset_groups ·
// kernel, out height, out width] moves, in the order y, x, each sample scaled by `mask` [batch, offset_groups · kernel,
// …] if there is one. All row-major; `weight` [out_channels, channels / groups, kernel_h, kernel_w], `out` [batch,
// out_channels, out height, out width]. Samples outside are 0.
struct DeformConv {
  const void *input = nullptr, *offset = nullptr, *mask = nullptr, *weight = nullptr, *bias = nullptr;
  void* out = nullptr;
  DType dtype = DType::kFloat32;  // float32, float64
  std::int64_t batch = 0, channels = 0, height = 0, width = 0;
  std::int64_t out_channels = 0, kernel_h = 0, kernel_w = 0, out_h = 0, out_w = 0;
  std::int64_t stride_h = 1, stride_w = 1, pad_h = 0, pad_w = 0, dilation_h = 1, dilation_w = 1;
  std::int64_t groups = 1, offset_groups = 1;
};

namespace cpu {
// Writes the numbers of the boxes that stay to `kept` (room for n), best first; gives how many.
std::int64_t nms(const Nms& p, std::int64_t* kept);
// The poolings: float32 and float64. They give the number of a region whose image is not in the batch, and write
// nothing then; -1 otherwise.
std::int64_t roi_align(const RoiAlign& p);
std::int64_t roi_pool(const RoiPool& p);
std::int64_t ps_roi_align(const RoiPool& p);
std::int64_t ps_roi_pool(const RoiPool& p);
void deform_conv2d(const DeformConv& p);
}  // namespace cpu

namespace cuda {
// Most boxes that one call takes: the bitmask has n² / 8 bytes.
inline constexpr std::int64_t kNmsMax = std::int64_t{1} << 18;
// Bytes of the bitmask, and of what follows it.
std::size_t nms_scratch(std::int64_t n);
// kept[0 … count) = the numbers of the boxes that stay, best first, and kept[n] = count.
int nms(const Nms& p, void* scratch, std::int64_t* kept, Stream stream);
// A region's image that is not in the batch is reported, and its result is 0.
int roi_align(const RoiAlign& p, FaultWord* faults, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
