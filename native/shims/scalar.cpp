// Scalars from tensors and to tensors (torch/csrc/inductor/aoti_torch/c/shim.h).
#include <cmath>
#include <limits>
#include <utility>

#include "shims/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// The only element of `t`, copied to the CPU.
template <class T>
T element_of(const Tensor& t) {
  T value{};
  copy_bytes(&value, Device{}, t.raw(), t.device(), sizeof(T));
  return value;
}

// A scalar as T. Throws when it is out of T's range; a fraction is truncated, as in PyTorch.
template <class T, class From>
T converted(From value, DType dtype) {
  if constexpr (std::is_same_v<T, bool>) {
    return value != From{};
  } else if constexpr (std::is_integral_v<T> && std::is_integral_v<From>) {
    check(std::in_range<T>(value), "item: the value ", value, " does not fit ", dtype_name(dtype));
  } else if constexpr (std::is_integral_v<T>) {
    // The largest wide integer is no double, one above it is, and so is the smallest.
    const double beyond = std::ldexp(1.0, std::numeric_limits<T>::digits);
    const double least = static_cast<double>(std::numeric_limits<T>::min());
    const double whole = std::trunc(static_cast<double>(value));
    check(whole >= least && whole < beyond, "item: the value ", value, " does not fit ", dtype_name(dtype));
  }
  return static_cast<T>(value);
}

// The only element of `tensor`. Of another dtype than the function's name says it is converted.
template <class T>
AOTITorchError item(AtenTensorHandle tensor, DType dtype, T* ret) {
  return guarded("item", [&] {
    const Tensor& t = input(tensor, "item", "tensor");
    check(ret != nullptr, "item: output pointer is null");
    check(t.numel() == 1, "item: the tensor has shape ", to_string(t.sizes()), ", expected one element");
    if (t.dtype() == dtype) {
      *ret = element_of<T>(t);
      return;
    }
    if constexpr (std::is_arithmetic_v<T>) {
      switch (t.dtype()) {
        case DType::kBool:
          *ret = converted<T>(static_cast<int>(element_of<bool>(t)), dtype);
          return;
        case DType::kUInt8:
          *ret = converted<T>(static_cast<unsigned>(element_of<std::uint8_t>(t)), dtype);
          return;
        case DType::kInt8:
          *ret = converted<T>(static_cast<int>(element_of<std::int8_t>(t)), dtype);
          return;
        case DType::kInt16:
          *ret = converted<T>(element_of<std::int16_t>(t), dtype);
          return;
        case DType::kInt32:
          *ret = converted<T>(element_of<std::int32_t>(t), dtype);
          return;
        case DType::kInt64:
          *ret = converted<T>(element_of<std::int64_t>(t), dtype);
          return;
        case DType::kFloat32:
          *ret = converted<T>(element_of<float>(t), dtype);
          return;
        case DType::kFloat64:
          *ret = converted<T>(element_of<double>(t), dtype);
          return;
        default:
          break;
      }
    }
    throw_error(ErrorKind::kUnsupported, "item: the tensor is ", dtype_name(t.dtype()), ", expected ",
                dtype_name(dtype));
  });
}

template <class T>
AOTITorchError scalar(T value, DType dtype, AtenTensorHandle* ret) {
  return guarded("scalar_to_tensor", [&] { give(ret, Tensor::scalar(value, dtype), "scalar_to_tensor"); });
}

}  // namespace

#define UNTORCH_ITEM(name, type, dtype)                                           \
  UNTORCH_SHIM aoti_torch_item_##name(AtenTensorHandle tensor, type* ret_value) { \
    return item(tensor, dtype, ret_value);                                        \
  }
#define UNTORCH_SCALAR(name, type, dtype)                                                         \
  UNTORCH_SHIM aoti_torch_scalar_to_tensor_##name(type value, AtenTensorHandle* ret_new_tensor) { \
    return scalar(value, dtype, ret_new_tensor);                                                  \
  }

UNTORCH_ITEM(float16, Half, DType::kFloat16)
UNTORCH_ITEM(bfloat16, BFloat16, DType::kBFloat16)
UNTORCH_ITEM(float32, float, DType::kFloat32)
UNTORCH_ITEM(float64, double, DType::kFloat64)
UNTORCH_ITEM(uint8, std::uint8_t, DType::kUInt8)
UNTORCH_ITEM(uint16, std::uint16_t, DType::kUInt16)
UNTORCH_ITEM(uint32, std::uint32_t, DType::kUInt32)
UNTORCH_ITEM(uint64, std::uint64_t, DType::kUInt64)
UNTORCH_ITEM(int8, std::int8_t, DType::kInt8)
UNTORCH_ITEM(int16, std::int16_t, DType::kInt16)
UNTORCH_ITEM(int32, std::int32_t, DType::kInt32)
UNTORCH_ITEM(int64, std::int64_t, DType::kInt64)
UNTORCH_ITEM(bool, bool, DType::kBool)
UNTORCH_ITEM(complex64, Complex64, DType::kComplex64)

UNTORCH_SCALAR(float32, float, DType::kFloat32)
UNTORCH_SCALAR(float64, double, DType::kFloat64)
UNTORCH_SCALAR(uint8, std::uint8_t, DType::kUInt8)
UNTORCH_SCALAR(uint16, std::uint16_t, DType::kUInt16)
UNTORCH_SCALAR(uint32, std::uint32_t, DType::kUInt32)
UNTORCH_SCALAR(uint64, std::uint64_t, DType::kUInt64)
UNTORCH_SCALAR(int8, std::int8_t, DType::kInt8)
UNTORCH_SCALAR(int16, std::int16_t, DType::kInt16)
UNTORCH_SCALAR(int32, std::int32_t, DType::kInt32)
UNTORCH_SCALAR(int64, std::int64_t, DType::kInt64)
UNTORCH_SCALAR(bool, bool, DType::kBool)
// c10::complex is a struct of two like ours: both travel in the same registers.
UNTORCH_SCALAR(complex64, Complex64, DType::kComplex64)
UNTORCH_SCALAR(complex128, Complex128, DType::kComplex128)
