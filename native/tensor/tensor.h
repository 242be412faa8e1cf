// Strided tensors over reference-counted storage. Knows no device library: device memory arrives with its deleter.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/half.h"
#include "base/small_vector.h"

namespace untorch {

// PyTorch's DeviceType codes.
enum class DeviceType : std::int32_t { kCPU = 0, kCUDA = 1, kMeta = 14 };

struct Device {
  DeviceType type = DeviceType::kCPU;
  std::int32_t index = -1;  // -1: the only one (CPU) or the current one
  bool operator==(const Device&) const = default;
};
std::string device_name(Device device);

struct DequantizedWeight;

// A block of memory and what frees it. Shared by every tensor that views it.
class Storage {
 public:
  using Deleter = void (*)(void* data, void* context) noexcept;

  // Takes over `data`; `deleter` (may be null: borrowed memory) runs when the last reference goes.
  // `read_only` memory must not be offered to callers for writing.
  Storage(void* data, std::size_t nbytes, Device device, Deleter deleter, void* context,
          bool read_only = false) noexcept
      : data_(data), nbytes_(nbytes), device_(device), read_only_(read_only), deleter_(deleter), context_(context) {}
  ~Storage() {
    if (deleter_ != nullptr) deleter_(data_, context_);
  }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const noexcept { return data_; }
  std::size_t nbytes() const noexcept { return nbytes_; }
  Device device() const noexcept { return device_; }
  // True for memory that this storage does not own.
  bool borrowed() const noexcept { return deleter_ == nullptr; }
  bool read_only() const noexcept { return read_only_; }
  // How many references there are.
  std::int64_t use_count() const noexcept { return references_.load(std::memory_order_acquire); }
  // The dequantized copy of a packed weight (dequantized_weight.h), or null. Set once, before the storage is shared.
  const DequantizedWeight* dequantized() const noexcept { return dequantized_.get(); }
  void set_dequantized(std::shared_ptr<const DequantizedWeight> dequantized) noexcept {
    dequantized_ = std::move(dequantized);
  }

 private:
  friend class StorageRef;
  std::atomic<std::int64_t> references_{1};
  void* data_;
  std::size_t nbytes_;
  Device device_;
  bool read_only_;
  Deleter deleter_;
  void* context_;
  std::shared_ptr<const DequantizedWeight> dequantized_;
};

// Intrusive pointer to a Storage.
class StorageRef {
 public:
  StorageRef() = default;
  explicit StorageRef(Storage* adopted) noexcept : storage_(adopted) {}
  StorageRef(const StorageRef& other) noexcept : storage_(other.storage_) {
    if (storage_ != nullptr) storage_->references_.fetch_add(1, std::memory_order_relaxed);
  }
  StorageRef(StorageRef&& other) noexcept : storage_(std::exchange(other.storage_, nullptr)) {}
  StorageRef& operator=(StorageRef other) noexcept {
    std::swap(storage_, other.storage_);
    return *this;
  }
  ~StorageRef() {
    if (storage_ != nullptr && storage_->references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete storage_;
  }
  Storage* get() const noexcept { return storage_; }
  Storage* operator->() const noexcept { return storage_; }
  explicit operator bool() const noexcept { return storage_ != nullptr; }

  // New memory, 64-byte aligned, uninitialised; data() is never null. Throws kOutOfMemory with the size asked for.
  static StorageRef allocate(std::size_t nbytes, Device device = {});
  // Memory that the caller owns and keeps alive.
  static StorageRef borrow(void* data, std::size_t nbytes, Device device = {});

 private:
  Storage* storage_ = nullptr;
};

// Sizes or strides. Up to six stay inside the tensor; the address of data() is stable while the tensor lives.
using Dims = SmallVector<std::int64_t, 6>;

// "[2, 3]", formatted lazily: checks name shapes in their texts, and a check that passes must cost nothing.
struct DimsText {
  std::span<const std::int64_t> dims;
  operator std::string() const;  // NOLINT(google-explicit-constructor)
  bool operator==(const DimsText& other) const {
    return std::equal(dims.begin(), dims.end(), other.dims.begin(), other.dims.end());
  }
};
std::ostream& operator<<(std::ostream& out, const DimsText& text);
std::string operator+(const std::string& left, const DimsText& right);
std::string operator+(const DimsText& left, const std::string& right);
inline DimsText to_string(std::span<const std::int64_t> dims) { return {dims}; }

class Tensor;
using TensorPtr = std::unique_ptr<Tensor>;
using DimSpan = std::span<const std::int64_t>;

// The object behind an AtenTensorHandle. A default-constructed tensor is undefined (no storage).
// Copying a Tensor makes another handle on the same storage.
class Tensor {
 public:
  Tensor() noexcept { live_.fetch_add(1, std::memory_order_relaxed); }
  Tensor(StorageRef storage, std::int64_t storage_offset, DType dtype, DimSpan sizes, DimSpan strides)
      : storage_(std::move(storage)), storage_offset_(storage_offset), dtype_(dtype), sizes_(sizes), strides_(strides) {
    live_.fetch_add(1, std::memory_order_relaxed);
  }
  Tensor(const Tensor& other)
      : storage_(other.storage_),
        storage_offset_(other.storage_offset_),
        dtype_(other.dtype_),
        sizes_(other.sizes_),
        strides_(other.strides_) {
    live_.fetch_add(1, std::memory_order_relaxed);
  }
  Tensor& operator=(const Tensor&) = default;
  ~Tensor() { live_.fetch_sub(1, std::memory_order_relaxed); }

