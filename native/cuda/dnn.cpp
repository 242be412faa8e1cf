// Convolution plans: one for each problem and device, shared by the handles.
//
// The engine configurations of a problem come from cuDNN's heuristics, mode A first, then its fallback list; the first
// one that is accurate enough and can be finalized becomes the plan. A repeated call costs a lookup, a variant pack
// and the launch.
//
// Sums and ReLU behind a convolution cost nothing in kernels that cuDNN brings compiled. Others are compiled when the
// plan is made, for 0.2 to 0.9 s each: fused problems do without them, and have no fallback list.
#include "cuda/dnn.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <vector>

#include "cuda/device.h"
#include "cuda/dnn_library.h"
#include "cuda/handle_pool.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

using dnn::Attribute;
using dnn::Descriptor;
using dnn::Kind;
namespace attribute = dnn::attribute;

// The tensors in a variant pack; those between operations have later ids.
enum Operand : std::size_t { kInput, kWeight, kOutput, kBias, kResidual, kOperands };
using Pointers = std::array<const void*, kOperands>;  // null: the problem has no such operand
constexpr std::int64_t id_of(std::size_t operand) noexcept { return static_cast<std::int64_t>(operand) + 1; }

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
  // Calls with and without a plan are apart, whichever comes first.
  for (const bool flag : {s.channels_last, p.transposed, p.tf32, p.bias, p.residual, p.relu, !p.plan.empty()}) {
    rest = rest << 1 | flag;
  }
  key[at++] = rest;
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

// A plan without its algorithm: the list of algorithms is of a cuDNN, a GPU and sizes.
std::string plan_text(const DnnConvolution& problem, int device) {
  const auto& s = problem.shape;
  std::ostringstream text;
  text << "cudnn=" << dnn::functions().version << " gpu=" << device_properties(device).name << " input=" << s.batch;
  for (const std::int64_t size : s.input) text << 'x' << size;
  text << (problem.fused() ? " fused algorithm=" : " algorithm=");
  return text.str();
}

// A problem as cuDNN describes it, and its plan.
class Problem {
 public:
  // When cuDNN refuses the problem, there is no plan.
  Problem(dnn::Handle handle, const DnnConvolution& problem, const Pointers& pointers, int device)
      : exact_(problem.dtype == DType::kFloat32 && !problem.tf32),
        wide_(problem.dtype == DType::kFloat32),
        fused_(problem.fused()) {
    describe(handle, problem, pointers);
    if (!dnn::refused(status_)) {
      dnn::check_status(status_, "describing the convolution");
      find_configs(dnn::kModeA);
      prefer(problem, device);
    } else {
      asked_fallback_ = true;
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
    current = next_plan(handle);
    if (current == nullptr && !fused_ && !asked_fallback_) {
      asked_fallback_ = true;
      find_configs(dnn::kModeFallback);
      current = next_plan(handle);
    }
    current_.store(current, std::memory_order_release);
    return current;
  }

  // Calls with each plan in turn, at most kMostTuned. Not with those that are compiled now: there may be dozens.
  template <class Visit>
  void for_each_plan(dnn::Handle handle, Visit&& visit) {
    constexpr std::size_t kMostTuned = 24;
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < std::min(configs_.size(), kMostTuned); ++i) {
      if (has(configs_[i], attribute::kEngineBehavior, [](std::int32_t n) { return n == dnn::kCompiledAtRunTime; })) {
        continue;
      }
      if (const Plan* made = make_plan(handle, configs_[i])) visit(i, *made);
    }
  }

 private:
  // The algorithm that dnn_tune found comes first.
  void prefer(const DnnConvolution& problem, int device) {
    if (problem.plan.empty()) return;
    const std::string known = plan_text(problem, device);
    if (problem.plan.size() <= known.size() || !problem.plan.starts_with(known)) return;
    std::size_t rank = 0;
    const char* const end = problem.plan.data() + problem.plan.size();
    const auto [rest, error] = std::from_chars(problem.plan.data() + known.size(), end, rank);
    if (error != std::errc() || rest != end || rank >= configs_.size()) return;
    std::rotate(configs_.begin(), configs_.begin() + static_cast<std::ptrdiff_t>(rank),
                configs_.begin() + static_cast<std::ptrdiff_t>(rank) + 1);
  }

  // Finalized, and kept for as long as the graph needs it.
  Descriptor& keep(Descriptor descriptor) {
    if (status_ == dnn::kOk) status_ = descriptor.finalize().status();
    parts_.push_back(std::move(descriptor));
    return parts_.back();
  }

