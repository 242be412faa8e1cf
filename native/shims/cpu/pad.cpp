// Padding: constant, reflect, replicate and circular, as a gather along each padded dimension.
#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "shims/cpu/elementwise.h"
#include "shims/device_ops.h"
#include "shims/nn.h"
#include "shims/pad.h"

namespace untorch::shims {
namespace {

const char* name_of(PadMode mode) {
  constexpr const char* kNames[] = {"constant", "reflect", "replicate", "circular"};
  return kNames[static_cast<int>(mode)];
}

}  // namespace

PadMode pad_mode(const char* mode) {
  const std::string_view name = mode == nullptr ? "" : mode;
  if (name == "constant") return PadMode::kConstant;
  if (name == "reflect") return PadMode::kReflect;
  if (name == "replicate") return PadMode::kReplicate;
  if (name == "circular") return PadMode::kCircular;
  throw_error(ErrorKind::kUnsupported, "pad: argument 'mode' must be constant, reflect, replicate or circular, got '",
              name, "'");
}

void check_pads(PadMode mode, const Tensor& self, DimSpan pads, const double* value) {
  check(mode == PadMode::kConstant || value == nullptr || *value == 0, "pad: mode '", name_of(mode),
        "' takes no value, got ", value == nullptr ? 0.0 : *value);
  const auto count = static_cast<std::int64_t>(pads.size());
  check(count % 2 == 0 && count / 2 <= self.dim(), "pad: argument 'pad' must have an even number of values, at most ",
        2 * self.dim(), " for shape ", to_string(self.sizes()), ", got ", to_string(pads));
  if (mode != PadMode::kConstant) {
    const std::int64_t n = count / 2;
    if (n < 1 || n > 3 || (self.dim() != n + 1 && self.dim() != n + 2)) {
      throw_error(ErrorKind::kUnsupported,
                  "pad: modes reflect, replicate and circular pad the last 1, 2 or 3 of 2, 3 or 4 (or one more) "
                  "dimensions, got shape ",
                  to_string(self.sizes()), " with pad ", to_string(pads));
    }
  }
  for (std::size_t i = 0; i < pads.size(); i += 2) {
    const std::int64_t size = self.size(-1 - static_cast<std::int64_t>(i / 2));
    const std::int64_t cropped = size - std::max<std::int64_t>(-pads[i], 0) - std::max<std::int64_t>(-pads[i + 1], 0);
    const std::int64_t most = mode == PadMode::kReflect ? size - 1 : cropped;
    if (mode == PadMode::kReflect || mode == PadMode::kCircular) {
      check(pads[i] <= most && pads[i + 1] <= most, "pad: ", mode == PadMode::kReflect ? "reflect" : "circular",
            " padding may be at most ", most, " for a dimension of size ", size, ", got ", to_string(pads));
    }
    check(mode != PadMode::kReplicate || size > 0, "pad: replicate padding needs a value to repeat, got shape ",
          to_string(self.sizes()));
    check(size + pads[i] + pads[i + 1] >= 0, "pad: the padding ", to_string(pads), " removes more than shape ",
          to_string(self.sizes()), " has");
    if (mode != PadMode::kConstant) {
      check(size + pads[i] + pads[i + 1] > 0, "pad: the padding ", to_string(pads), " leaves nothing of shape ",
            to_string(self.sizes()));
    }
  }
}

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

}  // namespace untorch::shims

using namespace untorch;
using namespace untorch::shims;
using Mode = PadMode;

