// untorch_view, the one description of a caller's memory from the binding to the tensor, in the library's own types.
#pragma once

#include "tensor/tensor.h"
#include "untorch/untorch.h"

namespace untorch {

inline DType dtype_of(const untorch_view& view) noexcept { return static_cast<DType>(view.dtype); }
inline Device device_of(const untorch_view& view) noexcept {
  return {static_cast<DeviceType>(view.device_type), view.device_index};
}
inline DimSpan sizes_of(const untorch_view& view) noexcept { return {view.sizes, static_cast<std::size_t>(view.ndim)}; }
inline DimSpan strides_of(const untorch_view& view) noexcept {
  return {view.strides, static_cast<std::size_t>(view.ndim)};
}

// Throws unless the accessors above may be used.
inline void check_view(const untorch_view& view) {
  check(view.ndim >= 0 && (view.ndim == 0 || (view.sizes != nullptr && view.strides != nullptr)), "a view has ",
        view.ndim, " dimensions but no sizes or strides");
}

// The caller's memory, which the storage does not own. Throws for sizes and strides that reach too far.
inline StorageRef borrowed_storage(const untorch_view& view) {
  const auto extent = static_cast<std::size_t>(storage_extent(sizes_of(view), strides_of(view)));
  return StorageRef::borrow(view.data, extent * element_size(dtype_of(view)), device_of(view));
}

}  // namespace untorch
