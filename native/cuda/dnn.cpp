// Convolution plans: one for each problem and device, shared by the handles.
//
// The engine configurations of a problem come from cuDNN's heuristics, mode A first, then its fallback list; the first
// one that is accurate enough and can be finalized becomes the plan. A repeated call costs a lookup, a variant pack
// and the launch.
#include "cuda/dnn.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cuda/dnn_library.h"
#include "cuda/handle_pool.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

using dnn::Descriptor;
using dnn::Kind;
namespace attribute = dnn::attribute;

// Ids of the tensors in a variant pack.
constexpr std::array<std::int64_t, 3> kIds{1, 2, 3};
constexpr std::size_t kInput = 0, kWeight = 1, kOutput = 2;
using Pointers = std::array<const void*, 3>;

// Kernels load up to 16 bytes at a time.
std::int64_t alignment_of(const void* pointer) noexcept {
  constexpr std::uintptr_t kMost = 16;
  const auto address = reinterpret_cast<std::uintptr_t>(pointer) | kMost;
  return static_cast<std::int64_t>(address & (~address + 1));
}

// Everything that a plan depends on: sizes, then alignments, dtype, flags and device.
using Key = std::array<std::int64_t, 24>;

Key key_of(const DnnConvolution& p, const Pointers& pointers, int device) noexcept {
  Key key{};
  std::size_t at = 0;
  const auto& s = p.shape;
  for (const std::int64_t value : {s.batch, s.groups, s.in_channels, s.out_channels}) key[at++] = value;
  for (const auto* list : {&s.input, &s.kernel, &s.output, &s.stride, &s.padding, &s.dilation}) {
    for (const std::int64_t value : *list) key[at++] = value;
  }
  std::int64_t rest = static_cast<std::int64_t>(p.dtype);
  for (const void* pointer : pointers) rest = rest << 5 | alignment_of(pointer);
  key[at++] = rest << 3 | (s.channels_last ? 4 : 0) | (p.transposed ? 2 : 0) | (p.tf32 ? 1 : 0);
  key[at++] = device;
  return key;
}

struct KeyHash {
  std::size_t operator()(const Key& key) const noexcept {
    std::uint64_t hash = 0;
    for (const std::int64_t value : key) {
      hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return static_cast<std::size_t>(hash);
  }
};

// A problem as cuDNN describes it, and its plan.
class Problem {
 public:
  // When cuDNN refuses the problem, there is no plan.
  Problem(dnn::Handle handle, const DnnConvolution& problem, const Pointers& pointers)
      : exact_(problem.dtype == DType::kFloat32 && !problem.tf32), wide_(problem.dtype == DType::kFloat32) {
    describe(handle, problem, pointers);
    if (!dnn::refused(status_)) {
      dnn::check_status(status_, "describing the convolution");
      find_configs(dnn::kModeA);
      find_configs(dnn::kModeFallback);
    }
  }

  struct Plan {
    Descriptor descriptor;
    std::size_t workspace;
  };
  // The plan to use; null when no engine serves the problem. `refused_one` is a plan that failed at execution: the one
  // after it is made then.
  const Plan* plan(dnn::Handle handle, const Plan* refused_one = nullptr) {
    const Plan* current = current_.load(std::memory_order_acquire);
    if (current != refused_one) [[likely]]
      return current;
    const std::lock_guard lock(mutex_);
    current = current_.load(std::memory_order_relaxed);
    if (current != refused_one) return current;
    current = nullptr;
    while (current == nullptr && next_ < configs_.size()) current = make_plan(handle, configs_[next_++]);
    current_.store(current, std::memory_order_release);
    return current;
  }

 private:
  // Finalized, and kept for as long as the graph needs it.
  Descriptor& keep(Descriptor descriptor) {
    if (status_ == dnn::kOk) status_ = descriptor.finalize().status();
    parts_.push_back(std::move(descriptor));
    return parts_.back();
  }

  // [n, c, spatial…], dense in the format.
  dnn::RawDescriptor tensor(const DnnConvolution& p, std::int64_t batch, std::int64_t channels,
                            const std::array<std::int64_t, 3>& spatial, std::size_t n, std::size_t id,
                            const Pointers& pointers) {
    const std::size_t ndim = n + 2;
    std::array<std::int64_t, 5> sizes{batch, channels}, strides{};
    for (std::size_t d = 0; d < n; ++d) sizes[2 + d] = spatial[3 - n + d];
    std::int64_t step = 1;
    if (p.shape.channels_last) {
      strides[1] = 1;
      step = channels;
    }
    for (std::size_t d = ndim - 1; d >= (p.shape.channels_last ? 2u : 1u); --d) {
      strides[d] = step;
      step *= sizes[d];
    }
    strides[0] = step;
    Descriptor made(Kind::kTensor);
    made.set(attribute::kTensorType, dnn::type_of(p.dtype))
        .set(attribute::kTensorSizes, std::span<const std::int64_t>(sizes.data(), ndim))
        .set(attribute::kTensorStrides, std::span<const std::int64_t>(strides.data(), ndim))
        .set(attribute::kTensorId, kIds[id])
        .set(attribute::kTensorAlignment, alignment_of(pointers[id]));
    return keep(std::move(made)).raw();
  }

