// Object detection: non-maximum suppression, and sampling of regions of interest.
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

namespace cpu {
// Writes the numbers of the boxes that stay to `kept` (room for n), best first; gives how many.
std::int64_t nms(const Nms& p, std::int64_t* kept);
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
