// The list of extern nodes of a package: call sites of operators that have no C function.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shims/proxy_op.h"

namespace untorch {

// One call site. `op` is the native operator that can serve it; null when there is none.
struct ExternNode {
  std::string target;
  shims::ProxyOp* op = nullptr;
  shims::ProxyNode node;
  bool known = false;  // whether `node` could be read
};

// In the order of their indices. Throws kInvalidFile with `name` for text that is no JSON, and for a node of a native
// operator that is malformed. Others may be malformed: a callback reads them itself, and refuses them.
std::vector<ExternNode> parse_extern_nodes(std::string_view text, std::string_view name);

}  // namespace untorch