  void describe(dnn::Handle handle, const DnnConvolution& p, const Pointers& pointers) {
    const kernels::ConvolutionShape& s = p.shape;
    parts_.reserve(6);
    // cuDNN needs at least two spatial dimensions.
    const bool three = s.input[0] != 1 || s.kernel[0] != 1 || s.output[0] != 1 || s.padding[0] != 0;
    const std::size_t n = three ? 3 : 2;
    const std::int64_t rows = (p.transposed ? s.in_channels : s.out_channels) * s.groups;
    const std::int64_t columns = p.transposed ? s.out_channels : s.in_channels;
    const auto x = tensor(p, s.batch, s.in_channels * s.groups, s.input, n, kInput, pointers);
    const auto w = tensor(p, rows, columns, s.kernel, n, kWeight, pointers);
    const auto y = tensor(p, s.batch, s.out_channels * s.groups, s.output, n, kOutput, pointers);

    const auto last = [&](const std::array<std::int64_t, 3>& values) {
      return std::span<const std::int64_t>(values.data() + (3 - n), n);
    };
    const bool f64 = p.dtype == DType::kFloat64;
    Descriptor convolution(Kind::kConvolution);
    convolution.set(attribute::kComputeType, f64 ? dnn::kDouble : dnn::kFloat)
        .set(attribute::kConvolutionMode, dnn::kCrossCorrelation)
        .set(attribute::kSpatialDims, static_cast<std::int64_t>(n))
        .set(attribute::kPrePaddings, last(s.padding))
        .set(attribute::kPostPaddings, last(s.padding))
        .set(attribute::kStrides, last(s.stride))
        .set(attribute::kDilations, last(s.dilation));
    const auto raw = keep(std::move(convolution)).raw();

    const double one64 = 1, zero64 = 0;
    const float one32 = 1, zero32 = 0;
    const void* const one = f64 ? static_cast<const void*>(&one64) : &one32;
    const void* const zero = f64 ? static_cast<const void*>(&zero64) : &zero32;
    const int scalar = f64 ? attribute::kTypeDouble : attribute::kTypeFloat;
    Descriptor operation(p.transposed ? Kind::kConvolutionBackwardData : Kind::kConvolutionForward);
    if (p.transposed) {
      operation.set(attribute::kBackwardConvolution, raw)
          .set(attribute::kBackwardDy, x)
          .set(attribute::kBackwardW, w)
          .set(attribute::kBackwardDx, y)
          .set(attribute::kBackwardAlpha, scalar, 1, one)
          .set(attribute::kBackwardBeta, scalar, 1, zero);
    } else {
      operation.set(attribute::kForwardConvolution, raw)
          .set(attribute::kForwardX, x)
          .set(attribute::kForwardW, w)
          .set(attribute::kForwardY, y)
          .set(attribute::kForwardAlpha, scalar, 1, one)
          .set(attribute::kForwardBeta, scalar, 1, zero);
    }
    const auto operation_raw = keep(std::move(operation)).raw();
    Descriptor graph(Kind::kGraph);
    graph.set(attribute::kGraphHandle, handle).set(attribute::kGraphOperations, operation_raw);
    keep(std::move(graph));
  }

  // Adds what the heuristics give, the best first.
  void find_configs(std::int32_t mode) {
    Descriptor heuristics(Kind::kHeuristics);
    heuristics.set(attribute::kHeuristicsGraph, parts_.back().raw()).set(attribute::kHeuristicsMode, mode).finalize();
    if (heuristics.status() != dnn::kOk) return;  // a problem that this mode does not know
    const std::int64_t count = heuristics.get(attribute::kHeuristicsResults, std::span<dnn::RawDescriptor>());
    std::vector<Descriptor> found;
    std::vector<dnn::RawDescriptor> raw;
    for (std::int64_t i = 0; i < count; ++i) raw.push_back(found.emplace_back(Kind::kEngineConfig).raw());
    const auto given = static_cast<std::size_t>(
        std::max<std::int64_t>(0, heuristics.get(attribute::kHeuristicsResults, std::span(raw))));
    for (std::size_t i = 0; i < std::min(given, found.size()); ++i) configs_.push_back(std::move(found[i]));
  }

  // Deterministic, and no less accurate than asked for.
  bool acceptable(Descriptor& config) const {
    Descriptor engine(Kind::kEngine);
    dnn::RawDescriptor raw = engine.raw();
    std::array<std::int32_t, dnn::kNotes> notes{};
    config.get(attribute::kConfigEngine, std::span(&raw, 1));
    const auto count = static_cast<std::size_t>(engine.get(attribute::kEngineNotes, std::span(notes)));
    if (engine.status() != dnn::kOk) return false;
    return std::none_of(notes.begin(), notes.begin() + static_cast<std::ptrdiff_t>(std::min(count, notes.size())),
                        [&](std::int32_t note) {
                          return note == dnn::kNondeterministic || (exact_ && note == dnn::kTensorCore) ||
                                 (wide_ && note == dnn::kDownConvertInputs);
                        });
  }

