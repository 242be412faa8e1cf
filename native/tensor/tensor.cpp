// Allocation, views and shape arithmetic of tensors.
#include "tensor/tensor.h"

#include <algorithm>
#include <limits>

#include "tensor/device.h"
#include "tensor/host_memory.h"

namespace untorch {
std::string device_name(Device device) {
  const char* base = device.type == DeviceType::kCPU    ? "cpu"
                     : device.type == DeviceType::kCUDA ? "cuda"
                     : device.type == DeviceType::kMeta ? "meta"
                                                        : "device";
  if (device.type == DeviceType::kCPU || device.index < 0) return base;
  return std::string(base) + ":" + std::to_string(device.index);
}

StorageRef StorageRef::allocate(std::size_t nbytes, Device device) {
  if (device.type != DeviceType::kCPU) return device_table(device.type).allocate(nbytes, device);
  std::size_t capacity = 0;
  void* const data = allocate_host(nbytes, capacity);
  if (data == nullptr) throw_error(ErrorKind::kOutOfMemory, "out of memory: could not allocate ", nbytes, " bytes");
  return StorageRef(new Storage(
      data, nbytes, device,
      [](void* block, void* context) noexcept { free_host(block, reinterpret_cast<std::size_t>(context)); },
      reinterpret_cast<void*>(capacity)));
}

StorageRef StorageRef::borrow(void* data, std::size_t nbytes, Device device) {
  return StorageRef(new Storage(data, nbytes, device, nullptr, nullptr));
}

std::ostream& operator<<(std::ostream& out, const DimsText& text) {
  out << '[';
  for (std::size_t i = 0; i < text.dims.size(); ++i) out << (i == 0 ? "" : ", ") << text.dims[i];
  return out << ']';
}

DimsText::operator std::string() const { return detail::concat(*this); }
std::string operator+(const std::string& left, const DimsText& right) { return detail::concat(left, right); }
std::string operator+(const DimsText& left, const std::string& right) { return detail::concat(left, right); }

Dims contiguous_strides(DimSpan sizes) {
  Dims strides;
  strides.resize(sizes.size());
  std::int64_t running = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = running;
    running *= std::max<std::int64_t>(sizes[i], 1);
  }
  return strides;
}

std::int64_t checked_numel(DimSpan sizes) {
  std::int64_t numel = 1;
  for (const std::int64_t size : sizes) {
    check(size >= 0, "negative size in shape ", to_string(sizes));
    check(!__builtin_mul_overflow(numel, size, &numel), "shape ", to_string(sizes), " has too many elements");
  }
  return numel;
}

std::int64_t storage_extent(DimSpan sizes, DimSpan strides) {
  check(sizes.size() == strides.size(), "shape ", to_string(sizes), " and strides ", to_string(strides),
        " differ in length");
  if (checked_numel(sizes) == 0) return 0;
  std::int64_t extent = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    check(strides[i] >= 0, "negative stride in ", to_string(strides));
    std::int64_t reach = 0;
    check(!__builtin_mul_overflow(sizes[i] - 1, strides[i], &reach) && !__builtin_add_overflow(extent, reach, &extent),
          "strides ", to_string(strides), " of shape ", to_string(sizes), " reach too far");
  }
  return extent;
}

std::int64_t normalize_dim(std::int64_t dim, std::int64_t ndim, const char* op) {
  const std::int64_t bound = std::max<std::int64_t>(ndim, 1);
  check(dim >= -bound && dim < bound, op, ": dimension ", dim, " is out of range for a ", ndim, "-D tensor");
  return dim < 0 ? dim + bound : dim;
}

TensorPtr Tensor::empty(DimSpan sizes, DType dtype, Device device) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, device);
}

TensorPtr Tensor::empty_strided(DimSpan sizes, DimSpan strides, DType dtype, Device device) {
  const std::size_t itemsize = element_size(dtype);
  check(itemsize != 0, "cannot allocate a tensor of ", dtype_name(dtype));
  const auto extent = static_cast<std::uint64_t>(storage_extent(sizes, strides));
  std::uint64_t nbytes = 0;
  check(!__builtin_mul_overflow(extent, static_cast<std::uint64_t>(itemsize), &nbytes), "shape ", to_string(sizes),
        " needs too much memory");
  return std::make_unique<Tensor>(StorageRef::allocate(nbytes, device), 0, dtype, sizes, strides);
}

TensorPtr Tensor::view(DimSpan sizes, DimSpan strides, std::int64_t storage_offset) const {
  check(defined(), "cannot view an undefined tensor");
  check(storage_offset >= 0, "negative storage offset ", storage_offset);
  const std::int64_t extent = storage_extent(sizes, strides);
  const auto capacity = static_cast<std::int64_t>(storage_->nbytes() / element_size(dtype_));
  check(extent == 0 || (extent <= capacity && storage_offset <= capacity - extent), "view of shape ", to_string(sizes),
        ", strides ", to_string(strides), ", offset ", storage_offset, " leaves its storage of ", capacity,
        " elements of ", dtype_name(dtype_));
  return std::make_unique<Tensor>(storage_, storage_offset, dtype_, sizes, strides);
}

std::int64_t Tensor::size(std::int64_t d) const {
  check(dim() > 0, "a 0-D tensor has no sizes");
  return sizes_[static_cast<std::size_t>(normalize_dim(d, dim(), "size"))];
}

std::int64_t Tensor::stride(std::int64_t d) const {
  check(dim() > 0, "a 0-D tensor has no strides");
  return strides_[static_cast<std::size_t>(normalize_dim(d, dim(), "stride"))];
}

std::int64_t Tensor::numel() const noexcept {
  std::int64_t numel = 1;
  for (const std::int64_t size : sizes_) numel *= size;
  return numel;
}

bool Tensor::is_contiguous() const noexcept {
  std::int64_t expected = 1;
  if (numel() == 0) return true;
  for (std::size_t i = sizes_.size(); i-- > 0;) {
    if (sizes_[i] != 1 && strides_[i] != expected) return false;
    expected *= sizes_[i];
  }
  return true;
}

}  // namespace untorch
