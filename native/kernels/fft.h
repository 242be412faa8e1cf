// Discrete Fourier transforms along one dimension. On CUDA cuFFT computes them (native/cuda/fft.h).
#pragma once

#include "base/dtype.h"
#include "base/lanes.h"

namespace untorch::kernels::cpu {

// Every lane x becomes y[k] = factor · Σ_j x[j] · exp(∓2πi jk / n), with the minus sign when `forward`. complex64 and
// complex128.
void fft(const Lanes<1>& lanes, bool forward, double factor, DType dtype, void* data);

}  // namespace untorch::kernels::cpu
