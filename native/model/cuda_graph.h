// One call of a CUDA method as a CUDA graph, replayed for the price of one launch.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cuda/graph_nodes.h"
#include "cuda/memory_pool.h"
#include "model/packed_inputs.h"
#include "model/program.h"

namespace untorch {

class CudaGraph {
 public:
  // Captures the call on `inputs` (their values do not matter, nothing runs). Throws what the call throws, and
  // kUnsupported for a model that has to look at results in between.
  // shares: another graph on the same device, whose memory serves this one, too. Their replays are in order, whatever
  // streams they are on, and each overwrites the outputs of all. May be null.
  // kCopies: a replay gives outputs in memory of their own, and replays are in order in any case.
  enum class Outputs : std::uint8_t { kViews, kCopies };
  CudaGraph(Method& method, std::span<const untorch_view> inputs, CudaGraph* shares = nullptr,
            Outputs outputs = Outputs::kViews);
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  // Replays on the call stream. Outputs are new handles on the graph's own memory, which the next replay overwrites, or
  // copies; aliases[i]: the input whose memory output i is, or -1.
  void run(std::span<const untorch_view> inputs, std::span<TensorPtr> outputs, std::span<std::int32_t> aliases);
  std::size_t num_outputs() const noexcept { return captured_.outputs.size(); }
  // Inputs that a replay reads where they lie, without a copy.
  std::size_t num_bindable() const noexcept;
  // Whether the method writes into this input: the graph then works on the caller's memory alone.
  bool writes(std::size_t input) const noexcept;

 private:
  // What one capture made.
  struct Captured {
    std::shared_ptr<cuda::Arena> arena;
    std::vector<TensorPtr> inputs;   // static memory, a copy on the CPU of an input that belongs there, or the
                                     // caller's memory of an input that is written
    std::vector<TensorPtr> outputs;  // null for None
    PackedInputs packed;             // the small ones of `inputs`
    StorageRef random_cell;          // seed and position for a replay's random numbers
    std::uint64_t random_count = 0;  // positions that a replay uses
    cuda::Graph graph = nullptr;
  };
  // What graphs that share it have in common.
  struct Memory {
    std::shared_ptr<cuda::Arena> arena;
    std::shared_ptr<cuda::Arena> inputs;  // another one once the memory is shared: inputs are each graph's own
    std::mutex mutex;                     // held while one is captured, or launched
    bool shared = false;
    cuda::Event last = nullptr;  // behind the last replay
    ~Memory();
  };
  // A kernel, copy or fill that takes an input's address: where in its parameters the address lies.
  struct Patch {
    std::size_t node, parameter, byte;
    std::size_t input;
    std::size_t distance;  // from the input's start
  };
  struct Node : cuda::AddressNode {
    std::vector<void*> pointers;  // to its values
  };

  Captured capture(std::span<const untorch_view> inputs, std::shared_ptr<cuda::Arena> arena, cuda::Arena& input_arena);
  // The outputs keep the arena from then on, and leave their blocks to the next capture.
  void lend_outputs();
  // Whether the output is in memory that the captured call allocated; else it is an input's, a state's or a weight's.
  bool is_made_here(const Tensor& output) const;
  // Whether the next replay may overwrite the output, where these inputs are read in place.
  bool is_overwritten(std::size_t output, const std::vector<bool>& in_place) const;
  // The input whose memory the output is, where it is read in place; else -1.
  std::int32_t alias_of(std::size_t output, const std::vector<bool>& in_place) const;
  // Enqueues the copy.
  TensorPtr copy_of(const Tensor& output, cuda::Stream stream) const;
  void find_inputs(const Captured& other);
  bool compare(std::size_t index, const cuda::AddressNode& mine, const cuda::AddressNode& theirs,
               const Captured& other);
  bool explained(cuda::DevicePtr mine, cuda::DevicePtr theirs, const Captured& other, Patch& patch) const;
  void check_written(std::span<const untorch_view> inputs) const;
  void check_signature(std::span<const untorch_view> inputs) const;
  void bind(std::size_t input, cuda::DevicePtr address);
  void release() noexcept;

  Method& method_;
  std::shared_ptr<Container> container_;
  int device_;
  const bool copies_;
  std::shared_ptr<Memory> memory_;
  Captured captured_;
  std::vector<cuda::AllocationRecord> log_, other_log_;
  std::vector<Node> nodes_;
  std::vector<Patch> patches_;
  std::vector<bool> bindable_;
  std::vector<cuda::DevicePtr> bound_;  // where the executable reads each input now
  cuda::GraphExec exec_ = nullptr;
  // Behind the last replay that read the graph's own inputs: what fills them next waits for it.
  cuda::Event read_ = nullptr;
  std::mutex mutex_;
};

}  // namespace untorch
