// Times cuDNN's algorithms for a convolution.
#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "cuda/dnn.h"
#include "cuda/dnn_handles.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

// Microseconds that a plan takes on the GPU: the least of some replays of a graph of launches, since others may use the
// GPU meanwhile. Negative when it fails.
class PlanTimer {
 public:
  // The stream must be one that can be captured.
  PlanTimer(dnn::Handle handle, const dnn::Pointers& pointers, int device, Stream stream)
      : handle_(handle), pointers_(pointers), device_(device), stream_(stream) {
    for (Event& event : events_) check_driver(api_.event_create(&event, 0), kDoing);
  }
  ~PlanTimer() {
    for (const Event event : events_) (void)api_.event_destroy(event);
  }
  PlanTimer(const PlanTimer&) = delete;
  PlanTimer& operator=(const PlanTimer&) = delete;

  double operator()(const dnn::Plan& plan) {
    const StorageRef workspace = plan.workspace == 0 ? StorageRef() : allocate(plan.workspace, device_);
    const void* const memory = plan.workspace == 0 ? nullptr : workspace->data();
    const auto launch = [&] { return dnn::execute(handle_, plan, pointers_, memory) == dnn::kOk; };
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
  const dnn::Pointers& pointers_;
  int device_;
  Stream stream_;
  std::array<Event, 2> events_{};
};

}  // namespace

DnnTuning dnn_tune(const DnnConvolution& problem, const DnnOperands& operands, int device, Stream stream) {
  const RelaxedCapture relaxed;
  const auto state = dnn::take_handle(device);
  const dnn::Pointers pointers = dnn::pointers_of(problem, operands);
  state->use_stream(stream);
  DnnConvolution plain = problem;
  plain.plan = {};
  dnn::Problem described(state->handle, plain, pointers, device);  // apart from those of calls, whose plans stay
  PlanTimer time(state->handle, pointers, device, stream);
  DnnTuning found;
  std::size_t timed = 0, best = 0;
  described.for_each_plan(state->handle, [&](std::size_t rank, const dnn::Plan& plan) {
    const double us = time(plan);
    if (us < 0) return;
    if (timed++ == 0) found.first_us = us;
    if (found.best_us == 0 || us < found.best_us) found.best_us = us, best = rank;
  });
  if (timed > 1) found.plan = dnn::plan_text(problem, device) + std::to_string(best);
  return found;
}

}  // namespace untorch::cuda
