// Convolution by cuDNN: one plan for each problem and device, shared by the handles. A repeated call costs a lookup, a
// variant pack and cuDNN's execution; from the third one on, where cuDNN does no more than launch kernels, their
// launch.
#include "cuda/dnn.h"

#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <span>

#include "cuda/dnn_handles.h"
#include "cuda/dnn_problem.h"
#include "cuda/memory_pool.h"
#include "cuda/recorded_launches.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

using dnn::HandleState;
using dnn::Key;
using dnn::Plan;
using dnn::Pointers;
using dnn::Problem;

Key key_of(const DnnConvolution& p, const Pointers& pointers, int device) noexcept {
  Key key{};
  std::size_t at = 0;
  const auto& s = p.shape;
  for (const std::int64_t value : {s.batch, s.groups, s.in_channels, s.out_channels}) key[at++] = value;
  for (const auto* list : {&s.input, &s.kernel, &s.output, &s.stride, &s.padding, &s.dilation}) {
    for (const std::int64_t value : *list) key[at++] = value;
  }
  std::int64_t rest = static_cast<std::int64_t>(p.dtype);
  for (const void* pointer : pointers) rest = rest << 5 | dnn::alignment_of(pointer);
  // Calls with and without a plan are apart, whichever comes first.
  for (const bool flag : {s.channels_last, p.transposed, p.tf32, p.bias, p.residual, p.relu, !p.plan.empty()}) {
    rest = rest << 1 | flag;
  }
  key[at++] = rest;
  key[at++] = device;
  return key;
}

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
  dnn::Problems problems_;
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

// The operands' addresses and the workspace's, without those that there are none of.
class Addresses {
 public:
  Addresses(const Pointers& pointers, const void* workspace) {
    for (const void* const pointer : pointers) add(pointer);
    add(workspace);
  }
  std::span<const DevicePtr> all() const noexcept { return {values_.data(), count_}; }

 private:
  void add(const void* pointer) noexcept {
    if (pointer != nullptr) values_[count_++] = reinterpret_cast<DevicePtr>(pointer);
  }

  std::array<DevicePtr, dnn::kOperands + 1> values_{};
  std::size_t count_ = 0;
};

// Leaves the kernels of the plan's calls with it. Where that fails calls stay cuDNN's.
void record(HandleState& state, Plan& plan, const Pointers& pointers, const void* workspace) try {
  if (state.for_recording == nullptr) {
    check_driver(driver().stream_create(&state.for_recording, kStreamNonBlocking), "creating a stream");
  }
  state.use_stream(state.for_recording);
  const auto enqueue = [&](std::span<const DevicePtr> addresses) {
    Pointers moved{};
    std::size_t at = 0;
    for (std::size_t i = 0; i < pointers.size(); ++i) {
      if (pointers[i] != nullptr) moved[i] = reinterpret_cast<const void*>(addresses[at++]);
    }
    return dnn::execute(state.handle, plan, moved,
                        workspace == nullptr ? nullptr : reinterpret_cast<const void*>(addresses[at])) == dnn::kOk;
  };
  plan.recorded = RecordedLaunches::record(Addresses(pointers, workspace).all(), state.for_recording, enqueue);
  plan.launches.store(plan.recorded.get(), std::memory_order_release);
} catch (const std::exception&) {
}

}  // namespace

bool dnn_convolution(const DnnConvolution& problem, const DnnOperands& operands, int device, Stream stream) {
  // Making handles and plans allocates and loads code, which stream capture in strict mode would refuse.
  const RelaxedCapture relaxed;
  const auto state = dnn::take_handle(device);
  const Pointers pointers = dnn::pointers_of(problem, operands);
  Problem& described = problem_for(*state, problem, pointers, device);
  Plan* plan = described.plan(state->handle);
  while (plan != nullptr) {
    const StorageRef memory = plan->workspace == 0 ? StorageRef() : allocate(plan->workspace, device);
    const void* const workspace = plan->workspace == 0 ? nullptr : memory->data();
    if (const RecordedLaunches* const launches = plan->launches.load(std::memory_order_acquire)) [[likely]] {
      launches->launch(Addresses(pointers, workspace).all(), stream);
      return true;
    }
    state->use_stream(stream);
    const dnn::Status status = dnn::execute(state->handle, *plan, pointers, workspace);
    if (!dnn::refused(status)) {
      dnn::check_status(status, "cudnnBackendExecute");
      // Shapes that come once are not worth it, and the first call loads code.
      if (!is_capturing(stream) && plan->calls.fetch_add(1) == 1) record(*state, *plan, pointers, workspace);
      return true;
    }
    plan = described.plan(state->handle, plan);
  }
  return false;
}

}  // namespace untorch::cuda
