// What the nodes of a captured graph do, and the words in which they may take addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/driver.h"

namespace untorch::cuda {

struct AddressNode {
  enum Kind : std::int8_t { kKernel, kBuffer, kMemcpy, kMemset };  // kBuffer: a kernel, its parameters in one buffer
  GraphNode handle;
  Kind kind;
  KernelNodeParams params;                     // of a kernel; its pointers live as long as the graph
  Function function;                           // of a kernel, also where the node has a Kernel
  std::vector<std::vector<std::byte>> values;  // a kernel's parameters; Memcpy3D or MemsetParams, as one value
  std::vector<std::size_t> offsets;            // of a kernel's parameters, in one buffer
};

// The nodes that take addresses, in the order of their capture; `complete` becomes false where another one may take
// one, too.
std::vector<AddressNode> address_nodes(Graph graph, bool& complete);

// Whether none of the graph's nodes may run beside another one.
bool is_chain(Graph graph, const std::vector<AddressNode>& nodes);

}  // namespace untorch::cuda
