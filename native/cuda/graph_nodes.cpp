// Reads the nodes of captured graphs.
#include "cuda/graph_nodes.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace untorch::cuda {
namespace {

constexpr const char* kDoing = "reading the graph";

// CUgraphNodeType. Those that take no address: an empty one, an event's wait and record, memory made and freed.
constexpr int kKernelNode = 0, kMemcpyNode = 1, kMemsetNode = 2;
bool takes_no_address(int type) { return type == 5 || type == 6 || type == 7 || type == 10 || type == 11; }

void read_kernel(AddressNode& node) {
  const Driver& api = driver();
  check_driver(api.graph_kernel_params(node.handle, &node.params), kDoing);
  node.function = node.params.function;
  if (node.function == nullptr) check_driver(api.kernel_function(&node.function, node.params.kernel), kDoing);
  if (node.params.kernel_params == nullptr) {
    // Launched with one buffer for all, as cuDNN does: what an address in it is shows like everywhere else.
    const std::span<const std::byte> buffer = argument_buffer(node.params.extra);
    node.kind = AddressNode::kBuffer;
    node.values.emplace_back(buffer.begin(), buffer.end());
    node.offsets.push_back(0);
    return;
  }
  std::size_t offset = 0, bytes = 0;
  for (std::size_t i = 0; api.function_param_info(node.function, i, &offset, &bytes) == kSuccess; ++i) {
    const auto* value = static_cast<const std::byte*>(node.params.kernel_params[i]);
    node.values.emplace_back(value, value + bytes);
    node.offsets.push_back(offset);
  }
}

}  // namespace

std::vector<AddressNode> address_nodes(Graph graph, bool& complete) {
  const Driver& api = driver();
  std::size_t count = 0;
  check_driver(api.graph_nodes(graph, nullptr, &count), kDoing);
  std::vector<GraphNode> handles(count);
  if (count != 0) check_driver(api.graph_nodes(graph, handles.data(), &count), kDoing);
  std::vector<AddressNode> nodes;
  for (const GraphNode handle : handles) {
    int type = -1;
    check_driver(api.graph_node_type(handle, &type), kDoing);
    AddressNode node{handle, AddressNode::kKernel, {}, nullptr, {}, {}};
    // Copies and fills: their description stands in for parameters; there is one value.
    const auto describe = [&](AddressNode::Kind kind, const auto& description) {
      node.kind = kind;
      node.values.emplace_back(sizeof description);
      std::memcpy(node.values.back().data(), &description, sizeof description);
    };
    if (type == kKernelNode) {
      read_kernel(node);
    } else if (type == kMemcpyNode) {
      Memcpy3D copy{};
      check_driver(api.graph_memcpy_params(handle, &copy), kDoing);
      describe(AddressNode::kMemcpy, copy);
    } else if (type == kMemsetNode) {
      MemsetParams fill{};
      check_driver(api.graph_memset_params(handle, &fill), kDoing);
      describe(AddressNode::kMemset, fill);
    } else {
      complete = complete && takes_no_address(type);
      continue;
    }
    nodes.push_back(std::move(node));
  }
  return nodes;
}

bool is_chain(Graph graph, const std::vector<AddressNode>& nodes) {
  const Driver& api = driver();
  std::size_t count = 0;
  if (api.graph_root_nodes(graph, nullptr, &count) == kSuccess && count > 1) return false;
  return std::ranges::none_of(nodes, [&](const AddressNode& node) {
    // Refused where an edge is of a programmatic launch; such kernels follow each other on one stream.
    return api.graph_dependent_nodes(node.handle, nullptr, &count) == kSuccess && count > 1;
  });
}

}  // namespace untorch::cuda
