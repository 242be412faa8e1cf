// Debugging aids of AOTInductor: NaN checks, printing and saving of intermediate tensors.
#include <cmath>
#include <cstdio>

#include "shims/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// Mean, extremes and the first values of a real CPU tensor as text.
std::string summary(const Tensor& t) {
  const std::string head = detail::concat(dtype_name(t.dtype()), " ", to_string(t.sizes()), ", strides ",
                                          to_string(t.strides()), ", ", device_name(t.device()));
  if (t.device().type != DeviceType::kCPU || t.numel() == 0 || is_complex(t.dtype())) return head;
  const TensorPtr values = to_dtype(t, DType::kFloat64);
  const auto* p = values->data<double>();
  double sum = 0, low = p[0], high = p[0];
  std::int64_t nans = 0, infinities = 0;
  for (std::int64_t i = 0; i < values->numel(); ++i) {
    nans += std::isnan(p[i]) ? 1 : 0;
    infinities += std::isinf(p[i]) ? 1 : 0;
    sum += p[i];
    low = std::fmin(low, p[i]);
    high = std::fmax(high, p[i]);
  }
  std::string text =
      detail::concat(head, ", min ", low, ", max ", high, ", mean ", sum / static_cast<double>(values->numel()), ", ",
                     nans, " NaN, ", infinities, " inf, first:");
  for (std::int64_t i = 0; i < values->numel() && i < 8; ++i) text += detail::concat(" ", p[i]);
  return text;
}

}  // namespace

UNTORCH_SHIM aoti_torch_check_inf_and_nan(const char* tensor_name, AtenTensorHandle tensor) {
  return guarded("check_inf_and_nan", [&] {
    const Tensor& t = cpu_input(tensor, "check_inf_and_nan", "tensor");
    if (!is_floating(t.dtype()) && !is_complex(t.dtype())) return;
    const TensorPtr values = to_dtype(t, is_complex(t.dtype()) ? DType::kComplex128 : DType::kFloat64);
    const auto* p = values->data<double>();
    const std::int64_t n = values->numel() * (is_complex(t.dtype()) ? 2 : 1);
    const char* name = tensor_name == nullptr ? "?" : tensor_name;
    for (std::int64_t i = 0; i < n; ++i) {
      if (std::isfinite(p[i])) continue;
      throw_error(ErrorKind::kModel, "check_inf_and_nan: tensor '", name, "' holds ",
                  std::isnan(p[i]) ? "NaN" : "infinity");
    }
  });
}

extern "C" UNTORCH_EXPORT void aoti_torch_print_tensor_handle(AtenTensorHandle self, const char* msg) {
  const AOTITorchError code = guarded("print_tensor_handle", [&] {
    const Tensor& t = required(self, "print_tensor_handle", "self");
    std::printf("%s: %s\n", msg == nullptr ? "tensor" : msg, t.defined() ? summary(t).c_str() : "undefined");
    std::fflush(stdout);
  });
  if (code != 0) std::fprintf(stderr, "untorch: %s\n", last_error().c_str());
}

// PyTorch pickles the tensor into a file; untorch has no pickler, says so, and prints the tensor instead.
extern "C" UNTORCH_EXPORT void aoti_torch_save_tensor_handle(AtenTensorHandle self, const char* tensor_name,
                                                             const char* launch_prefix, const char* kernel_name) {
  std::fprintf(stderr, "untorch: intermediate tensors are not saved to files; '%s' of %s (%s) is printed instead\n",
               tensor_name == nullptr ? "?" : tensor_name, kernel_name == nullptr ? "?" : kernel_name,
               launch_prefix == nullptr ? "?" : launch_prefix);
  aoti_torch_print_tensor_handle(self, tensor_name);
}
