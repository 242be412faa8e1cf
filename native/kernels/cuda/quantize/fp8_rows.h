// FP8 E4M3: rounding, and dynamic per-row quantization of activations for W8A8 GEMMs with row-wise scales.
//
// The rounding is in integer arithmetic: bit-exact on every GPU, and on the host that tests it.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/launcher.h"

#ifdef __CUDACC__
#define UNTORCH_ANYWHERE __host__ __device__ __forceinline__
#else
#define UNTORCH_ANYWHERE inline
#endif

namespace untorch::kernels::cuda {

inline constexpr float kE4m3Max = 448.0f;

// To nearest even. What would be more than 448, infinities and NaN are NaN.
UNTORCH_ANYWHERE std::uint32_t e4m3_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
  if (size > 0x43e80000u) return 0x7fu;  // 464, halfway to what 480 would be
  if (size < 0x3c800000u) {              // 2^-6: subnormals are multiples of 2^-9, the spacing of floats at 2^14
    float positive;
    std::memcpy(&positive, &size, 4);
    positive += 16384.0f;
    std::memcpy(&bits, &positive, 4);
    return sign | (bits - 0x46800000u);
  }
  return sign | (((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3));  // the exponent biases differ by 120
}

// The same of a pair, 464 at most, to bytes 1 and 3. `halves`: float16 values times 2^-8, which have E4M3's exponent
// bits, and subnormals where E4M3 has them.
UNTORCH_ANYWHERE std::uint32_t e4m3_pair_of(std::uint32_t halves) {
  const std::uint32_t rounded = halves + 0x003f003fu + (halves >> 7 & 0x00010001u);
  return (rounded << 1 & 0x7f007f00u) | (halves & 0x80008000u);
}

// Quantizes rows to E4M3 with a scale each, absmax / 448: [m, to_width], dense, zeros behind `width`. A row with values
// that are not finite has the scale NaN. Also scales n float32 column factors, which saves a launch: columns[i] =
// factors[i] · by, or factors[0] · by.
struct Fp8Rows {
  DType dtype = DType::kBFloat16;  // bfloat16, float16 or float32
  std::int64_t m = 0, width = 0;   // a multiple of 8
  const void* x = nullptr;         // 16-byte aligned
  std::int64_t row = 0;            // elements between rows, a multiple of 8
  void* to = nullptr;              // 16-byte aligned
  std::int64_t to_width = 0;       // a multiple of 16
  float* scales = nullptr;         // [m]
  const float* factors = nullptr;
  bool one_factor = false;
  float by = 1.0f;
  float* columns = nullptr;
  std::int64_t n = 0;
  bool pdl = false;
};
int quantize_rows_fp8(const Fp8Rows& rows, Stream stream);

}  // namespace untorch::kernels::cuda
