// Tensor handles: creation, views, queries, copies (torch/csrc/inductor/aoti_torch/c/shim.h).
#include <cstdio>

#include "base/interrupt.h"
#include "cuda/device.h"
#include "cuda/memory_pool.h"
#include "cuda/pinned_pool.h"
#include "shims/handles.h"
#include "shims/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// Bytes of the storage from its first to the last element that sizes, strides and offset reach.
std::size_t blob_bytes(DimSpan sizes, DimSpan strides, std::int64_t offset, DType dtype) {
  check(is_known(dtype), "unknown dtype code ", static_cast<int>(dtype));
  check(offset >= 0, "negative storage offset ", offset);
  const std::int64_t extent = storage_extent(sizes, strides);
  if (extent == 0) return 0;  // wherever it begins: an empty tensor may have an offset and no memory
  std::int64_t elements = 0, bytes = 0;
  check(!__builtin_add_overflow(extent, offset, &elements) &&
            !__builtin_mul_overflow(elements, static_cast<std::int64_t>(element_size(dtype)), &bytes),
        "shape ", to_string(sizes), " needs too much memory");
  return static_cast<std::size_t>(bytes);
}

TensorPtr from_blob(void* data, std::int64_t ndim, const std::int64_t* sizes, const std::int64_t* strides,
                    std::int64_t offset, std::int32_t dtype, std::int32_t device_type, std::int32_t device_index,
                    Storage::Deleter deleter = nullptr, void* context = nullptr) {
  const DimSpan size_span = ints(sizes, ndim), stride_span = ints(strides, ndim);
  const std::size_t bytes = blob_bytes(size_span, stride_span, offset, static_cast<DType>(dtype));
  check(data != nullptr || bytes == 0, "data pointer is null");
  const Device device{static_cast<DeviceType>(device_type), device_index};
  StorageRef storage(new Storage(data, bytes, device, deleter, context));
  return std::make_unique<Tensor>(std::move(storage), offset, static_cast<DType>(dtype), size_span, stride_span);
}

}  // namespace

std::unordered_set<Tensor*>*& untorch::shims::HandleTracker::current() noexcept {
  thread_local std::unordered_set<Tensor*>* handles = nullptr;
  return handles;
}

UNTORCH_SHIM aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  if (auto* tracked = HandleTracker::current(); tracked != nullptr) [[unlikely]]
    tracked->erase(unwrap(tensor));
  delete unwrap(tensor);
  return 0;
}

UNTORCH_SHIM aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** ret) {
  return guarded("get_data_ptr", [&] {
    const Tensor& t = required(tensor, "get_data_ptr", "tensor");
    *ret = t.defined() && t.storage()->data() != nullptr ? t.raw() : nullptr;
  });
}

UNTORCH_SHIM torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** ret) {
  return aoti_torch_get_data_ptr(tensor, ret);
}

UNTORCH_SHIM torch_get_const_data_ptr(AtenTensorHandle tensor, const void** ret) {
  void* data = nullptr;
  const AOTITorchError code = aoti_torch_get_data_ptr(tensor, &data);
  if (code == 0) *ret = data;
  return code;
}

UNTORCH_SHIM aoti_torch_get_storage_size(AtenTensorHandle tensor, std::int64_t* ret) {
  return guarded("get_storage_size", [&] {
    const Tensor& t = required(tensor, "get_storage_size", "tensor");
    *ret = t.defined() ? static_cast<std::int64_t>(t.storage()->nbytes()) : 0;
  });
}

UNTORCH_SHIM aoti_torch_get_storage_numel(AtenTensorHandle tensor, std::int64_t* ret) {
  return guarded("get_storage_numel", [&] {
    const Tensor& t = required(tensor, "get_storage_numel", "tensor");
    *ret = t.defined() ? static_cast<std::int64_t>(t.storage()->nbytes() / element_size(t.dtype())) : 0;
  });
}

UNTORCH_SHIM aoti_torch_get_dim(AtenTensorHandle tensor, std::int64_t* ret) {
  return guarded("get_dim", [&] { *ret = required(tensor, "get_dim", "tensor").dim(); });
}

UNTORCH_SHIM aoti_torch_get_numel(AtenTensorHandle tensor, std::int64_t* ret) {
  return guarded("get_numel", [&] { *ret = required(tensor, "get_numel", "tensor").numel(); });
}

