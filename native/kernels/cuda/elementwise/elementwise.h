// The elementwise operators that compiled models leave to shims.
#pragma once

#include "base/strided.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// An operand of the result's dtype: device memory, or one value given by its bytes on the host.
struct Operand {
  const void* data = nullptr;
  const void* value = nullptr;
};

// Operands of the spaces: out, a, b. All of one dtype.
// out = a + alpha · b; for bool a or (alpha and b).
int add(const Strided<3>& space, void* out, Operand a, Operand b, double alpha, DType dtype, Stream stream);
int multiply(const Strided<3>& space, void* out, Operand a, Operand b, DType dtype, Stream stream);
// No bool. Integer powers wrap around; a negative exponent gives 0 except for the bases 1 and -1.
int power(const Strided<3>& space, void* out, Operand a, Operand b, DType dtype, Stream stream);
// Integers.
int gcd(const Strided<3>& space, void* out, Operand a, Operand b, DType dtype, Stream stream);
// float32 or float64 in, the complex dtype of that precision out.
int polar(const Strided<3>& space, void* out, const void* radius, const void* angle, DType dtype, Stream stream);

// Operands: out, input. `dtype` is the input's; complex inputs have real results.
int absolute(const Strided<2>& space, void* out, const void* input, DType dtype, Stream stream);
// Integers and bool have float32 results.
int angle(const Strided<2>& space, void* out, const void* input, DType dtype, Stream stream);

}  // namespace untorch::kernels::cuda
