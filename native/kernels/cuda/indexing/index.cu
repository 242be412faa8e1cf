// Advanced indexing. An index expression is turned into element offsets first (8 bytes for every position of the index
// tensors), so that gather, put and masked fill are one kernel each for any number of indices. A thread an element.
//
//   result  [ before | index dimensions | after ]      address = strides(before, after) + offsets[index position]
//
// Roofline: memory-bound. Bytes of a gather: every element of the result written once and read once, the offsets once
// for each element (from L1 within a row); rows whose addresses allow it move 16 bytes a thread.
#include "kernels/index.h"

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/divide.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ std::int64_t first_index() { return std::int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ __forceinline__ std::int64_t index_step() { return std::int64_t{gridDim.x} * kThreads; }

__global__ void __launch_bounds__(kThreads)
    add_offsets(IndexList list, std::int64_t* out, bool add, std::uint32_t* ids, FaultWord* word, DeviceFault fault) {
  for (std::int64_t i = first_index(); i < list.numel; i += index_step()) {
    std::int64_t at[kMaxIndices] = {};
    std::int64_t rest = i;
    for (int d = 0; d < list.ndim; ++d) {
      const std::int64_t quotient = divided(rest, list.sizes[d], list.numel),
                         position = rest - quotient * list.sizes[d];
      rest = quotient;
#pragma unroll
      for (int n = 0; n < kMaxIndices; ++n) {
        if (n < list.count) at[n] += position * list.entries[n].strides[d];
      }
    }
    std::int64_t sum = add ? out[i] : 0;
#pragma unroll
    for (int n = 0; n < kMaxIndices; ++n) {
      if (n >= list.count) break;
      const IndexList::Entry& entry = list.entries[n];
      const std::int64_t index = entry.wide ? static_cast<const std::int64_t*>(entry.data)[at[n]]
                                            : static_cast<const std::int32_t*>(entry.data)[at[n]];
      const std::int64_t wrapped = wrapped_index(index, entry.size, word, fault);
      sum = sum < 0 || wrapped < 0 ? -1 : sum + wrapped * entry.stride;
    }
    out[i] = sum;
    if (ids != nullptr) ids[i] = static_cast<std::uint32_t>(i);
  }
}

// Offsets are in elements of the tensor; T may be several of them (1 << shift).
template <class T>
__global__ void __launch_bounds__(kThreads)
    gather(Strided<3> space, T* out, const T* self, const std::int64_t* positions, int shift) {
  for (std::int64_t i = first_index(); i < space.numel; i += index_step()) {
    std::int64_t at[3];
    offsets(space, i, at);
    const std::int64_t offset = positions[at[2]];
    out[at[0]] = offset < 0 ? T{} : self[at[1] + (offset >> shift)];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    put(Strided<4> space, T* out, const std::int64_t* positions, const T* values) {
  for (std::int64_t i = first_index(); i < space.numel; i += index_step()) {
    std::int64_t at[4];
    offsets(space, i, at);
    const std::int64_t offset = positions[at[2]];
    if (offset >= 0) out[at[1] + offset] = values[at[3]];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    fill_masked(Strided<2> space, T* out, const std::uint8_t* mask, const T* value) {
  const T v = *value;
  for (std::int64_t i = first_index(); i < space.numel; i += index_step()) {
    std::int64_t at[2];
    offsets(space, i, at);
    if (mask[at[1]] != 0) out[at[0]] = v;
  }
}

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

// How far 16 bytes reach: log2 of the elements when the innermost dimension is a run in out and self, and every other
// stride and address keeps it aligned; else 0. Offsets are sums of self's strides, so that they are multiples as well
// when `offset_unit`, which divides them all, is.
int wide_shift(const Strided<3>& space, const void* out, const void* self, std::int64_t offset_unit,
               int element_bytes) {
  if (element_bytes == 16 || space.strides[0][0] != 1 || space.strides[1][0] != 1 || space.strides[2][0] != 0) return 0;
  const int shift = element_bytes == 1 ? 4 : element_bytes == 2 ? 3 : element_bytes == 4 ? 2 : 1;
  const std::int64_t unit = std::int64_t{1} << shift;
  if (space.sizes[0] % unit != 0 || offset_unit % unit != 0 || !aligned(out) || !aligned(self)) return 0;
  for (int d = 1; d < space.ndim; ++d) {
    if (space.strides[0][d] % unit != 0 || space.strides[1][d] % unit != 0) return 0;
  }
  return shift;
}

}  // namespace

int index_offsets(const IndexList& list, std::int64_t* offsets, bool add, std::uint32_t* ids, FaultWord* word,
                  DeviceFault fault, Stream stream) {
  if (list.numel == 0) return 0;
  add_offsets<<<blocks_for(list.numel, kThreads), kThreads, 0, stream>>>(list, offsets, add, ids, word, fault);
  return cudaGetLastError();
}

int index_gather(const Strided<3>& space, void* out, const void* self, const std::int64_t* offsets,
                 std::int64_t offset_unit, int element_bytes, Stream stream) {
  if (space.numel == 0) return 0;
  if (const int shift = wide_shift(space, out, self, offset_unit, element_bytes); shift != 0) {
    Strided<3> wide = space;
    wide.numel >>= shift;
    wide.sizes[0] >>= shift;
    for (int d = 1; d < wide.ndim; ++d) {
      wide.strides[0][d] >>= shift;
      wide.strides[1][d] >>= shift;
    }
    gather<<<blocks_for(wide.numel, kThreads), kThreads, 0, stream>>>(
        wide, static_cast<Bits<16>*>(out), static_cast<const Bits<16>*>(self), offsets, shift);
    return cudaGetLastError();
  }
  return dispatch_bytes(element_bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    gather<<<blocks_for(space.numel, kThreads), kThreads, 0, stream>>>(space, static_cast<T*>(out),
                                                                       static_cast<const T*>(self), offsets, 0);
    return cudaGetLastError();
  });
}

int index_put(const Strided<4>& space, void* out, const std::int64_t* offsets, const void* values, int element_bytes,
              Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_bytes(element_bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    put<<<blocks_for(space.numel, kThreads), kThreads, 0, stream>>>(space, static_cast<T*>(out), offsets,
                                                                    static_cast<const T*>(values));
    return cudaGetLastError();
  });
}

int masked_fill(const Strided<2>& space, void* out, const std::uint8_t* mask, const void* value, int element_bytes,
                Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_bytes(element_bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    fill_masked<<<blocks_for(space.numel, kThreads), kThreads, 0, stream>>>(space, static_cast<T*>(out), mask,
                                                                            static_cast<const T*>(value));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