UNTORCH_SHIM aoti_torch_get_sizes(AtenTensorHandle tensor, std::int64_t** ret) {
  return guarded("get_sizes", [&] { *ret = required(tensor, "get_sizes", "tensor").mutable_sizes().data(); });
}

UNTORCH_SHIM aoti_torch_get_size(AtenTensorHandle tensor, std::int64_t d, std::int64_t* ret) {
  return guarded("get_size", [&] { *ret = required(tensor, "get_size", "tensor").size(d); });
}

UNTORCH_SHIM aoti_torch_get_strides(AtenTensorHandle tensor, std::int64_t** ret) {
  return guarded("get_strides", [&] { *ret = required(tensor, "get_strides", "tensor").mutable_strides().data(); });
}

UNTORCH_SHIM aoti_torch_get_stride(AtenTensorHandle tensor, std::int64_t d, std::int64_t* ret) {
  return guarded("get_stride", [&] { *ret = required(tensor, "get_stride", "tensor").stride(d); });
}

UNTORCH_SHIM aoti_torch_get_dtype(AtenTensorHandle tensor, std::int32_t* ret) {
  return guarded("get_dtype",
                 [&] { *ret = static_cast<std::int32_t>(required(tensor, "get_dtype", "tensor").dtype()); });
}

UNTORCH_SHIM aoti_torch_get_device_type(AtenTensorHandle tensor, std::int32_t* ret) {
  return guarded("get_device_type", [&] {
    *ret = static_cast<std::int32_t>(required(tensor, "get_device_type", "tensor").device().type);
  });
}

UNTORCH_SHIM aoti_torch_get_device_index(AtenTensorHandle tensor, std::int32_t* ret) {
  return guarded("get_device_index", [&] { *ret = required(tensor, "get_device_index", "tensor").device().index; });
}

UNTORCH_SHIM aoti_torch_get_layout(AtenTensorHandle tensor, std::int32_t* ret) {
  return guarded("get_layout", [&] {
    required(tensor, "get_layout", "tensor");
    *ret = 0;  // every tensor here is strided
  });
}

UNTORCH_SHIM aoti_torch_get_storage_offset(AtenTensorHandle tensor, std::int64_t* ret) {
  return guarded("get_storage_offset",
                 [&] { *ret = required(tensor, "get_storage_offset", "tensor").storage_offset(); });
}

UNTORCH_SHIM aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* ret) {
  return guarded("is_contiguous", [&] { *ret = required(tensor, "is_contiguous", "tensor").is_contiguous(); });
}

UNTORCH_SHIM aoti_torch_is_defined(AtenTensorHandle tensor, bool* ret) {
  return guarded("is_defined", [&] { *ret = required(tensor, "is_defined", "tensor").defined(); });
}

UNTORCH_SHIM torch_has_storage(AtenTensorHandle tensor, bool* ret) {
  return guarded("has_storage", [&] { *ret = required(tensor, "has_storage", "tensor").defined(); });
}

UNTORCH_SHIM aoti_torch_new_tensor_handle(AtenTensorHandle orig, AtenTensorHandle* ret) {
  return guarded("new_tensor_handle", [&] {
    give(ret, std::make_unique<Tensor>(required(orig, "new_tensor_handle", "orig_handle")), "new_tensor_handle");
    if (auto* tracked = HandleTracker::current(); tracked != nullptr) [[unlikely]]
      tracked->insert(unwrap(*ret));
  });
}

UNTORCH_SHIM aoti_torch_new_uninitialized_tensor(AtenTensorHandle* ret) {
  return guarded("new_uninitialized_tensor",
                 [&] { give(ret, std::make_unique<Tensor>(), "new_uninitialized_tensor"); });
}

UNTORCH_SHIM aoti_torch__alloc_from_pool(AtenTensorHandle self, std::int64_t offset_bytes, std::int32_t dtype,
                                         std::int64_t ndim, const std::int64_t* sizes, const std::int64_t* strides,
                                         AtenTensorHandle* ret) {
  return guarded("_alloc_from_pool", [&] {
    const Tensor& pool = required(self, "_alloc_from_pool", "self");
    const auto type = static_cast<DType>(dtype);
    check(is_known(type), "unknown dtype code ", dtype);
    const auto itemsize = static_cast<std::int64_t>(element_size(type));
    check(pool.defined(), "pool is undefined");
    check(offset_bytes >= 0 && offset_bytes % itemsize == 0, "offset ", offset_bytes, " is no multiple of ", itemsize);
    Tensor typed(pool.storage(), 0, type, {}, {});
    give(ret, typed.view(ints(sizes, ndim), ints(strides, ndim), offset_bytes / itemsize), "_alloc_from_pool");
  });
}

