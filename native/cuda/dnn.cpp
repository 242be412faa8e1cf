// cuDNN's legacy convolution interface: functions, handles, and a cache of plans by problem.
//
// A plan holds the four descriptors and the deterministic algorithms in the order of cuDNN's heuristics, each with its
// workspace size. Plans belong to a handle, so a repeated call costs a lookup and the launch.
#include "cuda/dnn.h"

#include <dlfcn.h>

#include <array>
#include <climits>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/handle_pool.h"
#include "cuda/library_search.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

// cudnn.h's types and constants, as far as they are used here.
using Status = int;  // cudnnStatus_t
using Handle = void*;
using TensorDescriptor = void*;
using FilterDescriptor = void*;
using ConvolutionDescriptor = void*;
enum : int { kFloat = 0, kDouble = 1, kHalf = 2, kBFloat16 = 9 };                        // cudnnDataType_t
enum : int { kNCHW = 0, kNHWC = 1 };                                                     // cudnnTensorFormat_t
enum : int { kDefaultMath = 0, kTensorOpMath = 1, kAllowConversion = 2, kFmaMath = 3 };  // cudnnMathType_t
constexpr int kCrossCorrelation = 1;                                                     // cudnnConvolutionMode_t
constexpr int kDeterministic = 1;                                                        // cudnnDeterminism_t
constexpr Status kStatusSuccess = 0;
// Families of a thousand: bad parameters, problems that are not supported, internal errors.
constexpr Status kStatusBadParam = 2000, kStatusInternal = 4000;
constexpr Status kStatusNoHostMemory = 4003, kStatusNoDeviceMemory = 4004;

// cudnnConvolutionFwdAlgoPerf_t and cudnnConvolutionBwdDataAlgoPerf_t
struct Choice {
  int algorithm;
  Status status;
  float time;
  std::size_t memory;
  int determinism;
  int math_type;
  int reserved[3];
};

// X(member, exported name, arguments)
#define UNTORCH_DNN(X)                                                                                                 \
  X(create, cudnnCreate, (Handle * handle))                                                                            \
  X(set_stream, cudnnSetStream, (Handle handle, Stream stream))                                                        \
  X(create_tensor, cudnnCreateTensorDescriptor, (TensorDescriptor * descriptor))                                       \
  X(destroy_tensor, cudnnDestroyTensorDescriptor, (TensorDescriptor descriptor))                                       \
  X(set_tensor, cudnnSetTensorNdDescriptor,                                                                            \
    (TensorDescriptor descriptor, int dtype, int ndim, const int* sizes, const int* strides))                          \
  X(create_filter, cudnnCreateFilterDescriptor, (FilterDescriptor * descriptor))                                       \
  X(destroy_filter, cudnnDestroyFilterDescriptor, (FilterDescriptor descriptor))                                       \
  X(set_filter, cudnnSetFilterNdDescriptor,                                                                            \
    (FilterDescriptor descriptor, int dtype, int format, int ndim, const int* sizes))                                  \
  X(create_convolution, cudnnCreateConvolutionDescriptor, (ConvolutionDescriptor * descriptor))                        \
  X(destroy_convolution, cudnnDestroyConvolutionDescriptor, (ConvolutionDescriptor descriptor))                        \
  X(set_convolution, cudnnSetConvolutionNdDescriptor,                                                                  \
    (ConvolutionDescriptor descriptor, int n, const int* padding, const int* stride, const int* dilation, int mode,    \
     int compute_dtype))                                                                                               \
  X(set_groups, cudnnSetConvolutionGroupCount, (ConvolutionDescriptor descriptor, int groups))                         \
  X(set_math_type, cudnnSetConvolutionMathType, (ConvolutionDescriptor descriptor, int math_type))                     \
  X(forward_choices, cudnnGetConvolutionForwardAlgorithm_v7,                                                           \
    (Handle handle, TensorDescriptor x, FilterDescriptor w, ConvolutionDescriptor convolution, TensorDescriptor y,     \
     int requested, int* returned, Choice* choices))                                                                   \
  X(forward_workspace, cudnnGetConvolutionForwardWorkspaceSize,                                                        \
    (Handle handle, TensorDescriptor x, FilterDescriptor w, ConvolutionDescriptor convolution, TensorDescriptor y,     \
     int algorithm, std::size_t* bytes))                                                                               \
  X(forward, cudnnConvolutionForward,                                                                                  \
    (Handle handle, const void* alpha, TensorDescriptor x, const void* x_data, FilterDescriptor w, const void* w_data, \
     ConvolutionDescriptor convolution, int algorithm, void* workspace, std::size_t bytes, const void* beta,           \
     TensorDescriptor y, void* y_data))                                                                                \
  X(backward_choices, cudnnGetConvolutionBackwardDataAlgorithm_v7,                                                     \
    (Handle handle, FilterDescriptor w, TensorDescriptor dy, ConvolutionDescriptor convolution, TensorDescriptor dx,   \
     int requested, int* returned, Choice* choices))                                                                   \
  X(backward_workspace, cudnnGetConvolutionBackwardDataWorkspaceSize,                                                  \
    (Handle handle, FilterDescriptor w, TensorDescriptor dy, ConvolutionDescriptor convolution, TensorDescriptor dx,   \
     int algorithm, std::size_t* bytes))                                                                               \
  X(backward, cudnnConvolutionBackwardData,                                                                            \
    (Handle handle, const void* alpha, FilterDescriptor w, const void* w_data, TensorDescriptor dy,                    \
     const void* dy_data, ConvolutionDescriptor convolution, int algorithm, void* workspace, std::size_t bytes,        \
     const void* beta, TensorDescriptor dx, void* dx_data))

