// Distances between rows (cdist, pdist), and the trilinear sum of products.
#pragma once

#include "base/strided.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

// out[b, i, j] = p-norm of left[b, i, :] - right[b, j, :]. Everything row-major, float32 or float64.
struct Distances {
  std::int64_t batch = 1, rows = 0, columns = 0, length = 0;
  double p = 2;
  // left and right are one matrix [rows, length], and out holds the pairs i < j row by row.
  bool condensed = false;
  // The Euclidean norm as |a|² + |b|² - 2ab with a GEMM, as PyTorch has it for many rows. CUDA always takes
  // differences: more exact, and as quick at the row lengths that are used.
  bool by_gemm = false;
  DType dtype{};
  const void *left = nullptr, *right = nullptr;
  void* out = nullptr;
};

// out = sum over `inner` of a · b · c. outer's operands: out, a, b, c; inner's: a, b, c.
struct Trilinear {
  Strided<4> outer;
  Strided<3> inner;
  DType dtype{};  // float16, bfloat16, float32 or float64
  const void *a = nullptr, *b = nullptr, *c = nullptr;
  void* out = nullptr;
};

namespace cpu {
void distances(const Distances& p);
void trilinear(const Trilinear& p);
}  // namespace cpu
namespace cuda {
int distances(const Distances& p, Stream stream);
int trilinear(const Trilinear& p, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
