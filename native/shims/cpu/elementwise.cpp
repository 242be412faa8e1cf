// Checks and fills that the CPU's elementwise operators share.
#include "shims/cpu/elementwise.h"

#include <cmath>

namespace untorch::shims {

void check_factory(const std::int32_t* layout, const std::int32_t* device, const char* op) {
  if (layout != nullptr && *layout != 0) {
    throw_error(ErrorKind::kUnsupported, op, ": layout code ", *layout, " is not supported, expected strided (0)");
  }
  if (device != nullptr && *device != 0) {
    throw_error(ErrorKind::kUnsupported, op, ": argument 'device' is ",
                device_name({static_cast<DeviceType>(*device), -1}), ", expected cpu");
  }
}

void check_alpha(DType dtype, double alpha, const char* op) {
  if (is_floating(dtype) || is_complex(dtype)) return;
  check(alpha == std::floor(alpha), op, ": 'alpha' is ", alpha, ", expected a whole number for dtype ",
        dtype_name(dtype));
}

void fill(const Tensor& t, double value) { copy_cpu(t, *scalar_tensor(value, t.dtype())); }

}  // namespace untorch::shims