struct Dnn {
#define UNTORCH_MEMBER(member, symbol, arguments) Status(*member) arguments = nullptr;
  UNTORCH_DNN(UNTORCH_MEMBER)
#undef UNTORCH_MEMBER
  const char* (*error_string)(Status status) = nullptr;
  std::size_t (*version)() = nullptr;
};

struct Opened {
  Dnn table;
  std::string reason;  // why it cannot be opened; empty when it was opened
};

std::string open_into(Dnn& table) {
  std::string error, unused;
  // Dependencies of cuDNN's sublibraries: opened first, they are found wherever they are installed; where they are
  // missing, cuDNN's own error says so.
  constexpr LibraryHint kRuntimeCompiler{"NVRTC", "cuda_nvrtc", "nvidia-cuda-nvrtc", false};
  (void)open_library({"libcublasLt.so.13", "libcublasLt.so.12"}, kCublas, unused);
  (void)open_library({"libnvrtc.so.13", "libnvrtc.so.12"}, kRuntimeCompiler, unused);
  void* const library = open_library({"libcudnn.so.9"}, kCudnn, error);
  if (library == nullptr) return error;
#define UNTORCH_RESOLVE(member, symbol, arguments)                                               \
  if (void* const found = dlsym(library, #symbol); found != nullptr) {                           \
    table.member = reinterpret_cast<decltype(table.member)>(found);                              \
  } else {                                                                                       \
    return "this libcudnn.so.9 has no " #symbol ": install another cuDNN 9 (nvidia-cudnn-cu13)"; \
  }
  UNTORCH_DNN(UNTORCH_RESOLVE)
#undef UNTORCH_RESOLVE
  table.error_string = reinterpret_cast<decltype(table.error_string)>(dlsym(library, "cudnnGetErrorString"));
  table.version = reinterpret_cast<decltype(table.version)>(dlsym(library, "cudnnGetVersion"));
  return {};
}

const Dnn& dnn() {
  static const Opened& opened = *[] {
    auto* made = new Opened;
    made->reason = open_into(made->table);
    return made;
  }();
  if (!opened.reason.empty()) [[unlikely]]
    throw_error(ErrorKind::kUnsupported, "convolution on CUDA needs cuDNN 9: ", opened.reason);
  return opened.table;
}

[[noreturn]] void throw_status(const Dnn& api, Status status, const char* call) {
  const char* const text = api.error_string == nullptr ? nullptr : api.error_string(status);
  const bool memory = status == kStatusNoHostMemory || status == kStatusNoDeviceMemory;
  throw_error(memory ? ErrorKind::kOutOfMemory : ErrorKind::kInternal, "convolution: cuDNN ",
              api.version == nullptr ? 0 : api.version(), ": ", call, ": ", text == nullptr ? "unknown status" : text,
              " (", status, ")");
}
void check_status(const Dnn& api, Status status, const char* call) {
  if (status != kStatusSuccess) [[unlikely]]
    throw_status(api, status, call);
}
bool refused(Status status) { return status >= kStatusBadParam && status < kStatusInternal; }

int dtype_code(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return kHalf;
    case DType::kBFloat16:
      return kBFloat16;
    case DType::kFloat64:
      return kDouble;
    default:
      return kFloat;
  }
}

