// cuBLASLt as blas.cpp uses it: our own declarations of the few functions (no CUDA header is needed to build).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/driver.h"

namespace untorch::cuda::lt {

using Status = int;  // cublasStatus_t
using Handle = struct LtContext*;
using Descriptor = struct LtMatmulDescriptor*;
using Layout = struct LtMatrixLayout*;
using Preference = struct LtPreference*;

struct Algorithm {
  std::uint64_t data[8];
};
struct HeuristicResult {
  Algorithm algorithm;
  std::size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96);

enum : Status { kOk = 0, kNotInitialized = 1, kNotSupported = 15 };
// cudaDataType_t, cublasComputeType_t
enum : int {
  kReal32 = 0,
  kReal64 = 1,
  kReal16 = 2,
  kInt8 = 3,
  kInt32 = 10,
  kBfloat16 = 14,
  kE4m3 = 28,
  kE5m2 = 29,
  kE2m1 = 33,
};
enum : int { kCompute32 = 68, kCompute64 = 70, kComputeInt32 = 72, kComputeTf32 = 77 };
// cublasLtMatmulDescAttributes_t
enum : int {
  kDescTransposeA = 3,
  kDescTransposeB = 4,
  kDescEpilogue = 7,
  kDescBias = 8,
  kDescScaleA = 17,
  kDescScaleB = 18,
  kDescScaleD = 20,
  kDescFastAccumulation = 25,
  kDescBiasType = 26,
  kDescScaleModeA = 31,
  kDescScaleModeB = 32,
};
// cublasLtMatmulMatrixScale_t
inline constexpr std::int32_t kScaleBlocksOf16 = 1, kScaleOuterVector = 3, kScaleVectorsOf128 = 4,
                              kScaleBlocksOf128 = 5;
// cublasLtMatrixLayoutAttribute_t
enum : int { kLayoutBatch = 5, kLayoutBatchStride = 6 };
// cublasLtMatmulPreferenceAttributes_t
enum : int {
  kPreferWorkspace = 1,
  kPreferReductions = 3,
  kPreferAlignmentA = 5,
  kPreferAlignmentB = 6,
  kPreferAlignmentC = 7,
  kPreferAlignmentD = 8,
};
// Split-K reduction: in the result, which rounds each partial sum to its type, or in a workspace in the compute type.
enum : std::uint32_t { kReductionInPlace = 1, kReductionInComputeType = 2 };

#define UNTORCH_CUBLASLT(X)                                                                                           \
  X(create, cublasLtCreate, (Handle * handle))                                                                        \
  X(descriptor_create, cublasLtMatmulDescCreate, (Descriptor * descriptor, int compute, int scale))                   \
  X(descriptor_destroy, cublasLtMatmulDescDestroy, (Descriptor descriptor))                                           \
  X(descriptor_set, cublasLtMatmulDescSetAttribute,                                                                   \
    (Descriptor descriptor, int attribute, const void* value, std::size_t bytes))                                     \
  X(layout_create, cublasLtMatrixLayoutCreate,                                                                        \
    (Layout * layout, int type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld))                             \
  X(layout_destroy, cublasLtMatrixLayoutDestroy, (Layout layout))                                                     \
  X(layout_set, cublasLtMatrixLayoutSetAttribute,                                                                     \
    (Layout layout, int attribute, const void* value, std::size_t bytes))                                             \
  X(preference_create, cublasLtMatmulPreferenceCreate, (Preference * preference))                                     \
  X(preference_destroy, cublasLtMatmulPreferenceDestroy, (Preference preference))                                     \
  X(preference_set, cublasLtMatmulPreferenceSetAttribute,                                                             \
    (Preference preference, int attribute, const void* value, std::size_t bytes))                                     \
  X(heuristic, cublasLtMatmulAlgoGetHeuristic,                                                                        \
    (Handle handle, Descriptor descriptor, Layout a, Layout b, Layout c, Layout d, Preference preference, int wanted, \
     HeuristicResult* results, int* count))                                                                           \
  X(matmul, cublasLtMatmul,                                                                                           \
    (Handle handle, Descriptor descriptor, const void* alpha, const void* a, Layout a_layout, const void* b,          \
     Layout b_layout, const void* beta, const void* c, Layout c_layout, void* d, Layout d_layout,                     \
     const Algorithm* algorithm, void* workspace, std::size_t workspace_bytes, Stream stream))

struct Functions {
#define UNTORCH_MEMBER(member, symbol, arguments) Status(*member) arguments = nullptr;
  UNTORCH_CUBLASLT(UNTORCH_MEMBER)
#undef UNTORCH_MEMBER
  const char* (*status_text)(Status) = nullptr;
  std::string version;
  std::string reason;  // why it could not be opened; empty when it is open
};

// The library, opened at the first call. Throws kUnsupported that says where it was looked for.
const Functions& functions();
// The same without an error: `reason` says why there is none.
const Functions& opened() noexcept;
// The exception for a failed call.
[[noreturn]] void throw_status(const char* op, const char* what, Status status);

// One handle a device, shared by every thread: cublasLtMatmul takes the stream, and the handle holds no state of a
// call. The device must be current.
Handle handle_for(int device);

}  // namespace untorch::cuda::lt
