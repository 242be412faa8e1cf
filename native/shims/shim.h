// What every C shim is written with: handles in and out, and the border that no exception crosses.
//
//   UNTORCH_SHIM aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
//     return guarded("mm", [&] {
//       const Tensor& a = cpu_input(self, "mm", "self");
//       …
//     });
//   }
//
// The signatures are PyTorch's (torch/csrc/inductor/aoti_torch/{c,generated}/*.h); the implementations are ours.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <string>

#include "base/dispatch.h"
#include "base/export.h"
#include "base/profile.h"
#include "tensor/copy.h"
#include "tensor/tensor.h"
#include "threads/call.h"

// The start of a shim that returns an error code.
#define UNTORCH_SHIM extern "C" UNTORCH_EXPORT AOTITorchError

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct AtenGeneratorOpaque;
using AtenGeneratorHandle = AtenGeneratorOpaque*;
using AOTITorchError = std::int32_t;  // 0: success, 1: failure (the message is in untorch::last_error())

namespace untorch::shims {

inline Tensor* unwrap(AtenTensorHandle handle) noexcept { return reinterpret_cast<Tensor*>(handle); }
inline AtenTensorHandle wrap(Tensor* tensor) noexcept { return reinterpret_cast<AtenTensorHandle>(tensor); }

// Keeps a shim's failure as the thread's last error and as the model call's: generated code looks at few return codes.
void record_failure(const char* op, ErrorKind kind, const char* message) noexcept;

// Runs the body; an exception is recorded, prefixed with the operator, and gives code 1. In a call that has failed
// already, in a parallel region for example, it fails at once: the generated code shall end.
// function: the shim's name, for the profiler.
template <class Body>
AOTITorchError guarded(const char* op, Body&& body, const char* function = __builtin_FUNCTION()) noexcept {
  const profile::Range range(op, function);
  if (threads::call_failed()) [[unlikely]]
    return 1;
  try {
    body();
    return 0;
  } catch (const Error& e) {
    record_failure(op, e.kind(), e.what());
  } catch (const std::bad_alloc&) {
    record_failure(op, ErrorKind::kOutOfMemory, "out of memory");
  } catch (const std::exception& e) {
    record_failure(op, ErrorKind::kInternal, e.what());
  } catch (...) {
    record_failure(op, ErrorKind::kInternal, "unknown failure");
  }
  return 1;
}

// The tensor behind a required handle; it may be undefined.
inline Tensor& required(AtenTensorHandle handle, const char* op, const char* argument) {
  check(handle != nullptr, op, ": argument '", argument, "' is null");
  return *unwrap(handle);
}

// The tensor behind a required handle: defined and on the CPU.
inline Tensor& cpu_input(AtenTensorHandle handle, const char* op, const char* argument) {
  Tensor& tensor = required(handle, op, argument);
  check(tensor.defined(), op, ": argument '", argument, "' is undefined");
  check(tensor.device().type == DeviceType::kCPU, op, ": argument '", argument, "' is on ",
        device_name(tensor.device()), ", expected cpu");
  return tensor;
}

// The tensor behind a required handle: defined and on a GPU.
inline Tensor& cuda_input(AtenTensorHandle handle, const char* op, const char* argument) {
  Tensor& tensor = required(handle, op, argument);
  check(tensor.defined(), op, ": argument '", argument, "' is undefined");
  check(tensor.device().type == DeviceType::kCUDA, op, ": argument '", argument, "' is on ",
        device_name(tensor.device()), ", expected cuda");
  return tensor;
}

// The tensor behind a required handle: defined, on any device.
inline Tensor& input(AtenTensorHandle handle, const char* op, const char* argument) {
  Tensor& tensor = required(handle, op, argument);
  check(tensor.defined(), op, ": argument '", argument, "' is undefined");
  return tensor;
}

// An optional tensor argument, passed as a pointer to a handle: null, or a pointer to null, means absent.
inline const Tensor* optional_cpu_input(AtenTensorHandle* handle, const char* op, const char* argument) {
  if (handle == nullptr || *handle == nullptr || !unwrap(*handle)->defined()) return nullptr;
  return &cpu_input(*handle, op, argument);
}

// Hands a new tensor to the model library.
inline void give(AtenTensorHandle* slot, TensorPtr tensor, const char* op) {
  check(slot != nullptr, op, ": output pointer is null");
  *slot = wrap(tensor.release());
}

// The same for a result that may go unread: generated code passes null for those that its graph does not use.
inline void give_if_asked(AtenTensorHandle* slot, TensorPtr tensor) noexcept {
  if (slot != nullptr) *slot = wrap(tensor.release());
}

// A list argument (pointer and length) as a span.
inline DimSpan ints(const std::int64_t* values, std::int64_t length) {
  return {values, static_cast<std::size_t>(length < 0 ? 0 : length)};
}

inline DType dtype_or(const std::int32_t* dtype, DType fallback) {
  return dtype == nullptr ? fallback : static_cast<DType>(*dtype);
}

}  // namespace untorch::shims
