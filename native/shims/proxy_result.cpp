// What a proxy kernel returned, compared with what the model was compiled for: generated code believes it.
#include <algorithm>
#include <string>

#include "shims/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

std::string form(DType dtype, DimSpan sizes) {
  std::string text = std::string(dtype_name(dtype)) + "[";
  for (std::size_t d = 0; d < sizes.size(); ++d) text += (d == 0 ? "" : ", ") + std::to_string(sizes[d]);
  return text + "]";
}

bool same_sizes(DimSpan a, DimSpan b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

// Strides of dimensions with one element, and of tensors with none, say nothing.
bool same_layout(const Tensor& tensor, DimSpan strides) {
  if (tensor.numel() == 0) return true;
  for (std::size_t d = 0; d < strides.size(); ++d) {
    if (tensor.sizes()[d] > 1 && tensor.strides()[d] != strides[d]) return false;
  }
  return true;
}

}  // namespace

// Exported models call it after each proxy call, for each result. Another dtype or shape is an error; another layout is
// copied into the declared one.
UNTORCH_SHIM aoti_torch_untorch_check_result(AtenTensorHandle result, std::int32_t dtype, std::int64_t ndim,
                                             const std::int64_t* sizes, const std::int64_t* strides, const char* op,
                                             std::int64_t index) {
  return guarded("kernel", [&] {
    Tensor& tensor = required(result, "kernel", "result");
    const DimSpan declared = ints(sizes, ndim), layout = ints(strides, ndim);
    const auto expected = static_cast<DType>(dtype);
    const std::string where = "kernel of `" + std::string(op) + "`, result " + std::to_string(index) + ": ";
    check(tensor.defined(), where, "expected ", form(expected, declared), ", got nothing");
    if (tensor.dtype() != expected || !same_sizes(tensor.sizes(), declared)) {
      throw_error(ErrorKind::kModel, where, "expected ", form(expected, declared), ", got ",
                  form(tensor.dtype(), tensor.sizes()),
                  ": return the dtype and shape that the operator's fake implementation declares",
                  same_sizes(tensor.sizes(), declared) ? ", or register the kernel with cast=True" : "");
    }
    if (same_layout(tensor, layout)) return;
    const TensorPtr copy = Tensor::empty_strided(declared, layout, expected, tensor.device());
    untorch::copy(*copy, tensor);
    tensor = *copy;
  });
}
