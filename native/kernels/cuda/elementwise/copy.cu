// Strided copies with conversion, and fills: grid-stride loops. Dense runs of one dtype are moved as 16-byte vectors,
// one a thread; strided and converted ones one element a thread, a warp on 32 neighbours of the destination:
//
//   dense    | 16 B | 16 B | 16 B | …     strided   dst  0 1 2 … 31    contiguous, a warp
//              t 0    t 1    t 2                    src  0 s 2s … 31s
//
// Roofline: bound by memory. Bytes: every element read once and written once; no arithmetic.
#include <cuda_fp8.h>

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/elementwise/copy.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) copy_same(Strided<2> space, T* dst, const T* src) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < space.numel; i += step) {
    std::int64_t at[2];
    offsets(space, i, at);
    dst[at[0]] = src[at[1]];
  }
}

// A value of any dtype, wide enough to lose nothing: integers in `whole`, the rest in `real` and `imaginary`.
struct Wide {
  enum Kind { kWhole, kUnsigned, kReal } kind;
  std::int64_t whole;
  double real, imaginary;
};

__device__ __forceinline__ Wide whole(std::int64_t value) { return {Wide::kWhole, value, 0, 0}; }
__device__ __forceinline__ Wide real(double value, double imaginary = 0) { return {Wide::kReal, 0, value, imaginary}; }

__device__ __forceinline__ Wide load(const void* base, std::int64_t i, DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return whole(static_cast<const std::uint8_t*>(base)[i]);
    case DType::kInt8:
      return whole(static_cast<const std::int8_t*>(base)[i]);
    case DType::kInt16:
      return whole(static_cast<const std::int16_t*>(base)[i]);
    case DType::kInt32:
      return whole(static_cast<const std::int32_t*>(base)[i]);
    case DType::kInt64:
      return whole(static_cast<const std::int64_t*>(base)[i]);
    case DType::kUInt16:
      return whole(static_cast<const std::uint16_t*>(base)[i]);
    case DType::kUInt32:
      return whole(static_cast<const std::uint32_t*>(base)[i]);
    case DType::kUInt64:
      return {Wide::kUnsigned, static_cast<std::int64_t>(static_cast<const std::uint64_t*>(base)[i]), 0, 0};
    case DType::kBool:
      return whole(static_cast<const std::uint8_t*>(base)[i] != 0);
    case DType::kFloat16:
      return real(__half2float(static_cast<const __half*>(base)[i]));
    case DType::kBFloat16:
      return real(__bfloat162float(static_cast<const __nv_bfloat16*>(base)[i]));
    case DType::kFloat32:
      return real(static_cast<const float*>(base)[i]);
    case DType::kFloat64:
      return real(static_cast<const double*>(base)[i]);
    case DType::kFloat8E4M3FN:
      return real(static_cast<float>(static_cast<const __nv_fp8_e4m3*>(base)[i]));
    case DType::kFloat8E5M2:
      return real(static_cast<float>(static_cast<const __nv_fp8_e5m2*>(base)[i]));
    case DType::kComplex64: {
      const auto* p = static_cast<const float*>(base) + 2 * i;
      return real(p[0], p[1]);
    }
    case DType::kComplex128: {
      const auto* p = static_cast<const double*>(base) + 2 * i;
      return real(p[0], p[1]);
    }
  }
  return whole(0);
}

__device__ __forceinline__ double to_double(const Wide& v) {
  return v.kind == Wide::kReal    ? v.real
         : v.kind == Wide::kWhole ? static_cast<double>(v.whole)
                                  : static_cast<double>(static_cast<std::uint64_t>(v.whole));
}
// Integers go to float in one rounding, not through double.
__device__ __forceinline__ float to_float(const Wide& v) {
  return v.kind == Wide::kReal    ? static_cast<float>(v.real)
         : v.kind == Wide::kWhole ? static_cast<float>(v.whole)
                                  : static_cast<float>(static_cast<std::uint64_t>(v.whole));
}
// Narrower integers take the low bits of the 64-bit value, as C++ does on the CPU.
__device__ __forceinline__ std::int64_t to_whole(const Wide& v) {
  return v.kind == Wide::kReal ? static_cast<std::int64_t>(v.real) : v.whole;
}