namespace {

// The input position that output position i shows, or -1 for the constant.
std::int64_t source_of(Mode mode, std::int64_t i, std::int64_t before, std::int64_t after, std::int64_t size) {
  if (mode == Mode::kCircular) {
    // Negative padding crops first; what is left wraps around.
    const std::int64_t first = std::max<std::int64_t>(-before, 0), last = size - std::max<std::int64_t>(-after, 0);
    const std::int64_t length = last - first, at = i - std::max<std::int64_t>(before, 0);
    return first + (at % length + length) % length;
  }
  const std::int64_t at = i - before;
  if (at >= 0 && at < size) return at;
  if (mode == Mode::kConstant) return -1;
  if (mode == Mode::kReflect) return at < 0 ? -at : 2 * (size - 1) - at;
  return at < 0 ? 0 : size - 1;
}

TensorPtr padded(const Tensor& self, DimSpan pads, const char* mode_name, const double* value) {
  const Mode mode = pad_mode(mode_name);
  check_pads(mode, self, pads, value);
  if (mode == Mode::kConstant && std::ranges::all_of(pads, [](std::int64_t pad) { return pad <= 0; })) {
    return clone_like(*cropped(self, pads));  // keeps the input's strides where they are dense, as in PyTorch
  }
  const auto ndim = static_cast<std::size_t>(self.dim());
  Dims sizes(self.sizes());
  std::vector<std::vector<std::int64_t>> sources(ndim);  // element offsets in the input, -1: the constant
  for (std::size_t d = 0; d < ndim; ++d) {
    const std::size_t slot = 2 * (ndim - 1 - d);
    const std::int64_t before = slot < pads.size() ? pads[slot] : 0, after = slot < pads.size() ? pads[slot + 1] : 0;
    const std::int64_t size = sizes[d];
    sizes[d] = size + before + after;
    for (std::int64_t i = 0; i < sizes[d]; ++i) {
      const std::int64_t from = source_of(mode, i, before, after, size);
      sources[d].push_back(from < 0 ? -1 : from * self.strides()[d]);
    }
  }
  // Circular padding makes a row-major tensor, the others keep the memory format; as in PyTorch.
  const bool keep = mode != Mode::kCircular && suggests_channels_last(self);
  TensorPtr out = empty_format(sizes, self.dtype(), keep);
  if (out->numel() == 0) return out;
  if (ndim == 0) {
    copy_cpu(*out, self);
    return out;
  }
  const TensorPtr fill_value = Tensor::empty(DimSpan{}, self.dtype());
  copy_cpu(*fill_value, *Tensor::scalar(value == nullptr ? 0.0 : *value, DType::kFloat64));
  // Dimensions outermost first in the output's memory.
  std::vector<std::size_t> order;
  if (keep) {
    order.push_back(0);
    for (std::size_t d = 2; d < ndim; ++d) order.push_back(d);
    order.push_back(1);
  } else {
    for (std::size_t d = 0; d < ndim; ++d) order.push_back(d);
  }
  const std::size_t inner = order.back();
  const std::int64_t length = sizes[inner], rows = out->numel() / length;
  dispatch_width("pad", self.dtype(), [&]<class T>() {
    T constant;
    std::memcpy(&constant, fill_value->raw(), sizeof constant);
    const T* from = self.data<T>();
    T* to = out->data<T>();
    const bool parallel = static_cast<double>(out->numel()) > kernels::kParallelWork;
    kernels::for_each_item_grained(rows, 4096 / length + 1, parallel, [&](std::int64_t row) {
      std::int64_t rest = row, offset = 0;
      for (std::size_t k = ndim - 1; k-- > 0;) {
        const std::size_t d = order[k];
        const std::int64_t source = sources[d][static_cast<std::size_t>(rest % sizes[d])];
        rest /= sizes[d];
        offset = source < 0 || offset < 0 ? -1 : offset + source;
      }
      T* line = to + row * length;
      const std::int64_t* source = sources[inner].data();
      for (std::int64_t i = 0; i < length; ++i) {
        line[i] = offset < 0 || source[i] < 0 ? constant : from[offset + source[i]];
      }
    });
  });
  return out;
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_pad(AtenTensorHandle self, const std::int64_t* pad, std::int64_t pad_len, const char* mode,
                                double* value, AtenTensorHandle* ret0) {
  return guarded("pad",
                 [&] { give(ret0, padded(cpu_input(self, "pad", "self"), ints(pad, pad_len), mode, value), "pad"); });
}

UNTORCH_SHIM aoti_torch_aten_pad(AtenTensorHandle self, const std::int64_t* pad, std::int64_t pad_len, const char* mode,
                                 double* value, AtenTensorHandle* ret0) {
  if (on_cuda(self) && cuda_ops.pad != nullptr) return cuda_ops.pad(self, pad, pad_len, mode, value, ret0);
  return aoti_torch_cpu_pad(self, pad, pad_len, mode, value, ret0);
}