UNTORCH_SHIM aoti_torch__reinterpret_tensor(AtenTensorHandle self, std::int64_t ndim, const std::int64_t* sizes,
                                            const std::int64_t* strides, std::int64_t offset_increment,
                                            AtenTensorHandle* ret) {
  return guarded("_reinterpret_tensor", [&] {
    const Tensor& t = required(self, "_reinterpret_tensor", "self");
    give(ret, t.view(ints(sizes, ndim), ints(strides, ndim), t.storage_offset() + offset_increment),
         "_reinterpret_tensor");
  });
}

UNTORCH_SHIM aoti_torch_as_strided(AtenTensorHandle self, const std::int64_t* sizes, const std::int64_t* strides,
                                   AtenTensorHandle* ret) {
  return guarded("as_strided", [&] {
    // The rank is the tensor's own: the function has no argument for it.
    const Tensor& t = required(self, "as_strided", "self");
    give(ret, t.view(ints(sizes, t.dim()), ints(strides, t.dim()), t.storage_offset()), "as_strided");
  });
}

UNTORCH_SHIM aoti_torch_empty_strided(std::int64_t ndim, const std::int64_t* sizes, const std::int64_t* strides,
                                      std::int32_t dtype, std::int32_t device_type, std::int32_t device_index,
                                      AtenTensorHandle* ret) {
  return guarded("empty_strided", [&] {
    check_interrupt();
    give(ret,
         Tensor::empty_strided(ints(sizes, ndim), ints(strides, ndim), static_cast<DType>(dtype),
                               {static_cast<DeviceType>(device_type), device_index}),
         "empty_strided");
  });
}

UNTORCH_SHIM aoti_torch_empty_strided_pinned(std::int64_t ndim, const std::int64_t* sizes, const std::int64_t* strides,
                                             std::int32_t dtype, std::int32_t device_type, std::int32_t device_index,
                                             AtenTensorHandle* ret) {
  return guarded("empty_strided_pinned", [&] {
    check(device_type == static_cast<std::int32_t>(DeviceType::kCPU), "empty_strided_pinned: the device is ",
          device_name({static_cast<DeviceType>(device_type), device_index}), ", expected cpu");
    const DimSpan size_span = ints(sizes, ndim), stride_span = ints(strides, ndim);
    const std::size_t bytes = blob_bytes(size_span, stride_span, 0, static_cast<DType>(dtype));
    // Without a GPU nothing needs pinned memory: it is pageable.
    StorageRef storage = cuda::try_driver(nullptr) != nullptr ? cuda::allocate_pinned(bytes, cuda::current_device())
                                                              : StorageRef::allocate(bytes);
    give(ret, std::make_unique<Tensor>(std::move(storage), 0, static_cast<DType>(dtype), size_span, stride_span),
         "empty_strided_pinned");
  });
}

UNTORCH_SHIM aoti_torch_create_tensor_from_blob(void* data, std::int64_t ndim, const std::int64_t* sizes,
                                                const std::int64_t* strides, std::int64_t offset, std::int32_t dtype,
                                                std::int32_t device_type, std::int32_t device_index,
                                                AtenTensorHandle* ret) {
  return guarded("create_tensor_from_blob", [&] {
    give(ret, from_blob(data, ndim, sizes, strides, offset, dtype, device_type, device_index),
         "create_tensor_from_blob");
  });
}

UNTORCH_SHIM aoti_torch_create_tensor_from_blob_v2(void* data, std::int64_t ndim, const std::int64_t* sizes,
                                                   const std::int64_t* strides, std::int64_t offset, std::int32_t dtype,
                                                   std::int32_t device_type, std::int32_t device_index,
                                                   AtenTensorHandle* ret, std::int32_t layout,
                                                   const std::uint8_t* opaque_metadata,
                                                   std::int64_t opaque_metadata_size) {
  (void)opaque_metadata;
  return guarded("create_tensor_from_blob", [&] {
    if (layout != 0 || opaque_metadata_size != 0) {
      throw_error(ErrorKind::kUnsupported, "create_tensor_from_blob: a constant has layout ", layout,
                  " (weights packed by oneDNN with freezing=True); untorch serves strided weights only: compile "
                  "without freezing");
    }
    give(ret, from_blob(data, ndim, sizes, strides, offset, dtype, device_type, device_index),
         "create_tensor_from_blob");
  });
}

