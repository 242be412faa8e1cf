// Distances between rows, and the trilinear product.
#pragma once

#include "base/strided.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// out[b, i, j] = p-norm of left[b, i, :] - right[b, j, :]; rows of `length` values, everything row-major, float32 or
// float64. `condensed`: left and right are one matrix [rows, length], and out holds the pairs i < j row by row.
int distances(std::int64_t batch, std::int64_t rows, std::int64_t columns, std::int64_t length, double p,
              bool condensed, DType dtype, const void* left, const void* right, void* out, Stream stream);

// out = sum over `inner` of a · b · c. outer's operands: out, a, b, c; inner's: a, b, c.
int trilinear(const Strided<4>& outer, const Strided<3>& inner, DType dtype, const void* a, const void* b,
              const void* c, void* out, Stream stream);

}  // namespace untorch::kernels::cuda
