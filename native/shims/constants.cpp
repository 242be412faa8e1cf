// Codes of devices, dtypes, layouts and memory formats, as functions (torch/csrc/inductor/aoti_torch/c/shim.h).
#include "shims/shim.h"

using untorch::DType;

#define UNTORCH_CODE(name, value) \
  extern "C" UNTORCH_EXPORT std::int32_t name() { return static_cast<std::int32_t>(value); }

UNTORCH_CODE(aoti_torch_device_type_cpu, 0)
UNTORCH_CODE(aoti_torch_device_type_cuda, 1)
UNTORCH_CODE(aoti_torch_device_type_meta, 14)
UNTORCH_CODE(aoti_torch_device_type_xpu, 12)
UNTORCH_CODE(aoti_torch_device_type_mps, 13)
UNTORCH_CODE(aoti_torch_device_type_privateuse1, 20)

UNTORCH_CODE(aoti_torch_dtype_float8_e5m2, DType::kFloat8E5M2)
UNTORCH_CODE(aoti_torch_dtype_float8_e4m3fn, DType::kFloat8E4M3FN)
UNTORCH_CODE(aoti_torch_dtype_float8_e5m2fnuz, DType::kFloat8E5M2FNUZ)
UNTORCH_CODE(aoti_torch_dtype_float8_e4m3fnuz, DType::kFloat8E4M3FNUZ)
UNTORCH_CODE(aoti_torch_dtype_float8_e8m0fnu, DType::kFloat8E8M0FNU)
UNTORCH_CODE(aoti_torch_dtype_float4_e2m1fn_x2, DType::kFloat4E2M1FNx2)
UNTORCH_CODE(torch_dtype_float8_e8m0fnu, DType::kFloat8E8M0FNU)
UNTORCH_CODE(torch_dtype_float4_e2m1fn_x2, DType::kFloat4E2M1FNx2)
UNTORCH_CODE(aoti_torch_dtype_bfloat16, DType::kBFloat16)
UNTORCH_CODE(aoti_torch_dtype_float16, DType::kFloat16)
UNTORCH_CODE(aoti_torch_dtype_float32, DType::kFloat32)
UNTORCH_CODE(aoti_torch_dtype_float64, DType::kFloat64)
UNTORCH_CODE(aoti_torch_dtype_uint8, DType::kUInt8)
UNTORCH_CODE(aoti_torch_dtype_uint16, DType::kUInt16)
UNTORCH_CODE(aoti_torch_dtype_uint32, DType::kUInt32)
UNTORCH_CODE(aoti_torch_dtype_uint64, DType::kUInt64)
UNTORCH_CODE(aoti_torch_dtype_int8, DType::kInt8)
UNTORCH_CODE(aoti_torch_dtype_int16, DType::kInt16)
UNTORCH_CODE(aoti_torch_dtype_int32, DType::kInt32)
UNTORCH_CODE(aoti_torch_dtype_int64, DType::kInt64)
UNTORCH_CODE(aoti_torch_dtype_bool, DType::kBool)
UNTORCH_CODE(aoti_torch_dtype_complex32, DType::kComplex32)
UNTORCH_CODE(aoti_torch_dtype_complex64, DType::kComplex64)
UNTORCH_CODE(aoti_torch_dtype_complex128, DType::kComplex128)

UNTORCH_CODE(aoti_torch_layout_strided, 0)
UNTORCH_CODE(aoti_torch_layout_sparse_coo, 1)
UNTORCH_CODE(aoti_torch_layout_sparse_csr, 2)
UNTORCH_CODE(aoti_torch_layout__mkldnn, 3)
UNTORCH_CODE(aoti_torch_layout_sparse_csc, 4)
UNTORCH_CODE(aoti_torch_layout_sparse_bsr, 5)
UNTORCH_CODE(aoti_torch_layout_sparse_bsc, 6)
UNTORCH_CODE(aoti_torch_layout_jagged, 7)

UNTORCH_CODE(aoti_torch_memory_format_contiguous_format, 0)
UNTORCH_CODE(aoti_torch_memory_format_preserve_format, 1)
UNTORCH_CODE(aoti_torch_memory_format_channels_last, 2)
UNTORCH_CODE(aoti_torch_memory_format_channels_last_3d, 3)

extern "C" {

UNTORCH_EXPORT std::size_t aoti_torch_dtype_element_size(std::int32_t dtype) {
  return untorch::element_size(static_cast<DType>(dtype));
}

// The libtorch whose interface these shims follow, in PyTorch's encoding (major, minor, patch in the top
// bytes): 2.15.0.
UNTORCH_EXPORT std::uint64_t aoti_torch_abi_version() { return (std::uint64_t{2} << 56) | (std::uint64_t{15} << 48); }

}  // extern "C"
