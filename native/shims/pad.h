// What pad checks and prepares on every device.
#pragma once

#include "shims/shim.h"

namespace untorch::shims {

enum class PadMode { kConstant, kReflect, kReplicate, kCircular };

PadMode pad_mode(const char* mode);
// `pads`: two values a dimension, the last dimension first. `value` may be null.
void check_pads(PadMode mode, const Tensor& self, DimSpan pads, const double* value);
// A view without what negative pads take away. All pads are negative or 0.
TensorPtr cropped(const Tensor& self, DimSpan pads);

}  // namespace untorch::shims