  // [n, c, spatial…] of `n` spatial dimensions, dense in the format.
  struct Sizes {
    std::int64_t batch, channels;
    std::array<std::int64_t, 3> spatial;
    std::size_t n;
    bool channels_last;
  };

  dnn::RawDescriptor tensor(const Sizes& of, std::int32_t type, std::int64_t id, std::int64_t alignment,
                            bool between = false) {
    const std::size_t ndim = of.n + 2;
    std::array<std::int64_t, 5> sizes{of.batch, of.channels}, strides{};
    for (std::size_t d = 0; d < of.n; ++d) sizes[2 + d] = of.spatial[3 - of.n + d];
    std::int64_t step = 1;
    if (of.channels_last) {
      strides[1] = 1;
      step = of.channels;
    }
    for (std::size_t d = ndim - 1; d >= (of.channels_last ? 2u : 1u); --d) {
      strides[d] = step;
      step *= sizes[d];
    }
    strides[0] = step;
    Descriptor made(Kind::kTensor);
    made.set(attribute::kTensorType, type)
        .set(attribute::kTensorSizes, std::span<const std::int64_t>(sizes.data(), ndim))
        .set(attribute::kTensorStrides, std::span<const std::int64_t>(strides.data(), ndim))
        .set(attribute::kTensorId, id)
        .set(attribute::kTensorAlignment, alignment);
    if (between) made.set(attribute::kTensorVirtual, true);
    return keep(std::move(made)).raw();
  }

  // y = mode(x, b); b is null for an operation of one operand.
  dnn::RawDescriptor pointwise(std::int32_t mode, dnn::RawDescriptor x, dnn::RawDescriptor b, dnn::RawDescriptor y) {
    Descriptor step(Kind::kPointwise);
    step.set(attribute::kPointwiseMode, mode).set(attribute::kPointwiseType, dnn::kFloat);
    // One of the kernels for float32 images (of TF32, 1 x 1) gives 0 for NaN all the same.
    if (mode == dnn::kRelu) step.set(attribute::kPointwiseNan, dnn::kPropagateNan);
    const auto raw = keep(std::move(step)).raw();
    Descriptor operation(Kind::kPointwiseOperation);
    operation.set(attribute::kPointwiseDescriptor, raw).set(attribute::kPointwiseX, x);
    if (b != nullptr) operation.set(attribute::kPointwiseB, b);
    operation.set(attribute::kPointwiseY, y);
    return keep(std::move(operation)).raw();
  }

  void describe(dnn::Handle handle, const DnnConvolution& p, const Pointers& pointers) {
    const kernels::ConvolutionShape& s = p.shape;
    parts_.reserve(20);
    // cuDNN needs at least two spatial dimensions.
    const bool three = s.input[0] != 1 || s.kernel[0] != 1 || s.output[0] != 1 || s.padding[0] != 0;
    const std::size_t n = three ? 3 : 2;
    const std::int64_t rows = (p.transposed ? s.in_channels : s.out_channels) * s.groups;
    const std::int64_t columns = p.transposed ? s.out_channels : s.in_channels;
    const std::int32_t type = dnn::type_of(p.dtype);
    const Sizes result{s.batch, s.out_channels * s.groups, s.output, n, s.channels_last};
    const auto operand = [&](const Sizes& sizes, Operand which) {
      return tensor(sizes, type, id_of(which), alignment_of(pointers[which]));
    };
    const auto x = operand({s.batch, s.in_channels * s.groups, s.input, n, s.channels_last}, kInput);
    const auto w = operand({rows, columns, s.kernel, n, s.channels_last}, kWeight);
    const auto y = operand(result, kOutput);
    // What follows the convolution; its result is y or, before another step, a float32 value between two.
    std::vector<std::pair<std::int32_t, dnn::RawDescriptor>> steps;
    if (p.residual) steps.emplace_back(dnn::kAdd, operand(result, kResidual));
    if (p.bias) steps.emplace_back(dnn::kAdd, operand({1, result.channels, {1, 1, 1}, n, s.channels_last}, kBias));
    if (p.relu) steps.emplace_back(dnn::kRelu, nullptr);
    std::int64_t between = id_of(kOperands);
    const auto result_before = [&](std::size_t step) {
      if (step == steps.size()) return y;
      constexpr std::int64_t kMost = 16;
      return tensor(result, dnn::kFloat, between++, kMost, true);
    };

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
    const dnn::RawDescriptor sum = result_before(0);
    Descriptor operation(p.transposed ? Kind::kConvolutionBackwardData : Kind::kConvolutionForward);
    if (p.transposed) {
      operation.set(attribute::kBackwardConvolution, raw)
          .set(attribute::kBackwardDy, x)
          .set(attribute::kBackwardW, w)
          .set(attribute::kBackwardDx, sum)
          .set(attribute::kBackwardAlpha, scalar, 1, one)
          .set(attribute::kBackwardBeta, scalar, 1, zero);
    } else {
      operation.set(attribute::kForwardConvolution, raw)
          .set(attribute::kForwardX, x)
          .set(attribute::kForwardW, w)
          .set(attribute::kForwardY, sum)
          .set(attribute::kForwardAlpha, scalar, 1, one)
          .set(attribute::kForwardBeta, scalar, 1, zero);
    }
    std::vector<dnn::RawDescriptor> operations{keep(std::move(operation)).raw()};
    dnn::RawDescriptor value = sum;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const dnn::RawDescriptor next = result_before(i + 1);
      operations.push_back(pointwise(steps[i].first, value, steps[i].second, next));
      value = next;
    }
    Descriptor graph(Kind::kGraph);
    graph.set(attribute::kGraphHandle, handle)
        .set(attribute::kGraphOperations, std::span<const dnn::RawDescriptor>(operations));
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

