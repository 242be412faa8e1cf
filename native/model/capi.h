// What the files of the C interface share: the opaque handles, and the border that no exception crosses.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "model/program.h"
#include "untorch/untorch.h"

// The handles that untorch.h leaves opaque are these.
struct untorch_program {
  std::unique_ptr<untorch::Program> program;
  std::vector<std::unique_ptr<untorch_method>> methods;
};
struct untorch_method {
  untorch::Method* method;
};

namespace untorch::capi {

template <class Body>
untorch_status guarded(Body&& body) noexcept {
  try {
    body();
    return UNTORCH_OK;
  } catch (const untorch::Error& e) {
    untorch::set_last_error(e.kind(), e.what());
  } catch (const std::bad_alloc&) {
    untorch::set_last_error(untorch::ErrorKind::kOutOfMemory, "out of memory");
  } catch (const std::exception& e) {
    untorch::set_last_error(untorch::ErrorKind::kInternal, e.what());
  } catch (...) {
    untorch::set_last_error(untorch::ErrorKind::kInternal, "unknown failure");
  }
  return static_cast<untorch_status>(untorch::last_error_kind());
}

inline untorch::Tensor* unwrap(untorch_tensor* tensor) { return reinterpret_cast<untorch::Tensor*>(tensor); }
inline const untorch::Tensor* unwrap(const untorch_tensor* tensor) {
  return reinterpret_cast<const untorch::Tensor*>(tensor);
}
inline untorch_tensor* wrap(untorch::Tensor* tensor) { return reinterpret_cast<untorch_tensor*>(tensor); }

inline untorch::TensorView to_view(const untorch_view& view) {
  untorch::check(view.ndim >= 0 && (view.ndim == 0 || (view.sizes != nullptr && view.strides != nullptr)),
                 "a view has ", view.ndim, " dimensions but no sizes or strides");
  const auto ndim = static_cast<std::size_t>(view.ndim);
  return {view.data,
          static_cast<untorch::DType>(view.dtype),
          {static_cast<untorch::DeviceType>(view.device_type), view.device_index},
          {view.sizes, ndim},
          {view.strides, ndim},
          view.read_only != 0};
}

// Views in, tensors out: small calls allocate nothing for either list.
template <class Body>
void with_tensors(const untorch_view* inputs, size_t num_inputs, untorch_tensor** outputs, size_t num_outputs,
                  Body&& body) {
  constexpr std::size_t kFew = 8;
  std::array<untorch::TensorView, kFew> few_views;
  std::array<untorch::TensorPtr, kFew> few_outputs;
  std::vector<untorch::TensorView> many_views;
  std::vector<untorch::TensorPtr> many_outputs;
  std::span<untorch::TensorView> views(few_views.data(), std::min(num_inputs, kFew));
  std::span<untorch::TensorPtr> results(few_outputs.data(), std::min(num_outputs, kFew));
  if (num_inputs > kFew) views = many_views = std::vector<untorch::TensorView>(num_inputs);
  if (num_outputs > kFew) {
    many_outputs.resize(num_outputs);
    results = many_outputs;
  }
  for (std::size_t i = 0; i < num_inputs; ++i) views[i] = to_view(inputs[i]);
  body(views, results);
  for (std::size_t i = 0; i < num_outputs; ++i) outputs[i] = wrap(results[i].release());
}

}  // namespace untorch::capi
