// CUDA's device table: memory, strided copies with conversion, zeros.
#include "kernels/cuda/elementwise/copy.h"

#include "cuda/on_device.h"
#include "cuda/upload.h"
#include "tensor/copy.h"
#include "tensor/device.h"
#include "tensor/iteration.h"

namespace untorch::cuda {
namespace {

StorageRef allocate_tensor(std::size_t nbytes, Device device) {
  return allocate(nbytes, device.index < 0 ? current_device() : device.index);
}

// Bytes and layout of the two are the same: one copy of the memory will do.
bool same_dense_layout(const Tensor& dst, const Tensor& src) {
  if (dst.dtype() != src.dtype() || dst.sizes() != src.sizes()) return false;
  if (dst.is_contiguous() && src.is_contiguous()) return true;
  return dst.strides() == src.strides() && dst.numel() == storage_extent(dst.sizes(), dst.strides());
}

std::size_t bytes_of(const Tensor& t) { return static_cast<std::size_t>(t.numel()) * element_size(t.dtype()); }

void copy_on_device(const Tensor& dst, const Tensor& src) {
  const OnDevice on("copy", dst, {&src});
  if (dst.numel() == 0) return;
  if (same_dense_layout(dst, src)) {
    check_driver(driver().memcpy_async(reinterpret_cast<DevicePtr>(dst.raw()), reinterpret_cast<DevicePtr>(src.raw()),
                                       bytes_of(dst), on.stream()),
                 "copy");
    return;
  }
  const auto space = strided<2>("copy", dst.sizes(), {&dst, &src});
  on.launched(kernels::cuda::copy(space, dst.raw(), dst.dtype(), src.raw(), src.dtype(),
                                  static_cast<int>(element_size(dst.dtype())), on.stream()));
}

// Another GPU, or the CPU: through dense memory of the same dtype and layout on both sides.
void copy_across(const Tensor& dst, const Tensor& src) {
  if (dst.numel() == 0) return;
  if (!same_dense_layout(dst, src)) {
    // Convert where the source is; put into place where the destination is.
    TensorPtr dense = Tensor::empty(src.sizes(), dst.dtype(), src.device());
    copy(*dense, src);
    TensorPtr landed = Tensor::empty(src.sizes(), dst.dtype(), dst.device());
    copy_across(*landed, *dense);
    copy(dst, *landed);
    return;
  }
  const bool to_device = dst.device().type == DeviceType::kCUDA, from_device = src.device().type == DeviceType::kCUDA;
  const OnDevice on("copy", to_device ? dst.device() : src.device());
  const Driver& api = driver();
  const auto to = reinterpret_cast<DevicePtr>(dst.raw()), from = reinterpret_cast<DevicePtr>(src.raw());
  if (to_device && from_device) order_after(on.stream(), current_stream(src.device().index));
  // The driver stages pageable memory itself, in order with the stream.
  check_driver(api.memcpy_async(to, from, bytes_of(dst), on.stream()), "copy");
  if (to_device && from_device) {
    order_after(current_stream(src.device().index), on.stream());
  } else if (!is_capturing(on.stream())) {
    check_driver(api.stream_synchronize(on.stream()), "copy");
  }
}

void copy_tensor(const Tensor& dst, const Tensor& src) {
  if (dst.device() == src.device()) {
    copy_on_device(dst, src);
    return;
  }
  // A source that broadcasts is expanded first, so that both sides have one shape.
  if (dst.sizes() != src.sizes()) {
    Dims strides;
    strides.resize(dst.sizes().size());
    check(src.dim() <= dst.dim(), "copy: shape ", to_string(src.sizes()), " does not broadcast to ",
          to_string(dst.sizes()));
    const std::size_t lead = dst.sizes().size() - src.sizes().size();
    for (std::size_t d = lead; d < strides.size(); ++d) {
      const std::int64_t size = src.sizes()[d - lead];
      check(size == dst.sizes()[d] || size == 1, "copy: shape ", to_string(src.sizes()), " does not broadcast to ",
            to_string(dst.sizes()));
      strides[d] = size == 1 ? 0 : src.strides()[d - lead];
    }
    copy_across(dst, Tensor(src.storage(), src.storage_offset(), src.dtype(), dst.sizes(), strides));
    return;
  }
  copy_across(dst, src);
}

void zero_tensor(void* data, std::size_t nbytes, Device device) {
  if (nbytes == 0) return;
  const OnDevice on("zero", device);
  check_driver(driver().memset_d8_async(reinterpret_cast<DevicePtr>(data), 0, nbytes, on.stream()), "zero");
}

void copy_bytes_tensor(void* dst, Device dst_device, const void* src, Device src_device, std::size_t nbytes) {
  const auto n = static_cast<std::int64_t>(nbytes);
  const Tensor to(StorageRef::borrow(dst, nbytes, dst_device), 0, DType::kUInt8, {{n}}, {{1}});
  const Tensor from(StorageRef::borrow(const_cast<void*>(src), nbytes, src_device), 0, DType::kUInt8, {{n}}, {{1}});
  copy_tensor(to, from);
}

constexpr DeviceTable kTable{allocate_tensor, copy_tensor, zero_tensor, copy_bytes_tensor};
[[maybe_unused]] const bool registered = [] {
  register_device(DeviceType::kCUDA, kTable);
  return true;
}();

}  // namespace

}  // namespace untorch::cuda
