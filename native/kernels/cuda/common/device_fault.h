// Device-side fault codes, for values that the host cannot check, such as an index out of range. A kernel that meets
// one skips the write or reads element 0 instead, so that nothing outside the tensors is touched, and stores one word
// into pinned host memory (native/cuda/device_error.h), where the host reads it.
#pragma once

#include <cstdint>

namespace untorch::kernels::cuda {

// native/cuda/device_error.cpp has the texts.
enum class DeviceFault : std::uint8_t {
  kNone = 0,
  kIndex,
  kIndexPut,
  kIndexReduce,
  kScatter,
  kScatterReduce,
  kMaskedScatter,
  kEmbeddingBagIndex,
  kEmbeddingBagOffset,
  kBernoulli,
  kMaxUnpool,
  kLuPivot,
  kNvfp4Expert,
  kInt4Expert,
  kRoiImage,
  kMultinomial,
  kMultinomialSum,
};

// The fault in the top 8 bits, the offending value in the others: one store, so that the two belong together.
using FaultWord = std::uint64_t;
inline constexpr int kFaultValueBits = 56;

#ifdef __CUDACC__
__device__ __forceinline__ void report(FaultWord* word, DeviceFault fault, std::int64_t value) {
  const FaultWord mask = (FaultWord{1} << kFaultValueBits) - 1;
  *static_cast<volatile FaultWord*>(word) =
      static_cast<FaultWord>(fault) << kFaultValueBits | (static_cast<FaultWord>(value) & mask);
  __threadfence_system();
}

// The index with negative values wrapped, or -1 and a report when it is outside of [-size, size).
__device__ __forceinline__ std::int64_t wrapped_index(std::int64_t index, std::int64_t size, FaultWord* word,
                                                      DeviceFault fault) {
  const std::int64_t at = index < 0 ? index + size : index;
  if (at >= 0 && at < size) return at;
  report(word, fault, index);
  return -1;
}
#endif

}  // namespace untorch::kernels::cuda