  const Plan* make_plan(dnn::Handle handle, Descriptor& config) {
    if (!acceptable(config)) return nullptr;
    Descriptor descriptor(Kind::kPlan);
    descriptor.set(attribute::kPlanHandle, handle).set(attribute::kPlanConfig, config.raw()).finalize();
    std::int64_t workspace = 0;
    descriptor.get(attribute::kPlanWorkspace, std::span(&workspace, 1));
    constexpr std::int64_t kMostWorkspace = std::int64_t{1} << 30;
    if (descriptor.status() != dnn::kOk || workspace > kMostWorkspace) return nullptr;
    plans_.push_back(std::make_unique<Plan>(Plan{std::move(descriptor), static_cast<std::size_t>(workspace)}));
    return plans_.back().get();
  }

  const bool exact_;  // float32 without TF32
  const bool wide_;   // float32: not to be rounded to half
  dnn::Status status_ = dnn::kOk;
  std::vector<Descriptor> parts_;  // what the graph is made of; the graph itself last
  std::mutex mutex_;               // over the following
  std::vector<Descriptor> configs_;
  std::size_t next_ = 0;
  std::vector<std::unique_ptr<Plan>> plans_;
  std::atomic<const Plan*> current_{nullptr};
};

using Problems = std::unordered_map<Key, std::shared_ptr<Problem>, KeyHash>;
constexpr std::size_t kMostProblems = 4096;  // a dynamic batch may go through many

// Of all handles.
class ProblemTable {
 public:
  template <class Make>
  std::shared_ptr<Problem> find_or_make(const Key& key, Make&& make) {
    const std::lock_guard lock(mutex_);
    if (const auto found = problems_.find(key); found != problems_.end()) return found->second;
    if (problems_.size() >= kMostProblems) problems_.clear();
    return problems_.emplace(key, make()).first->second;
  }

 private:
  std::mutex mutex_;
  Problems problems_;
};

// A handle, and the problems that it has met: they are looked up without a lock.
struct HandleState {
  dnn::Handle handle = nullptr;
  Stream stream = nullptr;
  bool has_stream = false;
  Problems problems;
};

Problem& problem_for(HandleState& state, const DnnConvolution& problem, const Pointers& pointers, int device) {
  static auto& table = *new ProblemTable;
  const Key key = key_of(problem, pointers, device);
  if (const auto found = state.problems.find(key); found != state.problems.end()) [[likely]]
    return *found->second;
  if (state.problems.size() >= kMostProblems) state.problems.clear();
  auto made = table.find_or_make(key, [&] { return std::make_shared<Problem>(state.handle, problem, pointers); });
  return *state.problems.emplace(key, std::move(made)).first->second;
}

dnn::Status execute(const dnn::Functions& api, dnn::Handle handle, const Problem::Plan& plan, const Pointers& pointers,
                    const void* workspace) {
  Descriptor pack(Kind::kVariantPack);
  pack.set(attribute::kPackIds, std::span<const std::int64_t>(kIds))
      .set(attribute::kPackPointers, std::span<const void* const>(pointers))
      .set(attribute::kPackWorkspace, workspace)
      .finalize();
  dnn::check_status(pack.status(), "a variant pack");
  return api.execute(handle, plan.descriptor.raw(), pack.raw());
}

HandlePool<HandleState>& handles() {
  static auto& pool = *new HandlePool<HandleState>;
  return pool;
}

}  // namespace

bool dnn_convolution(const DnnConvolution& problem, const void* input, const void* weight, void* output, int device,
                     Stream stream) {
  const dnn::Functions& api = dnn::functions();
  // Making handles and plans allocates and loads code, which stream capture in strict mode would refuse.
  const RelaxedCapture relaxed;
  const auto state = handles().take(device, [&] {
    auto made = std::make_unique<HandleState>();
    dnn::check_status(api.create(&made->handle), "cudnnCreate");
    return made;
  });
  const Pointers pointers{input, weight, output};
  Problem& described = problem_for(*state, problem, pointers, device);
  if (!state->has_stream || state->stream != stream) {
    dnn::check_status(api.set_stream(state->handle, stream), "cudnnSetStream");
    state->stream = stream;
    state->has_stream = true;
  }
  const Problem::Plan* plan = described.plan(state->handle);
  while (plan != nullptr) {
    const StorageRef workspace = plan->workspace == 0 ? StorageRef() : allocate(plan->workspace, device);
    const dnn::Status status =
        execute(api, state->handle, *plan, pointers, plan->workspace == 0 ? nullptr : workspace->data());
    if (!dnn::refused(status)) {
      dnn::check_status(status, "cudnnBackendExecute");
      return true;
    }
    plan = described.plan(state->handle, plan);
  }
  return false;
}

}  // namespace untorch::cuda