  // Whether a note in the list of the configuration's engine is unwanted; true when the list cannot be read.
  template <class Unwanted>
  static bool has(Descriptor& config, Attribute<std::int32_t> list, Unwanted&& unwanted) {
    Descriptor engine(Kind::kEngine);
    dnn::RawDescriptor raw = engine.raw();
    config.get(attribute::kConfigEngine, std::span(&raw, 1));
    std::array<std::int32_t, dnn::kNotes> notes{};
    const auto count = static_cast<std::size_t>(engine.get(list, std::span(notes)));
    const auto end = notes.begin() + static_cast<std::ptrdiff_t>(std::min(count, notes.size()));
    return engine.status() != dnn::kOk || std::any_of(notes.begin(), end, unwanted);
  }

  // Deterministic, no less accurate than asked for, and if anything is fused, compiled already.
  bool acceptable(Descriptor& config) const {
    const auto compiled_now = [](std::int32_t note) { return note == dnn::kCompiledAtRunTime; };
    if (fused_ && has(config, attribute::kEngineBehavior, compiled_now)) return false;
    return !has(config, attribute::kEngineNotes, [&](std::int32_t note) {
      return note == dnn::kNondeterministic || (exact_ && note == dnn::kTensorCore) ||
             (wide_ && note == dnn::kDownConvertInputs);
    });
  }

  const Plan* next_plan(dnn::Handle handle) {
    const Plan* made = nullptr;
    while (made == nullptr && next_ < configs_.size()) made = make_plan(handle, configs_[next_++]);
    return made;
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
  const bool fused_;
  dnn::Status status_ = dnn::kOk;
  std::vector<Descriptor> parts_;  // what the graph is made of; the graph itself last
  std::mutex mutex_;               // over the following
  std::vector<Descriptor> configs_;
  std::size_t next_ = 0;
  bool asked_fallback_ = false;
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
  auto made =
      table.find_or_make(key, [&] { return std::make_shared<Problem>(state.handle, problem, pointers, device); });
  return *state.problems.emplace(key, std::move(made)).first->second;
}

dnn::Status execute(const dnn::Functions& api, dnn::Handle handle, const Problem::Plan& plan, const Pointers& pointers,
                    const void* workspace) {
  std::array<std::int64_t, kOperands> ids{};
  Pointers given{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < pointers.size(); ++i) {
    if (pointers[i] == nullptr) continue;
    ids[count] = id_of(i);
    given[count++] = pointers[i];
  }
  Descriptor pack(Kind::kVariantPack);
  pack.set(attribute::kPackIds, std::span<const std::int64_t>(ids.data(), count))
      .set(attribute::kPackPointers, std::span<const void* const>(given.data(), count))
      .set(attribute::kPackWorkspace, workspace)
      .finalize();
  dnn::check_status(pack.status(), "a variant pack");
  return api.execute(handle, plan.descriptor.raw(), pack.raw());
}

HandlePool<HandleState>& handles() {
  static auto& pool = *new HandlePool<HandleState>;
  return pool;
}

auto take_handle(int device) {
  return handles().take(device, [] {
    auto made = std::make_unique<HandleState>();
    dnn::check_status(dnn::functions().create(&made->handle), "cudnnCreate");
    return made;
  });
}

void use_stream(HandleState& state, Stream stream) {
  if (state.has_stream && state.stream == stream) return;
  dnn::check_status(dnn::functions().set_stream(state.handle, stream), "cudnnSetStream");
  state.stream = stream;
  state.has_stream = true;
}

Pointers pointers_of(const DnnConvolution& problem, const DnnOperands& operands) {
  return {operands.input, operands.weight, operands.output, problem.bias ? operands.bias : nullptr,
          problem.residual ? operands.residual : nullptr};
}

// Microseconds that a plan takes on the GPU: the least of some replays of a graph of launches, since others may use the
// GPU meanwhile. Negative when it fails.
class PlanTimer {
 public:
  // The stream must be one that can be captured.
  PlanTimer(dnn::Handle handle, const Pointers& pointers, int device, Stream stream)
      : handle_(handle), pointers_(pointers), device_(device), stream_(stream) {
    for (Event& event : events_) check_driver(api_.event_create(&event, 0), kDoing);
  }
  ~PlanTimer() {
    for (const Event event : events_) (void)api_.event_destroy(event);
  }
  PlanTimer(const PlanTimer&) = delete;
  PlanTimer& operator=(const PlanTimer&) = delete;