  // Uninitialised, row-major.
  static TensorPtr empty(DimSpan sizes, DType dtype, Device device = {});
  // Uninitialised with these strides (elements, not negative); the storage is just big enough.
  static TensorPtr empty_strided(DimSpan sizes, DimSpan strides, DType dtype, Device device = {});
  static TensorPtr zeros(DimSpan sizes, DType dtype, Device device = {});
  // A 0-dimensional tensor of one value.
  template <class T>
  static TensorPtr scalar(T value, DType dtype) {
    TensorPtr out = empty(DimSpan{}, dtype);
    std::memcpy(out->raw(), &value, sizeof value);
    return out;
  }
  // Another view of the same storage; sizes, strides and offset in elements. Refuses one that leaves the storage.
  TensorPtr view(DimSpan sizes, DimSpan strides, std::int64_t storage_offset) const;

  bool defined() const noexcept { return static_cast<bool>(storage_); }
  DType dtype() const noexcept { return dtype_; }
  Device device() const noexcept { return storage_ ? storage_->device() : Device{}; }
  std::int64_t dim() const noexcept { return static_cast<std::int64_t>(sizes_.size()); }
  const Dims& sizes() const noexcept { return sizes_; }
  const Dims& strides() const noexcept { return strides_; }
  Dims& mutable_sizes() noexcept { return sizes_; }
  Dims& mutable_strides() noexcept { return strides_; }
  std::int64_t size(std::int64_t d) const;    // negative d counts from the end
  std::int64_t stride(std::int64_t d) const;  // likewise
  std::int64_t numel() const noexcept;
  std::int64_t storage_offset() const noexcept { return storage_offset_; }
  const StorageRef& storage() const noexcept { return storage_; }
  bool is_contiguous() const noexcept;  // row-major; strides of dimensions of size 1 do not count

  // Address of the first element. data<T>() does not check that T is the dtype.
  void* raw() const noexcept {
    return static_cast<std::byte*>(storage_->data()) +
           storage_offset_ * static_cast<std::int64_t>(element_size(dtype_));
  }
  template <class T>
  T* data() const noexcept {
    return static_cast<T*>(raw());
  }

  // Handles alive in the process, for leak tests.
  static std::int64_t live() noexcept { return live_.load(std::memory_order_relaxed); }

 private:
  inline static std::atomic<std::int64_t> live_{0};
  StorageRef storage_;
  std::int64_t storage_offset_ = 0;
  DType dtype_ = DType::kFloat32;
  Dims sizes_, strides_;
};

Dims contiguous_strides(DimSpan sizes);
// Product of the sizes; throws kInvalidArgument on a negative size or an overflow.
std::int64_t checked_numel(DimSpan sizes);
// Elements from the first to one past the last that the strides reach; 0 for an empty tensor. Checks as above.
std::int64_t storage_extent(DimSpan sizes, DimSpan strides);
// Wraps a negative dimension and checks it: normalize_dim(-1, 3, "sort") is 2. A 0-D tensor accepts -1 and 0.
std::int64_t normalize_dim(std::int64_t dim, std::int64_t ndim, const char* op);

}  // namespace untorch