struct Plan {
  TensorDescriptor input = nullptr, output = nullptr;
  FilterDescriptor weight = nullptr;
  ConvolutionDescriptor convolution = nullptr;
  // Algorithms, the best first; none when cuDNN refuses the problem. The convolution's descriptor has the first one's
  // math type.
  struct Candidate {
    int algorithm, math_type;
    std::size_t workspace;
  };
  std::vector<Candidate> candidates;

  explicit Plan(const Dnn& api) : api_(&api) {
    check_status(api, api.create_tensor(&input), "cudnnCreateTensorDescriptor");
    check_status(api, api.create_tensor(&output), "cudnnCreateTensorDescriptor");
    check_status(api, api.create_filter(&weight), "cudnnCreateFilterDescriptor");
    check_status(api, api.create_convolution(&convolution), "cudnnCreateConvolutionDescriptor");
  }
  ~Plan() {
    (void)api_->destroy_convolution(convolution);
    (void)api_->destroy_filter(weight);
    (void)api_->destroy_tensor(output);
    (void)api_->destroy_tensor(input);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

 private:
  const Dnn* api_;
};

// Everything that a plan depends on: sizes, then dtype and flags.
using Key = std::array<std::int64_t, 24>;

Key key_of(const DnnConvolution& p) {
  Key key{};
  std::size_t at = 0;
  const auto& s = p.shape;
  for (const std::int64_t value : {s.batch, s.groups, s.in_channels, s.out_channels}) key[at++] = value;
  for (const auto* list : {&s.input, &s.kernel, &s.output, &s.stride, &s.padding, &s.dilation}) {
    for (const std::int64_t value : *list) key[at++] = value;
  }
  key[at++] = static_cast<std::int64_t>(p.dtype) * 8 + (s.channels_last ? 4 : 0) + (p.transposed ? 2 : 0) + p.tf32;
  return key;
}

struct State {
  Handle handle = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans;
};

// [n, c, spatial…], dense in the format; false when cuDNN's ints cannot hold it.
bool set_tensor(const Dnn& api, TensorDescriptor descriptor, int dtype, const kernels::ConvolutionShape& s,
                std::int64_t channels, const std::array<std::int64_t, 3>& spatial, int n) {
  const int ndim = n + 2;
  std::array<std::int64_t, 5> sizes{s.batch, channels}, strides{};
  for (int d = 0; d < n; ++d) sizes[static_cast<std::size_t>(2 + d)] = spatial[static_cast<std::size_t>(3 - n + d)];
  std::int64_t step = 1;
  if (s.channels_last) {
    strides[1] = 1;
    step = channels;
  }
  for (int d = ndim - 1; d >= (s.channels_last ? 2 : 1); --d) {
    strides[static_cast<std::size_t>(d)] = step;
    step *= sizes[static_cast<std::size_t>(d)];
  }
  strides[0] = step;
  if (step * s.batch > INT_MAX) return false;  // cuDNN counts elements in 32 bits
  std::array<int, 5> narrow_sizes{}, narrow_strides{};
  for (std::size_t d = 0; d < static_cast<std::size_t>(ndim); ++d) {
    narrow_sizes[d] = static_cast<int>(sizes[d]);
    narrow_strides[d] = static_cast<int>(strides[d]);
  }
  check_status(api, api.set_tensor(descriptor, dtype, ndim, narrow_sizes.data(), narrow_strides.data()),
               "cudnnSetTensorNdDescriptor");
  return true;
}

// Fills in descriptors and candidates; leaves the latter empty when cuDNN refuses.
void make_plan(const Dnn& api, Handle handle, const DnnConvolution& p, Plan& plan) {
  const kernels::ConvolutionShape& s = p.shape;
  const int dtype = dtype_code(p.dtype);
  // cuDNN needs at least two spatial dimensions.
  const bool three = s.input[0] != 1 || s.kernel[0] != 1 || s.output[0] != 1 || s.padding[0] != 0;
  const int n = three ? 3 : 2;
  if (!set_tensor(api, plan.input, dtype, s, s.in_channels * s.groups, s.input, n)) return;
  if (!set_tensor(api, plan.output, dtype, s, s.out_channels * s.groups, s.output, n)) return;
  std::array<int, 5> weight{};
  const std::int64_t rows = (p.transposed ? s.in_channels : s.out_channels) * s.groups;
  const std::int64_t columns = p.transposed ? s.out_channels : s.in_channels;
  if (rows * columns * s.kernel_size() > INT_MAX) return;
  weight[0] = static_cast<int>(rows);
  weight[1] = static_cast<int>(columns);
  std::array<int, 3> padding{}, stride{}, dilation{};
  for (std::size_t d = 0; d < static_cast<std::size_t>(n); ++d) {
    const std::size_t from = 3 - static_cast<std::size_t>(n) + d;
    if (s.padding[from] > INT_MAX || s.stride[from] > INT_MAX || s.dilation[from] > INT_MAX) return;
    weight[2 + d] = static_cast<int>(s.kernel[from]);
    padding[d] = static_cast<int>(s.padding[from]);
    stride[d] = static_cast<int>(s.stride[from]);
    dilation[d] = static_cast<int>(s.dilation[from]);
  }
  const bool exact = p.dtype == DType::kFloat32 && !p.tf32;
  const bool half = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  const int compute = p.dtype == DType::kFloat64 ? kDouble : kFloat;
  const int math_type = exact ? kFmaMath : half ? kTensorOpMath : kDefaultMath;
  Status status = api.set_filter(plan.weight, dtype, s.channels_last ? kNHWC : kNCHW, n + 2, weight.data());
  if (status == kStatusSuccess) {
    status = api.set_convolution(plan.convolution, n, padding.data(), stride.data(), dilation.data(), kCrossCorrelation,
                                 compute);
  }
  if (status == kStatusSuccess) status = api.set_groups(plan.convolution, static_cast<int>(s.groups));
  if (status == kStatusSuccess) status = api.set_math_type(plan.convolution, math_type);
  if (refused(status)) return;
  check_status(api, status, "describing the convolution");

  std::array<Choice, 16> choices{};
  int count = 0;
  status = p.transposed ? api.backward_choices(handle, plan.weight, plan.input, plan.convolution, plan.output,
                                               static_cast<int>(choices.size()), &count, choices.data())
                        : api.forward_choices(handle, plan.input, plan.weight, plan.convolution, plan.output,
                                              static_cast<int>(choices.size()), &count, choices.data());
  if (refused(status)) return;
  check_status(api, status, "cudnnGetConvolutionAlgorithm_v7");
  // Exact float32: what is ranked for plain multiply-adds first, then the rest, told to use nothing else.
  for (const bool labelled : {true, false}) {
    for (int i = 0; i < count; ++i) {
      const Choice& choice = choices[static_cast<std::size_t>(i)];
      if (choice.status != kStatusSuccess || choice.determinism != kDeterministic) continue;
      if (exact ? (choice.math_type == kFmaMath) != labelled : !labelled) continue;
      if (!exact && choice.math_type == kAllowConversion) continue;  // would round float32 to half
      const int used = exact ? kFmaMath : choice.math_type;
      check_status(api, api.set_math_type(plan.convolution, used), "cudnnSetConvolutionMathType");
      std::size_t bytes = 0;
      status = p.transposed ? api.backward_workspace(handle, plan.weight, plan.input, plan.convolution, plan.output,
                                                     choice.algorithm, &bytes)
                            : api.forward_workspace(handle, plan.input, plan.weight, plan.convolution, plan.output,
                                                    choice.algorithm, &bytes);
      constexpr std::size_t kMostWorkspace = std::size_t{1} << 30;
      if (status == kStatusSuccess && bytes <= kMostWorkspace) {
        plan.candidates.push_back({choice.algorithm, used, bytes});
      }
    }
  }
  if (!plan.candidates.empty()) {
    check_status(api, api.set_math_type(plan.convolution, plan.candidates.front().math_type),
                 "cudnnSetConvolutionMathType");
  }
}

Plan& plan_for(const Dnn& api, State& state, const DnnConvolution& problem) {
  constexpr std::size_t kKept = 1024;
  const Key key = key_of(problem);
  const auto found = state.plans.find(key);
  if (found != state.plans.end()) return *found->second;
  if (state.plans.size() >= kKept) state.plans.clear();
  auto plan = std::make_unique<Plan>(api);
  make_plan(api, state.handle, problem, *plan);
  return *state.plans.emplace(key, std::move(plan)).first->second;
}

HandlePool<State>& handles() {
  static auto& pool = *new HandlePool<State>;
  return pool;
}

}  // namespace

