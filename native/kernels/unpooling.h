// Max unpooling and fractional max pooling.
#pragma once

#include <optional>

#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

// out [planes, image] = 0 but for out[plane, index] = value for every pixel of input [planes, pixels]; where several
// pixels name one place the last one stays. Everything is row-major.
struct Unpool {
  std::int64_t planes = 0, pixels = 0, image = 0;
  int element_bytes = 0;
  const void* input = nullptr;
  const std::int64_t* indices = nullptr;
  void* out = nullptr;
};

// Fewer than three spatial dimensions have leading sizes of 1. Samples of missing dimensions are not read. Output and
// indices are row-major. NaN wins; the first of equals.
struct FractionalPool {
  std::int64_t batch = 1, channels = 1;
  std::int64_t input[3] = {1, 1, 1}, output[3] = {1, 1, 1}, kernel[3] = {1, 1, 1};
  std::int64_t in_batch = 0, in_channel = 0, in_at[3] = {};  // strides of the input
  std::int64_t sample_batch = 0, sample_channel = 0,
               sample_at = 0;         // strides of the samples [batch, channels, spatial]
  int sample_slot[3] = {-1, -1, -1};  // which sample a dimension takes; -1: it is missing
};

namespace cpu {
// `out` comes zeroed. Gives an index that lies outside of the image; such indices write nothing.
std::optional<std::int64_t> max_unpool(const Unpool& unpool);
void fractional_max_pool(const FractionalPool& pool, DType dtype, const void* input, const void* samples, void* output,
                         std::int64_t* indices);
}  // namespace cpu
namespace cuda {
// `winners` [planes · image] is zeroed scratch. An index outside of the image is reported and writes nothing.
int max_unpool(const Unpool& unpool, unsigned long long* winners, FaultWord* faults, Stream stream);
int fractional_max_pool(const FractionalPool& pool, DType dtype, const void* input, const void* samples, void* output,
                        std::int64_t* indices, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
