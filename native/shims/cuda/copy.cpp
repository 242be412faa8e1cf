// CUDA's hooks for tensors (memory, copies, zeros), and copies that shims use.
#include "kernels/cuda/copy.h"

#include "cuda/upload.h"
#include "shims/cuda/shim.h"
#include "tensor/copy.h"

namespace untorch::shims {
namespace {

StorageRef allocate_hook(std::size_t nbytes, Device device) {
  return cuda::allocate(nbytes, device.index < 0 ? cuda::current_device() : device.index);
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
    cuda::check_driver(
        cuda::driver().memcpy_async(reinterpret_cast<cuda::DevicePtr>(dst.raw()),
                                    reinterpret_cast<cuda::DevicePtr>(src.raw()), bytes_of(dst), on.stream()),
        "copy");
    return;
  }
  const auto space = strided<2>("copy", dst.sizes(), {&dst, &src});
  on.launched(kernels::cuda::copy(space, dst.raw(), scalar_of(dst), src.raw(), scalar_of(src),
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
  const cuda::Driver& api = cuda::driver();
  const auto to = reinterpret_cast<cuda::DevicePtr>(dst.raw()), from = reinterpret_cast<cuda::DevicePtr>(src.raw());
  if (to_device && from_device) cuda::order_after(on.stream(), cuda::current_stream(src.device().index));
  // The driver stages pageable memory itself, in order with the stream.
  cuda::check_driver(api.memcpy_async(to, from, bytes_of(dst), on.stream()), "copy");
  if (to_device && from_device) {
    cuda::order_after(cuda::current_stream(src.device().index), on.stream());
  } else if (!cuda::is_capturing(on.stream())) {
    cuda::check_driver(api.stream_synchronize(on.stream()), "copy");
  }
}

void copy_hook(const Tensor& dst, const Tensor& src) {
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

void zero_hook(void* data, std::size_t nbytes, Device device) {
  if (nbytes == 0) return;
  const OnDevice on("zero", device);
  cuda::check_driver(cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(data), 0, nbytes, on.stream()),
                     "zero");
}

void copy_bytes_hook(void* dst, Device dst_device, const void* src, Device src_device, std::size_t nbytes) {
  const auto n = static_cast<std::int64_t>(nbytes);
  const Tensor to(StorageRef::borrow(dst, nbytes, dst_device), 0, DType::kUInt8, {{n}}, {{1}});
  const Tensor from(StorageRef::borrow(const_cast<void*>(src), nbytes, src_device), 0, DType::kUInt8, {{n}}, {{1}});
  copy_hook(to, from);
}

constexpr DeviceHooks kHooks{allocate_hook, copy_hook, zero_hook, copy_bytes_hook};
[[maybe_unused]] const bool registered = [] {
  register_device(DeviceType::kCUDA, kHooks);
  return true;
}();

}  // namespace

TensorPtr contiguous_cuda(const Tensor& src) { return to_dtype_cuda(src, src.dtype()); }

TensorPtr to_dtype_cuda(const Tensor& src, DType dtype) {
  if (src.dtype() == dtype && src.is_contiguous()) return std::make_unique<Tensor>(src);
  TensorPtr out = Tensor::empty(src.sizes(), dtype, src.device());
  copy_on_device(*out, src);
  return out;
}

}  // namespace untorch::shims
