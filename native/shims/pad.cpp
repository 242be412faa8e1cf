// Padding: constant, reflect, replicate and circular.
#include <algorithm>
#include <string_view>

#include "kernels/cat_pad.h"
#include "shims/layout.h"
#include "shims/nn.h"
#include "shims/op.h"
#include "shims/promotion.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::Padding;

namespace {

const char* name_of(Padding mode) {
  constexpr const char* kNames[] = {"constant", "reflect", "replicate", "circular"};
  return kNames[static_cast<int>(mode)];
}

Padding padding_of(const char* mode) {
  const std::string_view name = mode == nullptr ? "" : mode;
  for (const Padding known : {Padding::kConstant, Padding::kReflect, Padding::kReplicate, Padding::kCircular}) {
    if (name == name_of(known)) return known;
  }
  throw_error(ErrorKind::kUnsupported, "pad: argument 'mode' must be constant, reflect, replicate or circular, got '",
              name, "'");
}

// `pads`: two values a dimension, the last dimension first. `value` may be null.
void check_pads(const Op& op, Padding mode, const Tensor& self, DimSpan pads, const double* value) {
  check(mode == Padding::kConstant || value == nullptr || *value == 0, op, ": mode '", name_of(mode),
        "' takes no value, got ", value == nullptr ? 0.0 : *value);
  const auto count = static_cast<std::int64_t>(pads.size());
  check(count % 2 == 0 && count / 2 <= self.dim(), op, ": argument 'pad' must have an even number of values, at most ",
        2 * self.dim(), " for shape ", to_string(self.sizes()), ", got ", to_string(pads));
  if (mode != Padding::kConstant) {
    const std::int64_t n = count / 2;
    if (n < 1 || n > 3 || (self.dim() != n + 1 && self.dim() != n + 2)) {
      throw_error(ErrorKind::kUnsupported, op,
                  ": modes reflect, replicate and circular pad the last 1, 2 or 3 of 2, 3 or 4 (or one more) "
                  "dimensions, got shape ",
                  to_string(self.sizes()), " with pad ", to_string(pads));
    }
  }
  for (std::size_t i = 0; i < pads.size(); i += 2) {
    const std::int64_t size = self.size(-1 - static_cast<std::int64_t>(i / 2));
    const std::int64_t cropped = size - std::max<std::int64_t>(-pads[i], 0) - std::max<std::int64_t>(-pads[i + 1], 0);
    const std::int64_t most = mode == Padding::kReflect ? size - 1 : cropped;
    if (mode == Padding::kReflect || mode == Padding::kCircular) {
      check(pads[i] <= most && pads[i + 1] <= most, op, ": ", name_of(mode), " padding may be at most ", most,
            " for a dimension of size ", size, ", got ", to_string(pads));
    }
    check(mode != Padding::kReplicate || size > 0, op, ": replicate padding needs a value to repeat, got shape ",
          to_string(self.sizes()));
    check(size + pads[i] + pads[i + 1] >= 0, op, ": the padding ", to_string(pads), " removes more than shape ",
          to_string(self.sizes()), " has");
    check(mode == Padding::kConstant || size + pads[i] + pads[i + 1] > 0, op, ": the padding ", to_string(pads),
          " leaves nothing of shape ", to_string(self.sizes()));
  }
  check(is_known(self.dtype()) && element_size(self.dtype()) <= 16, op, ": dtype ", dtype_name(self.dtype()),
        " is not supported");
  check(self.dim() <= kMaxDims, op, ": ", self.dim(), " dimensions are more than the kernels take (", kMaxDims, ")");
}

// A view without what negative pads take away. All pads are negative or 0.
TensorPtr cropped(const Tensor& self, DimSpan pads) {
  Dims sizes(self.sizes());
  std::int64_t offset = self.storage_offset();
  for (std::size_t i = 0; i < pads.size(); i += 2) {
    const std::size_t d = sizes.size() - 1 - i / 2;
    sizes[d] += pads[i] + pads[i + 1];
    offset -= pads[i] * self.strides()[d];
  }
  return self.view(sizes, self.strides(), offset);
}

TensorPtr padded(const Op& op, const Tensor& self, DimSpan pads, const char* mode_name, const double* value) {
  const Padding mode = padding_of(mode_name);
  check_pads(op, mode, self, pads, value);
  if (mode == Padding::kConstant && std::ranges::all_of(pads, [](std::int64_t pad) { return pad <= 0; })) {
    return clone_like(*cropped(self, pads));  // keeps the input's strides where they are dense, as in PyTorch
  }
  const auto ndim = static_cast<std::size_t>(self.dim());
  Dims sizes(self.sizes());
  for (std::size_t i = 0; i < pads.size(); i += 2) sizes[ndim - 1 - i / 2] += pads[i] + pads[i + 1];
  const TensorPtr constant = scalar_tensor(value == nullptr ? 0.0 : *value, self.dtype());
  // Circular padding makes a row-major tensor, the others keep the memory format; as in PyTorch.
  const bool keep = mode != Padding::kCircular && suggests_channels_last(self);
  TensorPtr out = empty_format(sizes, self.dtype(), keep, self.device());
  kernels::Pad p;
  p.numel = out->numel();
  const auto append = [&](std::size_t d) {
    const std::size_t slot = 2 * (ndim - 1 - d);
    const std::int64_t before = slot < pads.size() ? pads[slot] : 0, after = slot < pads.size() ? pads[slot + 1] : 0;
    p.dims[p.ndim++] = {sizes[d], out->strides()[d], self.sizes()[d], self.strides()[d], before, after};
  };
  // Innermost first in the result's memory.
  if (keep) append(1);
  for (std::size_t d = ndim; d-- > 0;) {
    if (!keep || d != 1) append(d);
  }
  run(
      op, {&self}, [&] { kernels::cpu::pad(p, mode, self.dtype(), out->raw(), self.raw(), constant->raw()); },
      [&](const auto& on) {
        return kernels::cuda::pad(p, mode, self.dtype(), out->raw(), self.raw(), constant->raw(), on.stream());
      });
  return out;
}

}  // namespace

UNTORCH_OP(pad,
           (AtenTensorHandle self, const std::int64_t* pad, std::int64_t pad_len, const char* mode, double* value,
            AtenTensorHandle* ret0),
           self, pad, pad_len, mode, value, ret0) {
  give(ret0, padded(op, op.input(self, "self"), ints(pad, pad_len), mode, value), op);
}

UNTORCH_SHIM aoti_torch_aten_pad(AtenTensorHandle self, const std::int64_t* pad, std::int64_t pad_len, const char* mode,
                                 double* value, AtenTensorHandle* ret0) {
  return guarded("pad", [&] { pad_op(Op::of("pad", self, "self"), self, pad, pad_len, mode, value, ret0); });
}
