// The DLPack structures (dmlc/dlpack 1.3), as far as the exchange of CPU and CUDA arrays needs them.
#pragma once

#include <cstdint>

namespace untorch::python {

enum : std::int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };
enum : std::uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLComplex = 5, kDLBool = 6 };
constexpr std::uint64_t kDLReadOnly = 1, kDLIsCopied = 2;

struct DLDevice {
  std::int32_t device_type, device_id;
};
struct DLDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null: row-major
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};
struct DLManagedTensorVersioned {
  std::uint32_t major, minor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor dl_tensor;
};

// The functions of a type's __dlpack_c_exchange_api__, a capsule of this name. What starts with another major version
// is laid out otherwise behind `previous`. They return 0, or set a Python exception.
inline constexpr char kDLExchangeName[] = "dlpack_exchange_api";
struct DLExchange {
  std::uint32_t major, minor;
  const DLExchange* previous;  // of another major version
  void* allocate;
  int (*managed_from_object)(void* object, DLManagedTensorVersioned** out);  // orders no streams
  void* managed_to_object;
  void* borrowed_from_object;
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

}  // namespace untorch::python
