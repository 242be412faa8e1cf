// cuDNN 9's graph interface as dnn.cpp uses it: our own declarations (no cuDNN header is needed to build).
//
// A graph of operations is described by descriptors, which are created, given attributes and finalized. Heuristics name
// engine configurations for it; an execution plan is made of one of them and run with a variant pack of pointers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "base/dtype.h"
#include "cuda/driver.h"

namespace untorch::cuda::dnn {

using Status = int;                           // cudnnStatus_t
using Handle = struct DnnContext*;            // cudnnHandle_t
using RawDescriptor = struct DnnDescriptor*;  // cudnnBackendDescriptor_t

constexpr Status kOk = 0;
// Statuses come in families of a thousand: not initialized, bad parameters, problems that are not supported, internal
// errors and failed executions.
constexpr Status kBadParameter = 2000, kInternal = 4000, kNoHostMemory = 4003, kNoDeviceMemory = 4004;
// cuDNN does not serve the problem, or not by this engine.
constexpr bool refused(Status status) noexcept { return status >= kBadParameter && status < kInternal; }

// cudnnDataType_t
enum : std::int32_t { kFloat = 0, kDouble = 1, kHalf = 2, kBfloat16 = 9 };
std::int32_t type_of(DType dtype) noexcept;

// cudnnBackendDescriptorType_t
enum class Kind : int {
  kPointwise = 0,
  kConvolution = 1,
  kEngine = 2,
  kEngineConfig = 3,
  kHeuristics = 4,
  kPlan = 5,
  kConvolutionForward = 10,
  kConvolutionBackwardData = 12,
  kPointwiseOperation = 13,
  kGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
};

// cudnnBackendAttributeName_t with its cudnnBackendAttributeType_t.
template <class T>
struct Attribute {
  int name, type;
};
namespace attribute {
enum : int { kTypeHandle, kTypeData, kTypeBool, kTypeInt64, kTypeFloat, kTypeDouble, kTypePointer, kTypeMode };
enum : int {
  kTypeHeuristics = 8,
  kTypeNan = 10,
  kTypeNote = 11,
  kTypePointwise = 14,
  kTypeDescriptor = 15,
  kTypeBehavior = 19
};
inline constexpr Attribute<std::int32_t> kPointwiseMode{0, kTypePointwise}, kPointwiseType{1, kTypeData},
    kPointwiseNan{2, kTypeNan};
inline constexpr Attribute<std::int32_t> kComputeType{100, kTypeData}, kConvolutionMode{101, kTypeMode};
inline constexpr Attribute<std::int64_t> kDilations{102, kTypeInt64}, kStrides{103, kTypeInt64},
    kPostPaddings{104, kTypeInt64}, kPrePaddings{105, kTypeInt64}, kSpatialDims{106, kTypeInt64};
inline constexpr Attribute<std::int32_t> kHeuristicsMode{200, kTypeHeuristics};
inline constexpr Attribute<RawDescriptor> kHeuristicsGraph{201, kTypeDescriptor},
    kHeuristicsResults{202, kTypeDescriptor};
inline constexpr Attribute<RawDescriptor> kConfigEngine{300, kTypeDescriptor};
inline constexpr Attribute<Handle> kPlanHandle{400, kTypeHandle};
inline constexpr Attribute<RawDescriptor> kPlanConfig{401, kTypeDescriptor};
inline constexpr Attribute<std::int64_t> kPlanWorkspace{402, kTypeInt64};
// Of the operations; scalars are double for float64 tensors and float for all others.
inline constexpr int kForwardAlpha = 700, kForwardBeta = 701, kBackwardAlpha = 706, kBackwardBeta = 707;
inline constexpr Attribute<RawDescriptor> kForwardConvolution{702, kTypeDescriptor}, kForwardW{703, kTypeDescriptor},
    kForwardX{704, kTypeDescriptor}, kForwardY{705, kTypeDescriptor};
inline constexpr Attribute<RawDescriptor> kBackwardConvolution{708, kTypeDescriptor}, kBackwardW{709, kTypeDescriptor},
    kBackwardDx{710, kTypeDescriptor}, kBackwardDy{711, kTypeDescriptor};
inline constexpr Attribute<RawDescriptor> kPointwiseDescriptor{750, kTypeDescriptor}, kPointwiseX{751, kTypeDescriptor},
    kPointwiseB{752, kTypeDescriptor}, kPointwiseY{753, kTypeDescriptor};
inline constexpr Attribute<Handle> kGraphHandle{800, kTypeHandle};
inline constexpr Attribute<RawDescriptor> kGraphOperations{801, kTypeDescriptor};
inline constexpr Attribute<std::int64_t> kTensorAlignment{900, kTypeInt64}, kTensorSizes{902, kTypeInt64},
    kTensorStrides{903, kTypeInt64}, kTensorId{906, kTypeInt64};
inline constexpr Attribute<std::int32_t> kTensorType{901, kTypeData};
inline constexpr Attribute<bool> kTensorVirtual{907, kTypeBool};  // between operations, never in memory
inline constexpr Attribute<std::int64_t> kPackIds{1000, kTypeInt64};
inline constexpr Attribute<const void*> kPackPointers{1001, kTypePointer}, kPackWorkspace{1003, kTypePointer};
inline constexpr Attribute<std::int32_t> kEngineNotes{1303, kTypeNote}, kEngineBehavior{1305, kTypeBehavior};
}  // namespace attribute

constexpr std::int32_t kCrossCorrelation = 1;               // cudnnConvolutionMode_t
constexpr std::int32_t kAdd = 0, kRelu = 100;               // cudnnPointwiseMode_t
constexpr std::int32_t kPropagateNan = 1;                   // cudnnNanPropagation_t
constexpr std::int32_t kCompiledAtRunTime = 0;              // cudnnBackendBehaviorNote_t
enum : std::int32_t { kModeFallback = 2, kModeA = 3 };      // cudnnBackendHeurMode_t
enum : std::int32_t { kTensorCore, kDownConvertInputs };    // cudnnBackendNumericalNote_t
constexpr std::int32_t kNondeterministic = 4, kNotes = 16;  // one of them; more than there are

// X(member, exported name, arguments)
#define UNTORCH_DNN(X)                                                                                      \
  X(create, cudnnCreate, (Handle * handle))                                                                 \
  X(set_stream, cudnnSetStream, (Handle handle, Stream stream))                                             \
  X(create_descriptor, cudnnBackendCreateDescriptor, (int kind, RawDescriptor* descriptor))                 \
  X(destroy_descriptor, cudnnBackendDestroyDescriptor, (RawDescriptor descriptor))                          \
  X(finalize, cudnnBackendFinalize, (RawDescriptor descriptor))                                             \
  X(set_attribute, cudnnBackendSetAttribute,                                                                \
    (RawDescriptor descriptor, int name, int type, std::int64_t count, const void* values))                 \
  X(get_attribute, cudnnBackendGetAttribute,                                                                \
    (RawDescriptor descriptor, int name, int type, std::int64_t wanted, std::int64_t* count, void* values)) \
  X(execute, cudnnBackendExecute, (Handle handle, RawDescriptor plan, RawDescriptor pack))

struct Functions {
#define UNTORCH_MEMBER(member, symbol, arguments) Status(*member) arguments = nullptr;
  UNTORCH_DNN(UNTORCH_MEMBER)
#undef UNTORCH_MEMBER
  const char* (*error_string)(Status status) = nullptr;
  std::size_t version = 0;
  std::string reason;  // why it could not be opened; empty when it is open
};

// The library, opened at the first call. Throws kUnsupported that says where it was looked for.
const Functions& functions();
// The exception for a failed call.
[[noreturn]] void throw_status(Status status, const char* call);
inline void check_status(Status status, const char* call) {
  if (status != kOk) [[unlikely]]
    throw_status(status, call);
}

// A descriptor. The first status that is not kOk stays, and later calls do nothing.
class Descriptor {
 public:
  explicit Descriptor(Kind kind) : api_(&functions()) {
    status_ = api_->create_descriptor(static_cast<int>(kind), &raw_);
  }
  ~Descriptor() {
    if (raw_ != nullptr) (void)api_->destroy_descriptor(raw_);
  }
  Descriptor(Descriptor&& other) noexcept
      : api_(other.api_), raw_(std::exchange(other.raw_, nullptr)), status_(other.status_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(raw_, other.raw_);
    status_ = other.status_;
    return *this;
  }

