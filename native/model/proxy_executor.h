// What a model library calls for operators without a C function: the native operator, or the method's callback.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cuda/stream.h"
#include "model/extern_nodes.h"
#include "untorch/untorch.h"

namespace untorch {

// Where operators go that no native one serves. `call` gets the node's index in the extern nodes, and returns 0, or an
// error code after set_last_error.
struct ProxyExecutor {
  untorch_proxy_callback call = nullptr;
  void* context = nullptr;
};

// The proxy calls of one run. Generated code has a pointer to it, and nothing else.
class ProxyCalls {
 public:
  ProxyCalls(const std::string& method, const std::vector<ExternNode>& nodes, const ProxyExecutor& executor,
             Device device, cuda::Stream stream)
      : method_(method), nodes_(nodes), executor_(executor), device_(device), stream_(stream) {}

  AOTITorchError call(int index, std::span<const std::int64_t> ints,
                      std::span<AtenTensorHandle> tensors) const noexcept;

 private:
  AOTITorchError dispatch(int index, std::span<const std::int64_t> ints,
                          std::span<AtenTensorHandle> tensors) const noexcept;
  // Of a call: a GPU's where one of its arguments lies there, or where it has none in a method on one.
  DeviceType device_of(const ExternNode& node, std::span<const AtenTensorHandle> tensors) const noexcept;
  // Generated code takes a result's address for one of the method's GPU.
  void check_results(const ExternNode& node, std::span<AtenTensorHandle> tensors) const;
  std::string describe(int index) const;

  const std::string& method_;
  const std::vector<ExternNode>& nodes_;
  const ProxyExecutor executor_;
  const Device device_;
  const cuda::Stream stream_;
};

}  // namespace untorch