UNTORCH_SHIM torch_from_blob(void* data, std::int64_t ndim, const std::int64_t* sizes, const std::int64_t* strides,
                             std::int64_t offset, std::int32_t dtype, std::int32_t device_type,
                             std::int32_t device_index, AtenTensorHandle* ret, std::int32_t layout, const std::uint8_t*,
                             std::int64_t opaque_metadata_size, void (*deleter)(void* data, void* context),
                             void* context) {
  return guarded("from_blob", [&] {
    check(layout == 0 && opaque_metadata_size == 0, "only strided tensors are supported, got layout ", layout);
    struct Owner {
      void (*deleter)(void*, void*);
      void* context;
    };
    Storage::Deleter release = nullptr;
    std::unique_ptr<Owner> owner;
    if (deleter != nullptr) {
      owner = std::make_unique<Owner>(Owner{deleter, context});
      release = [](void* blob, void* opaque) noexcept {
        const std::unique_ptr<Owner> held(static_cast<Owner*>(opaque));
        held->deleter(blob, held->context);
      };
    }
    give(ret, from_blob(data, ndim, sizes, strides, offset, dtype, device_type, device_index, release, owner.get()),
         "from_blob");
    (void)owner.release();
  });
}

UNTORCH_SHIM aoti_torch_assign_tensors(AtenTensorHandle src, AtenTensorHandle dst) {
  return guarded("assign_tensors",
                 [&] { required(dst, "assign_tensors", "dst") = required(src, "assign_tensors", "src"); });
}

UNTORCH_SHIM aoti_torch_assign_tensors_out(AtenTensorHandle src, AtenTensorHandle* ret) {
  return guarded("assign_tensors_out", [&] {
    give(ret, std::make_unique<Tensor>(required(src, "assign_tensors_out", "src")), "assign_tensors_out");
  });
}

UNTORCH_SHIM aoti_torch_clone(AtenTensorHandle self, AtenTensorHandle* ret) {
  return guarded("clone", [&] {
    const Tensor& t = input(self, "clone", "self");
    // PyTorch's clone keeps the strides of a dense tensor and makes any other row-major.
    const bool dense = t.numel() == storage_extent(t.sizes(), t.strides());
    TensorPtr out = dense ? Tensor::empty_strided(t.sizes(), t.strides(), t.dtype(), t.device())
                          : Tensor::empty(t.sizes(), t.dtype(), t.device());
    copy(*out, t);
    give(ret, std::move(out), "clone");
  });
}

UNTORCH_SHIM aoti_torch_clone_preserve_strides(AtenTensorHandle self, AtenTensorHandle* ret) {
  return guarded("clone_preserve_strides", [&] {
    const Tensor& t = input(self, "clone_preserve_strides", "self");
    TensorPtr out = Tensor::empty_strided(t.sizes(), t.strides(), t.dtype(), t.device());
    // Overlapping strides (an expanded tensor) are copied as the memory that they reach.
    const std::size_t nbytes = out->storage()->nbytes();
    copy_bytes(out->raw(), out->device(), t.raw(), t.device(), nbytes);
    give(ret, std::move(out), "clone_preserve_strides");
  });
}

UNTORCH_SHIM aoti_torch_copy_(AtenTensorHandle self, AtenTensorHandle src, std::int32_t) {
  return guarded("copy_", [&] { copy(input(self, "copy_", "self"), input(src, "copy_", "src")); });
}

UNTORCH_SHIM aoti_torch_tensor_copy_(AtenTensorHandle src, AtenTensorHandle dst) {
  return aoti_torch_copy_(dst, src, 0);
}

UNTORCH_SHIM aoti_torch_zero_(AtenTensorHandle self) {
  return guarded("zero_", [&] {
    const Tensor& t = input(self, "zero_", "self");
    copy(t, *Tensor::zeros({}, t.dtype(), t.device()));
  });
}

UNTORCH_SHIM torch_set_requires_grad(AtenTensorHandle tensor, bool) {
  return guarded("set_requires_grad", [&] { required(tensor, "set_requires_grad", "tensor"); });
}