  template <class T>
  Descriptor& set(Attribute<T> attribute, std::span<const std::type_identity_t<T>> values) {
    return set(attribute.name, attribute.type, static_cast<std::int64_t>(values.size()), values.data());
  }
  template <class T>
  Descriptor& set(Attribute<T> attribute, const std::type_identity_t<T>& value) {
    return set(attribute, std::span<const T>(&value, 1));
  }
  Descriptor& set(int name, int type, std::int64_t count, const void* values) {
    if (status_ == kOk) status_ = api_->set_attribute(raw_, name, type, count, values);
    return *this;
  }
  Descriptor& finalize() {
    if (status_ == kOk) status_ = api_->finalize(raw_);
    return *this;
  }
  // How many values there are; `values` has as many of them as fit.
  template <class T>
  std::int64_t get(Attribute<T> attribute, std::span<std::type_identity_t<T>> values) {
    std::int64_t count = 0;
    if (status_ == kOk) {
      status_ = api_->get_attribute(raw_, attribute.name, attribute.type, static_cast<std::int64_t>(values.size()),
                                    &count, values.data());
    }
    return status_ == kOk ? count : 0;
  }

  Status status() const noexcept { return status_; }
  RawDescriptor raw() const noexcept { return raw_; }

 private:
  const Functions* api_;
  RawDescriptor raw_ = nullptr;
  Status status_ = kOk;
};

}  // namespace untorch::cuda::dnn
