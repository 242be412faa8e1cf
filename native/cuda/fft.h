// Fourier transforms by cuFFT (CUDA 12's or 13's), opened at run time.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/driver.h"

namespace untorch::cuda {

inline constexpr int kMaxFftRank = 3;

// Of real values the last dimension of the complex side has size / 2 + 1 values.
enum class FftKind { kComplex, kRealToComplex, kComplexToReal };

// `batch` transforms over the last `rank` dimensions of dense row-major arrays.
struct FftProblem {
  FftKind kind = FftKind::kComplex;
  bool wide = false;    // float64 or complex128
  bool forward = true;  // of a complex transform; the others have one direction
  int rank = 1;
  std::array<std::int64_t, kMaxFftRank> size{};  // of the signal, outermost first
  std::int64_t batch = 1;
};

// Not scaled. input and output are aligned to a complex value and may be the same for complex transforms. A transform
// to real values overwrites its input, the others only read it. Throws kUnsupported when there is no cuFFT.
void fft(const char* op, const FftProblem& problem, void* input, void* output, int device, Stream stream);

}  // namespace untorch::cuda
