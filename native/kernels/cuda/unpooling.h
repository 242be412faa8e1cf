// Max unpooling and fractional max pooling.
#pragma once

#include "kernels/cuda/device_fault.h"
#include "kernels/cuda/scalar.h"

namespace untorch::kernels::cuda {

// out [planes, image] = 0 but for out[plane, index] = value for every pixel of input [planes, pixels]; where several
// pixels name one place the last one stays. Everything is row-major. `winners` [planes · image] is scratch that the
// caller zeroed. An index outside of the image is reported and writes nothing.
int max_unpool(std::int64_t planes, std::int64_t pixels, std::int64_t image, int element_bytes, const void* input,
               const std::int64_t* indices, unsigned long long* winners, void* out, FaultWord* faults, Stream stream);

// Fewer than three spatial dimensions have leading sizes of 1. Samples of missing dimensions are not read.
struct FractionalPool {
  std::int64_t batch, channels;
  std::int64_t input[3], output[3], kernel[3];
  std::int64_t in_batch, in_channel, in_at[3];           // strides of the input
  std::int64_t sample_batch, sample_channel, sample_at;  // strides of the samples [batch, channels, spatial]
  int sample_slot[3];                                    // which sample a dimension takes; -1: it is not there
};

// Output and indices are row-major. NaN wins; the first of equals.
int fractional_max_pool(const FractionalPool& pool, Scalar dtype, const void* input, const void* samples, void* output,
                        std::int64_t* indices, Stream stream);

}  // namespace untorch::kernels::cuda
