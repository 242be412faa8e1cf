// Finds, captures and drops the graphs of a method.
#include "model/graph_cache.h"

#include <algorithm>
#include <utility>

#include "cuda/device.h"
#include "cuda/device_error.h"
#include "cuda/lost_device.h"
#include "cuda/stream.h"
#include "model/cuda_graph.h"
#include "model/program.h"

namespace untorch {
namespace {

// Why no call of the method may be replayed; empty when it may.
std::string refusal_of(const Method& method) {
  const MethodSpec& spec = method.spec();
  if (method.device().type != DeviceType::kCUDA) return "the method runs on the CPU";
  if (spec.extern_nodes) return "the model calls operators without a C function";
  for (const TensorSpec& input : spec.inputs) {
    if (input.on_cpu) return "input '" + input.name + "' is on the CPU, and its value would become part of a graph";
    if (input.mutated) return "the model writes into input '" + input.name + "'";
  }
  for (const ConstantSpec& constant : spec.constants) {
    if (constant.mutated && constant.on_cpu) return "the model changes buffer '" + constant.fqn + "' on the CPU";
  }
  return {};
}

}  // namespace

GraphCache::GraphCache(Method& method, std::size_t most)
    : method_(method), most_(most), refusal_(refusal_of(method)), serves_(refusal_.empty()) {}

GraphCache::~GraphCache() = default;

// Of each input its dtype, sizes and strides. Where it lies a replay copes with.
GraphCache::Key GraphCache::key_of(std::span<const untorch_view> inputs) {
  Key key;
  key.reserve(inputs.size() * 10);
  for (const untorch_view& view : inputs) {
    key.push_back(std::int64_t{view.dtype} << 8 | view.ndim);
    for (std::int32_t d = 0; d < view.ndim; ++d) {
      key.push_back(view.sizes[d]);
      key.push_back(view.sizes[d] == 1 ? 0 : view.strides[d]);
    }
  }
  return key;
}

// The graph for the key; null where there is none, and `captures` is set where this call is to capture it, in the
// memory of `shares`.
std::shared_ptr<CudaGraph> GraphCache::find(const Key& key, std::shared_ptr<CudaGraph>& shares, bool& captures) {
  const std::lock_guard lock(mutex_);
  if (closed_) return nullptr;
  if (!entries_.contains(key) && entries_.size() >= 8 * most_) (void)drop_oldest(false);
  Entry& entry = entries_[key];
  entry.last_used = ++clock_;
  ++entry.calls;
  if (entry.graph != nullptr || entry.calls < 2 || capturing_ || !refusal_.empty()) return entry.graph;
  capturing_ = captures = true;
  for (const auto& [other, known] : entries_) {
    if (known.graph != nullptr) shares = known.graph;
  }
  return nullptr;
}

void GraphCache::keep(const Key& key, std::shared_ptr<CudaGraph> graph) {
  std::shared_ptr<CudaGraph> dropped;  // freed without the lock: that may wait for the GPU
  const std::lock_guard lock(mutex_);
  capturing_ = false;
  if (closed_) return;
  const auto graphs = std::ranges::count_if(entries_, [](const auto& item) { return item.second.graph != nullptr; });
  if (static_cast<std::size_t>(graphs) >= most_) dropped = drop_oldest(true);
  entries_[key].graph = std::move(graph);
}

std::shared_ptr<CudaGraph> GraphCache::drop_oldest(bool with_graph) {
  auto oldest = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (with_graph != (it->second.graph != nullptr)) continue;
    if (oldest == entries_.end() || it->second.last_used < oldest->second.last_used) oldest = it;
  }
  if (oldest == entries_.end()) return nullptr;
  std::shared_ptr<CudaGraph> graph = std::move(oldest->second.graph);
  entries_.erase(oldest);
  return graph;
}

bool GraphCache::run(std::span<const untorch_view> inputs, std::span<TensorPtr> outputs,
                     std::span<std::int32_t> aliases) {
  const int device = method_.device().index;
  if (!serves_) return false;
  cuda::check_not_lost(device);
  const cuda::DeviceGuard guard(device);
  cuda::DeviceErrors::check(device);  // of earlier calls
  if (cuda::is_capturing(cuda::call_stream(device))) return false;
  const Key key = key_of(inputs);
  std::shared_ptr<CudaGraph> shares;
  bool captures = false;
  std::shared_ptr<CudaGraph> graph = find(key, shares, captures);
  if (captures) {
    try {
      graph = std::make_shared<CudaGraph>(method_, inputs, shares.get(), CudaGraph::Outputs::kCopies);
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      capturing_ = false;
      refusal_ = error.what();
      return false;
    }
    keep(key, graph);
  }
  if (graph == nullptr) return false;
  graph->run(inputs, outputs, aliases);
  return true;
}

GraphCache::Report GraphCache::report() {
  const std::lock_guard lock(mutex_);
  Report report;
  report.graphs = static_cast<std::size_t>(
      std::ranges::count_if(entries_, [](const auto& item) { return item.second.graph != nullptr; }));
  report.refusal = refusal_;
  return report;
}

void GraphCache::clear() noexcept {
  std::map<Key, Entry> entries;
  const std::lock_guard lock(mutex_);
  entries.swap(entries_);
  closed_ = true;
}

}  // namespace untorch