bool dnn_convolution(const DnnConvolution& problem, const void* input, const void* weight, void* output, int device,
                     Stream stream) {
  const Dnn& api = dnn();
  // Making handles and plans allocates and loads code, which stream capture in strict mode would refuse.
  const RelaxedCapture relaxed;
  const auto state = handles().take(device, [&] {
    auto made = std::make_unique<State>();
    check_status(api, api.create(&made->handle), "cudnnCreate");
    return made;
  });
  Plan& plan = plan_for(api, *state, problem);
  check_status(api, api.set_stream(state->handle, stream), "cudnnSetStream");
  const double one64 = 1, zero64 = 0;
  const float one32 = 1, zero32 = 0;
  const bool wide = problem.dtype == DType::kFloat64;
  const void* const alpha = wide ? static_cast<const void*>(&one64) : &one32;
  const void* const beta = wide ? static_cast<const void*>(&zero64) : &zero32;
  while (!plan.candidates.empty()) {
    const auto [algorithm, math_type, bytes] = plan.candidates.front();
    const StorageRef workspace = bytes == 0 ? StorageRef() : allocate(bytes, device);
    void* const scratch = bytes == 0 ? nullptr : workspace->data();
    const Status status = problem.transposed
                              ? api.backward(state->handle, alpha, plan.weight, weight, plan.input, input,
                                             plan.convolution, algorithm, scratch, bytes, beta, plan.output, output)
                              : api.forward(state->handle, alpha, plan.input, input, plan.weight, weight,
                                            plan.convolution, algorithm, scratch, bytes, beta, plan.output, output);
    if (!refused(status)) {
      check_status(api, status, problem.transposed ? "cudnnConvolutionBackwardData" : "cudnnConvolutionForward");
      return true;
    }
    // In the heuristics' list, and refused at execution: dropped from the plan, so that it is tried once only.
    plan.candidates.erase(plan.candidates.begin());
    if (!plan.candidates.empty()) {
      check_status(api, api.set_math_type(plan.convolution, plan.candidates.front().math_type),
                   "cudnnSetConvolutionMathType");
    }
  }
  return false;
}

}  // namespace untorch::cuda
