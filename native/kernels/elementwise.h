// The elementwise operators that compiled models leave to shims, and amax.
#pragma once

#include <span>

#include "base/strided.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

// Complex inputs have real results; integers and bool have angles in float32.
struct Unary {
  Strided<2> space;               // out, input
  DType dtype = DType::kFloat32;  // of the input
  void* out = nullptr;
  const void* input = nullptr;
};

// Memory of the device, or one value given by its bytes on the host, so that a graph keeps it. The CPU takes memory.
struct Operand {
  const void* data = nullptr;
  const void* value = nullptr;
};

enum class BinaryFunction : std::int8_t {
  kAdd,       // a + alpha · b; for bool a or (alpha and b)
  kMultiply,  // for bool a and b
  kPower,     // no bool; integer powers wrap around, a negative exponent gives 0 except for the bases 1 and -1
  kGcd,       // integers
  kPolar,     // a · exp(i·b), float32 or float64 into the complex dtype of that precision
};

struct Binary {
  BinaryFunction function = BinaryFunction::kAdd;
  Strided<3> space;               // out, a, b
  DType dtype = DType::kFloat32;  // of the operands
  double alpha = 1;
  void* out = nullptr;
  Operand a, b;
};

namespace cpu {
void absolute(const Unary& unary);
void angle(const Unary& unary);
void binary(const Binary& binary);
// out[…] = max over the dimensions where out_strides is 0; at least one element each. NaN wins. `out` is row-major.
void amax(std::span<const std::int64_t> sizes, std::span<const std::int64_t> out_strides,
          std::span<const std::int64_t> in_strides, std::int64_t out_numel, DType dtype, void* out, const void* input);
}  // namespace cpu
namespace cuda {
int absolute(const Unary& unary, Stream stream);
int angle(const Unary& unary, Stream stream);
int binary(const Binary& binary, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
