// What Fourier transforms are asked for, checked, on any device.
#pragma once

#include <vector>

#include "shims/shim.h"

namespace untorch::shims {

// The dimensions, wrapped; throws on repeated and empty ones.
std::vector<std::int64_t> fft_dims(const char* op, const Tensor& self, DimSpan dims);
// The factor of a normalization (0: none, 1: by root n, 2: by n) over these dimensions.
double fft_scale(const char* op, std::int64_t normalization, const Tensor& self, const std::vector<std::int64_t>& dims);

}  // namespace untorch::shims