__device__ __forceinline__ void store(void* base, std::int64_t i, DType dtype, const Wide& v) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
      static_cast<std::int8_t*>(base)[i] = static_cast<std::int8_t>(to_whole(v));
      break;
    case DType::kInt16:
    case DType::kUInt16:
      static_cast<std::int16_t*>(base)[i] = static_cast<std::int16_t>(to_whole(v));
      break;
    case DType::kInt32:
    case DType::kUInt32:
      static_cast<std::int32_t*>(base)[i] = static_cast<std::int32_t>(to_whole(v));
      break;
    case DType::kInt64:
      static_cast<std::int64_t*>(base)[i] = to_whole(v);
      break;
    case DType::kUInt64:
      static_cast<std::uint64_t*>(base)[i] = v.kind == Wide::kReal && v.real >= 9.2e18
                                                 ? static_cast<std::uint64_t>(v.real)
                                                 : static_cast<std::uint64_t>(to_whole(v));
      break;
    case DType::kBool:
      static_cast<std::uint8_t*>(base)[i] = v.kind == Wide::kReal ? v.real != 0 || v.imaginary != 0 : v.whole != 0;
      break;
    case DType::kFloat16:
      static_cast<__half*>(base)[i] = __float2half_rn(to_float(v));
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(base)[i] = __float2bfloat16_rn(to_float(v));
      break;
    case DType::kFloat32:
      static_cast<float*>(base)[i] = to_float(v);
      break;
    case DType::kFloat64:
      static_cast<double*>(base)[i] = to_double(v);
      break;
    case DType::kFloat8E4M3FN:
      static_cast<__nv_fp8_e4m3*>(base)[i] = __nv_fp8_e4m3(to_float(v));
      break;
    case DType::kFloat8E5M2:
      static_cast<__nv_fp8_e5m2*>(base)[i] = __nv_fp8_e5m2(to_float(v));
      break;
    case DType::kComplex64: {
      auto* p = static_cast<float*>(base) + 2 * i;
      p[0] = to_float(v);
      p[1] = static_cast<float>(v.imaginary);
      break;
    }
    case DType::kComplex128: {
      auto* p = static_cast<double*>(base) + 2 * i;
      p[0] = to_double(v);
      p[1] = v.imaginary;
      break;
    }
  }
}

// The dtypes are the same for every thread, so the switches cost a jump and no divergence.
__global__ void __launch_bounds__(kThreads)
    copy_convert(Strided<2> space, void* dst, DType dst_dtype, const void* src, DType src_dtype) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < space.numel; i += step) {
    std::int64_t at[2];
    offsets(space, i, at);
    store(dst, at[0], dst_dtype, load(src, at[1], src_dtype));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) fill_all(Strided<1> space, T* dst, T value) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < space.numel; i += step) {
    std::int64_t at[1];
    offsets(space, i, at);
    dst[at[0]] = value;
  }
}

bool aligned(const void* p, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; }

}  // namespace

int copy(const Strided<2>& space, void* dst, DType dst_dtype, const void* src, DType src_dtype, int element_bytes,
         Stream stream) {
  if (space.numel == 0) return 0;
  const unsigned blocks = blocks_for(space.numel, kThreads);
  if (dst_dtype != src_dtype) {
    copy_convert<<<blocks, kThreads, 0, stream>>>(space, dst, dst_dtype, src, src_dtype);
    return cudaGetLastError();
  }
  // One dense run: as wide as the addresses and the length allow.
  if (space.contiguous()) {
    const std::int64_t bytes = space.numel * element_bytes;
    if (bytes % 16 == 0 && aligned(dst, 16) && aligned(src, 16)) {
      Strided<2> wide = space;
      wide.numel = wide.sizes[0] = bytes / 16;
      copy_same<<<blocks_for(wide.numel, kThreads), kThreads, 0, stream>>>(wide, static_cast<Bits<16>*>(dst),
                                                                           static_cast<const Bits<16>*>(src));
      return cudaGetLastError();
    }
  }
  return dispatch_bytes(element_bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    copy_same<<<blocks, kThreads, 0, stream>>>(space, static_cast<T*>(dst), static_cast<const T*>(src));
    return cudaGetLastError();
  });
}

int fill(const Strided<1>& space, void* dst, const void* value, int element_bytes, Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_bytes(element_bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    fill_all<<<blocks_for(space.numel, kThreads), kThreads, 0, stream>>>(space, static_cast<T*>(dst),
                                                                         *static_cast<const T*>(value));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
