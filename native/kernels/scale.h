// Multiplication of dense memory by a scalar, in place.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// data[i] *= factor; float32 or float64. A complex tensor is twice as many reals.
int scale(std::int64_t count, double factor, DType dtype, void* data, Stream stream);

}  // namespace untorch::kernels::cuda
