// Fourier transforms by cuFFT (CUDA 12's or 13's), opened at run time.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/driver.h"

namespace untorch::cuda {

inline constexpr int kMaxFftRank = 3;

// `batch` transforms over the last `rank` dimensions of dense row-major arrays.
struct FftProblem {
  bool real_input = false;  // real to complex: the last dimension of the output has size / 2 + 1 values
  bool wide = false;        // float64 or complex128
  bool forward = true;
  int rank = 1;
  std::array<std::int64_t, kMaxFftRank> size{};  // of the signal, outermost first
  std::int64_t batch = 1;
};

// Not scaled. input and output are aligned to a complex value and may be the same for complex input. Throws
// kUnsupported when there is no cuFFT.
void fft(const char* op, const FftProblem& problem, const void* input, void* output, int device, Stream stream);

}  // namespace untorch::cuda
