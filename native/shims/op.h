// One front for an operator on every device: what checks arguments, allocates results, and dispatches on the device.
//
//   UNTORCH_OP(cumsum, (AtenTensorHandle self, std::int64_t dim, AtenTensorHandle* ret0), self, dim, ret0) {
//     const Tensor& t = op.input(self, "self");
//     TensorPtr out = Tensor::empty(t.sizes(), t.dtype(), t.device());
//     run(
//         op, {&t}, [&] { kernels::cpu::cumsum(…); },
//         [&](const auto& on) { return kernels::cuda::cumsum(…, on.stream()); });
//     give(ret0, std::move(out), op);
//   }
//
// emits aoti_torch_cpu_cumsum and, in a build with CUDA kernels, aoti_torch_cuda_cumsum. The body runs behind
// guarded(): it may throw. `op` says which operator runs and on which device.
#pragma once

#include <initializer_list>
#include <utility>

#include "base/interrupt.h"
#include "cuda/kernel_registry.h"
#include "cuda/on_device.h"
#include "shims/shim.h"

namespace untorch::shims {

#ifdef UNTORCH_CUDA_KERNELS
inline constexpr bool kHasCudaKernels = true;
#else
inline constexpr bool kHasCudaKernels = false;
#endif

struct Op {
  const char* name;  // for messages
  DeviceType device = DeviceType::kCPU;

  // For the older C functions, which name no device: the tensor's. Throws where this build has no kernels for it.
  static Op of(const char* name, AtenTensorHandle handle, const char* argument) {
    const Tensor& t = shims::input(handle, name, argument);
    const DeviceType device = t.device().type;
    if (device == DeviceType::kCPU || (kHasCudaKernels && device == DeviceType::kCUDA)) return {name, device};
    throw_error(ErrorKind::kUnsupported, name, ": argument '", argument, "' is on ", device_name(t.device()), ", and ",
                device == DeviceType::kCUDA ? cuda::kBuiltWithoutCuda : "no operator runs there: expected cpu or cuda");
  }

  operator const char*() const noexcept { return name; }  // NOLINT(google-explicit-constructor)
  bool on_cuda() const noexcept { return device == DeviceType::kCUDA; }

  // The tensor behind a required handle: defined, and on the operator's device.
  Tensor& input(AtenTensorHandle handle, const char* argument) const {
    return on_cuda() ? cuda_input(handle, name, argument) : cpu_input(handle, name, argument);
  }
  // An optional tensor argument, passed as a pointer to a handle: null, or a pointer to null, means absent.
  const Tensor* optional_input(AtenTensorHandle* handle, const char* argument) const {
    if (handle == nullptr || *handle == nullptr || !unwrap(*handle)->defined()) return nullptr;
    return &input(*handle, argument);
  }
  // Throws unless the operands (null ones are absent) are on one device. run() checks it too, but for a front that
  // allocates before it runs that is too late.
  void check_same_device(std::initializer_list<const Tensor*> operands) const {
    if (!on_cuda()) return;
    const Device first = (*operands.begin())->device();
    for (const Tensor* const other : operands) {
      check(other == nullptr || other->device() == first, name, ": operands are on ", device_name(first), " and ",
            other == nullptr ? "" : device_name(other->device()), ", expected one device");
    }
  }
};

// Runs `cpu()`, or `cuda(on)` with the device and stream of the operands (null ones are absent), which must be on one
// device. `cuda` is a generic lambda that returns its launcher's code, or nothing: a build without CUDA kernels never
// instantiates it, so functions that only `cuda` calls are [[maybe_unused]].
template <class Cpu, class Cuda>
void run(const Op& op, std::initializer_list<const Tensor*> operands, Cpu&& cpu, Cuda&& cuda) {
  if constexpr (kHasCudaKernels) {
    if (op.on_cuda()) {
      const OnDevice on(op.name, **operands.begin(), operands);
      if constexpr (std::is_void_v<decltype(cuda(on))>) {
        cuda(on);
      } else {
        on.launched(cuda(on));
      }
      return;
    }
  }
  cpu();
}

}  // namespace untorch::shims

#define UNTORCH_EXPAND(...) __VA_ARGS__

// UNTORCH_OP_AS("add", add_Tensor, (parameters), arguments...) { body }: `text` is the name in messages.
#define UNTORCH_OP_AS(text, name, parameters, ...)                                   \
  static void name##_op(const ::untorch::shims::Op& op, UNTORCH_EXPAND parameters);  \
  UNTORCH_SHIM aoti_torch_cpu_##name(UNTORCH_EXPAND parameters) {                    \
    return guarded(text, [&] {                                                       \
      check_interrupt();                                                             \
      name##_op({text, ::untorch::DeviceType::kCPU}, __VA_ARGS__);                   \
    });                                                                              \
  }                                                                                  \
  UNTORCH_CUDA_NAME(UNTORCH_SHIM aoti_torch_cuda_##name(UNTORCH_EXPAND parameters) { \
    return guarded(text, [&] {                                                       \
      check_interrupt();                                                             \
      name##_op({text, ::untorch::DeviceType::kCUDA}, __VA_ARGS__);                  \
    });                                                                              \
  })                                                                                 \
  static void name##_op([[maybe_unused]] const ::untorch::shims::Op& op, UNTORCH_EXPAND parameters)
#define UNTORCH_OP(name, parameters, ...) UNTORCH_OP_AS(#name, name, parameters, __VA_ARGS__)

// CUDA's names are absent in a build without CUDA kernels.
#ifdef UNTORCH_CUDA_KERNELS
#define UNTORCH_CUDA_NAME(...) __VA_ARGS__
#else
#define UNTORCH_CUDA_NAME(...)
#endif
