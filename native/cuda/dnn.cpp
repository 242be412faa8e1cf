// Convolution by cuDNN: one plan for each problem and device, shared by the handles. A repeated call costs a lookup, a
// variant pack and cuDNN's execution; from the third one on, where cuDNN does no more than launch kernels, their
// launch.
#include "cuda/dnn.h"

#include <array>
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

OperandAddresses addresses_of(const Pointers& pointers, const void* workspace) noexcept {
  OperandAddresses addresses;
  for (const void* const pointer : pointers) addresses.add(pointer);
  addresses.add(workspace);
  return addresses;
}
static_assert(dnn::kOperands + 1 <= OperandAddresses::kMost);

// The call with its operands at other addresses.
dnn::Status execute_at(HandleState& state, const Plan& plan, const Pointers& pointers,
                       std::span<const DevicePtr> addresses, Stream stream) {
  Pointers moved{};
  std::size_t at = 0;
  for (std::size_t i = 0; i < pointers.size(); ++i) {
    if (pointers[i] != nullptr) moved[i] = reinterpret_cast<const void*>(addresses[at++]);
  }
  const void* const workspace = plan.workspace == 0 ? nullptr : reinterpret_cast<const void*>(addresses[at]);
  state.use_stream(stream);
  return dnn::execute(state.handle, plan, moved, workspace);
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
    const OperandAddresses addresses = addresses_of(pointers, workspace);
    if (const RecordedLaunches* const launches = plan->repeated.launches()) [[likely]] {
      launches->launch(addresses.all(), stream);
      return true;
    }
    state->use_stream(stream);
    const dnn::Status status = dnn::execute(state->handle, *plan, pointers, workspace);
    if (!dnn::refused(status)) {
      dnn::check_status(status, "cudnnBackendExecute");
      plan->repeated.called(device, stream, addresses.all(), [&](std::span<const DevicePtr> moved, Stream recording) {
        return execute_at(*state, *plan, pointers, moved, recording) == dnn::kOk;
      });
      return true;
    }
    plan = described.plan(state->handle, plan);
  }
  return false;
}

}  // namespace untorch::cuda
