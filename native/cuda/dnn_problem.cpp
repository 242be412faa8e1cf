// Describes convolutions, and makes plans.
//
// The engine configurations of a problem come from cuDNN's heuristics, mode A first, then its fallback list; the first
// one that is accurate enough and can be finalized becomes the plan.
//
// Sums and ReLU behind a convolution cost nothing in kernels that cuDNN brings compiled. Others are compiled when the
// plan is made, for 0.2 to 0.9 s each: fused problems do without them, and have no fallback list.
#include "cuda/dnn_problem.h"

#include <algorithm>
#include <charconv>
#include <span>
#include <sstream>
#include <utility>

#include "cuda/device.h"

namespace untorch::cuda::dnn {
namespace {

constexpr std::int64_t id_of(std::size_t operand) noexcept { return static_cast<std::int64_t>(operand) + 1; }

// Whether a note in the list of the configuration's engine is unwanted; true when the list cannot be read.
template <class Unwanted>
bool has(Descriptor& config, Attribute<std::int32_t> list, Unwanted&& unwanted) {
  Descriptor engine(Kind::kEngine);
  RawDescriptor raw = engine.raw();
  config.get(attribute::kConfigEngine, std::span(&raw, 1));
  std::array<std::int32_t, kNotes> notes{};
  const auto count = static_cast<std::size_t>(engine.get(list, std::span(notes)));
  const auto end = notes.begin() + static_cast<std::ptrdiff_t>(std::min(count, notes.size()));
  return engine.status() != kOk || std::any_of(notes.begin(), end, unwanted);
}

}  // namespace

Pointers pointers_of(const DnnConvolution& problem, const DnnOperands& operands) noexcept {
  return {operands.input, operands.weight, operands.output, problem.bias ? operands.bias : nullptr,
          problem.residual ? operands.residual : nullptr};
}

std::int64_t alignment_of(const void* pointer) noexcept {
  constexpr std::uintptr_t kMost = 16;  // bytes that kernels load at a time
  const auto address = reinterpret_cast<std::uintptr_t>(pointer) | kMost;
  return static_cast<std::int64_t>(address & (~address + 1));
}

std::string plan_text(const DnnConvolution& problem, int device) {
  const auto& s = problem.shape;
  std::ostringstream text;
  text << "cudnn=" << functions().version << " gpu=" << device_properties(device).name << " input=" << s.batch;
  for (const std::int64_t size : s.input) text << 'x' << size;
  text << (problem.fused() ? " fused algorithm=" : " algorithm=");
  return text.str();
}

Status execute(Handle handle, const Plan& plan, const Pointers& pointers, const void* workspace) {
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
  check_status(pack.status(), "a variant pack");
  return functions().execute(handle, plan.descriptor.raw(), pack.raw());
}

Problem::Problem(Handle handle, const DnnConvolution& problem, const Pointers& pointers, int device)
    : exact_(problem.dtype == DType::kFloat32 && !problem.tf32),
      wide_(problem.dtype == DType::kFloat32),
      fused_(problem.fused()) {
  describe(handle, problem, pointers);
  if (!refused(status_)) {
    check_status(status_, "describing the convolution");
    find_configs(kModeA);
    prefer(problem, device);
  } else {
    asked_fallback_ = true;
  }
}

Plan* Problem::plan(Handle handle, const Plan* refused_one) {
  Plan* current = current_.load(std::memory_order_acquire);
  if (current != refused_one) [[likely]]
    return current;
  const std::lock_guard lock(mutex_);
  current = current_.load(std::memory_order_relaxed);
  if (current != refused_one) return current;
  current = next_plan(handle);
  if (current == nullptr && !fused_ && !asked_fallback_) {
    asked_fallback_ = true;
    find_configs(kModeFallback);
    current = next_plan(handle);
  }
  current_.store(current, std::memory_order_release);
  return current;
}

void Problem::prefer(const DnnConvolution& problem, int device) {
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

Descriptor& Problem::keep(Descriptor descriptor) {
  if (status_ == kOk) status_ = descriptor.finalize().status();
  parts_.push_back(std::move(descriptor));
  return parts_.back();
}

RawDescriptor Problem::tensor(const Sizes& of, std::int32_t type, std::int64_t id, std::int64_t alignment,
                              bool between) {
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

RawDescriptor Problem::pointwise(std::int32_t mode, RawDescriptor x, RawDescriptor b, RawDescriptor y) {
  Descriptor step(Kind::kPointwise);
  step.set(attribute::kPointwiseMode, mode).set(attribute::kPointwiseType, kFloat);
  // One of the kernels for float32 images (of TF32, 1 x 1) gives 0 for NaN all the same.
  if (mode == kRelu) step.set(attribute::kPointwiseNan, kPropagateNan);
  const auto raw = keep(std::move(step)).raw();
  Descriptor operation(Kind::kPointwiseOperation);
  operation.set(attribute::kPointwiseDescriptor, raw).set(attribute::kPointwiseX, x);
  if (b != nullptr) operation.set(attribute::kPointwiseB, b);
  operation.set(attribute::kPointwiseY, y);
  return keep(std::move(operation)).raw();
}

void Problem::describe(Handle handle, const DnnConvolution& p, const Pointers& pointers) {
  const kernels::ConvolutionShape& s = p.shape;
  parts_.reserve(20);
  // cuDNN needs at least two spatial dimensions.
  const bool three = s.input[0] != 1 || s.kernel[0] != 1 || s.output[0] != 1 || s.padding[0] != 0;
  const std::size_t n = three ? 3 : 2;
  const std::int64_t rows = (p.transposed ? s.in_channels : s.out_channels) * s.groups;
  const std::int64_t columns = p.transposed ? s.out_channels : s.in_channels;
  const std::int32_t type = type_of(p.dtype);
  const Sizes result{s.batch, s.out_channels * s.groups, s.output, n, s.channels_last};
  const auto operand = [&](const Sizes& sizes, Operand which) {
    return tensor(sizes, type, id_of(which), alignment_of(pointers[which]));
  };
  const auto x = operand({s.batch, s.in_channels * s.groups, s.input, n, s.channels_last}, kInput);
  const auto w = operand({rows, columns, s.kernel, n, s.channels_last}, kWeight);
  const auto y = operand(result, kOutput);
  // What follows the convolution; its result is y or, before another step, a float32 value between two.
  std::vector<std::pair<std::int32_t, RawDescriptor>> steps;
  if (p.residual) steps.emplace_back(kAdd, operand(result, kResidual));
  if (p.bias) steps.emplace_back(kAdd, operand({1, result.channels, {1, 1, 1}, n, s.channels_last}, kBias));
  if (p.relu) steps.emplace_back(kRelu, nullptr);
  std::int64_t between = id_of(kOperands);
  const auto result_before = [&](std::size_t step) {
    if (step == steps.size()) return y;
    constexpr std::int64_t kMost = 16;
    return tensor(result, kFloat, between++, kMost, true);
  };

  const auto last = [&](const std::array<std::int64_t, 3>& values) {
    return std::span<const std::int64_t>(values.data() + (3 - n), n);
  };
  const bool f64 = p.dtype == DType::kFloat64;
  Descriptor convolution(Kind::kConvolution);
  convolution.set(attribute::kComputeType, f64 ? kDouble : kFloat)
      .set(attribute::kConvolutionMode, kCrossCorrelation)
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
  const RawDescriptor sum = result_before(0);
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
  std::vector<RawDescriptor> operations{keep(std::move(operation)).raw()};
  RawDescriptor value = sum;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const RawDescriptor next = result_before(i + 1);
    operations.push_back(pointwise(steps[i].first, value, steps[i].second, next));
    value = next;
  }
  Descriptor graph(Kind::kGraph);
  graph.set(attribute::kGraphHandle, handle)
      .set(attribute::kGraphOperations, std::span<const RawDescriptor>(operations));
  keep(std::move(graph));
}

void Problem::find_configs(std::int32_t mode) {
  Descriptor heuristics(Kind::kHeuristics);
  heuristics.set(attribute::kHeuristicsGraph, parts_.back().raw()).set(attribute::kHeuristicsMode, mode).finalize();
  if (heuristics.status() != kOk) return;  // a problem that this mode does not know
  const std::int64_t count = heuristics.get(attribute::kHeuristicsResults, std::span<RawDescriptor>());
  std::vector<Descriptor> found;
  std::vector<RawDescriptor> raw;
  for (std::int64_t i = 0; i < count; ++i) raw.push_back(found.emplace_back(Kind::kEngineConfig).raw());
  const auto given = static_cast<std::size_t>(
      std::max<std::int64_t>(0, heuristics.get(attribute::kHeuristicsResults, std::span(raw))));
  for (std::size_t i = 0; i < std::min(given, found.size()); ++i) configs_.push_back(std::move(found[i]));
}

bool Problem::is_compiled_now(Descriptor& config) {
  return has(config, attribute::kEngineBehavior, [](std::int32_t note) { return note == kCompiledAtRunTime; });
}

bool Problem::is_acceptable(Descriptor& config) const {
  if (fused_ && is_compiled_now(config)) return false;
  return !has(config, attribute::kEngineNotes, [&](std::int32_t note) {
    return note == kNondeterministic || (exact_ && note == kTensorCore) || (wide_ && note == kDownConvertInputs);
  });
}

Plan* Problem::next_plan(Handle handle) {
  Plan* made = nullptr;
  while (made == nullptr && next_ < configs_.size()) made = make_plan(handle, configs_[next_++]);
  return made;
}

Plan* Problem::make_plan(Handle handle, Descriptor& config) {
  if (!is_acceptable(config)) return nullptr;
  Descriptor descriptor(Kind::kPlan);
  descriptor.set(attribute::kPlanHandle, handle).set(attribute::kPlanConfig, config.raw()).finalize();
  std::int64_t workspace = 0;
  descriptor.get(attribute::kPlanWorkspace, std::span(&workspace, 1));
  constexpr std::int64_t kMostWorkspace = std::int64_t{1} << 30;
  if (descriptor.status() != kOk || workspace > kMostWorkspace) return nullptr;
  plans_.push_back(std::make_unique<Plan>(std::move(descriptor), static_cast<std::size_t>(workspace)));
  return plans_.back().get();
}

}  // namespace untorch::cuda::dnn