  double operator()(const Problem::Plan& plan) {
    const StorageRef workspace = plan.workspace == 0 ? StorageRef() : allocate(plan.workspace, device_);
    const void* const memory = plan.workspace == 0 ? nullptr : workspace->data();
    const auto launch = [&] { return execute(dnn::functions(), handle_, plan, pointers_, memory) == dnn::kOk; };
    if (!launch()) return -1;  // loads its code
    check_driver(api_.stream_synchronize(stream_), kDoing);
    constexpr int kThreadLocal = 1;
    check_driver(api_.capture_begin(stream_, kThreadLocal), kDoing);
    bool done = true;
    for (int i = 0; i < kLaunches; ++i) done = launch() && done;
    Graph graph = nullptr;
    check_driver(api_.capture_end(stream_, &graph), kDoing);
    GraphExec replay = nullptr;
    const Result made = api_.graph_instantiate(&replay, graph, 0);
    (void)api_.graph_destroy(graph);
    check_driver(made, kDoing);
    const double us = done ? fastest_of(replay) : -1;
    (void)api_.graph_exec_destroy(replay);
    return us;
  }

 private:
  static constexpr int kRuns = 7, kLaunches = 20;
  static constexpr const char* kDoing = "timing convolutions";

  double fastest_of(GraphExec replay) {
    double fastest = std::numeric_limits<double>::infinity();
    for (int run = -1; run < kRuns; ++run) {  // the first one warms up
      Result failed = api_.event_record(events_[0], stream_);
      if (failed == 0) failed = api_.graph_launch(replay, stream_);
      if (failed == 0) failed = api_.event_record(events_[1], stream_);
      if (failed == 0) failed = api_.event_synchronize(events_[1]);
      float milliseconds = 0;
      if (failed == 0) failed = api_.event_elapsed(&milliseconds, events_[0], events_[1]);
      if (failed != 0) return -1;
      if (run >= 0) fastest = std::min(fastest, static_cast<double>(milliseconds) * 1e3 / kLaunches);
    }
    return fastest;
  }

  const Driver& api_ = driver();
  dnn::Handle handle_;
  const Pointers& pointers_;
  int device_;
  Stream stream_;
  std::array<Event, 2> events_{};
};

}  // namespace

bool dnn_convolution(const DnnConvolution& problem, const DnnOperands& operands, int device, Stream stream) {
  const dnn::Functions& api = dnn::functions();
  // Making handles and plans allocates and loads code, which stream capture in strict mode would refuse.
  const RelaxedCapture relaxed;
  const auto state = take_handle(device);
  const Pointers pointers = pointers_of(problem, operands);
  Problem& described = problem_for(*state, problem, pointers, device);
  use_stream(*state, stream);
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

DnnTuning dnn_tune(const DnnConvolution& problem, const DnnOperands& operands, int device, Stream stream) {
  const RelaxedCapture relaxed;
  const auto state = take_handle(device);
  const Pointers pointers = pointers_of(problem, operands);
  use_stream(*state, stream);
  DnnConvolution plain = problem;
  plain.plan = {};
  Problem described(state->handle, plain, pointers, device);  // apart from those of calls, whose plans stay
  PlanTimer time(state->handle, pointers, device, stream);
  DnnTuning found;
  std::size_t timed = 0, best = 0;
  described.for_each_plan(state->handle, [&](std::size_t rank, const Problem::Plan& plan) {
    const double us = time(plan);
    if (us < 0) return;
    if (timed++ == 0) found.first_us = us;
    if (found.best_us == 0 || us < found.best_us) found.best_us = us, best = rank;
  });
  if (timed > 1) found.plan = plan_text(problem, device) + std::to_string(best);
  return found;
}

}  // namespace untorch::cuda
