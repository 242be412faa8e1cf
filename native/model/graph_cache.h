// CUDA graphs of a method, captured as shapes of inputs come, so that a call is a replay without its caller's doing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/fork.h"
#include "model/view.h"
#include "tensor/tensor.h"

namespace untorch {

class CudaGraph;
class Method;

class GraphCache {
 public:
  // At most `most` graphs. All of them have their memory in common, and their replays are one after another.
  GraphCache(Method& method, std::size_t most);
  ~GraphCache();
  GraphCache(const GraphCache&) = delete;
  GraphCache& operator=(const GraphCache&) = delete;

  // Replays the call if there is a graph for these inputs: outputs and aliases are those of Method::run, in memory of
  // their own. Captures it when such inputs come for the second time; false then, too, if that cannot be done, and
  // while the call stream is being captured itself. The inputs have been checked.
  bool run(std::span<const untorch_view> inputs, std::span<TensorPtr> outputs, std::span<std::int32_t> aliases);

  struct Report {
    std::size_t graphs = 0;
    std::string refusal;  // why calls are not captured; empty: they are
  };
  Report report();
  // Frees the graphs; from then on there are none.
  void clear() noexcept;

 private:
  using Key = std::vector<std::int64_t>;
  struct Entry {
    std::uint64_t calls = 0, last_used = 0;
    std::shared_ptr<CudaGraph> graph;
  };

  static Key key_of(std::span<const untorch_view> inputs);
  std::shared_ptr<CudaGraph> find(const Key& key, std::shared_ptr<CudaGraph>& shares, bool& captures);
  void keep(const Key& key, std::shared_ptr<CudaGraph> graph);
  // Gives what goes: the entry that was used longest ago, of those with a graph or of those without.
  std::shared_ptr<CudaGraph> drop_oldest(bool with_graph);

  Method& method_;
  const std::size_t most_;
  fork::Mutex mutex_;  // over the following
  std::map<Key, Entry> entries_;
  std::uint64_t clock_ = 0;
  bool capturing_ = false, closed_ = false;
  std::string refusal_;
  const bool serves_;
};

}  // namespace untorch
