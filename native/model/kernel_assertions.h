// Which GPU kernels of the open models check values, for the text of a failed device-side assertion.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/archive.h"
#include "model/manifest.h"

namespace untorch {

struct KernelAssertion {
  std::string kernel;  // such as triton_poi_fused_embedding_0
  std::string text;    // such as "index out of bounds: 0 <= tmp0 < 100"
  bool operator==(const KernelAssertion&) const = default;
};

// The assertions of the cubins in `bytes`: a cubin, or a model library that has some embedded. They are found by their
// texts ("… out of bounds …"), which the compiler stores with the kernel.
std::vector<KernelAssertion> find_assertions(std::span<const std::byte> bytes);

// While it lives, a method's kernels are named by the error of a lost device. Nothing is read before there is one.
class NamedKernels {
 public:
  NamedKernels(std::shared_ptr<const Archive> archive, const MethodSpec& spec);
  ~NamedKernels();
  NamedKernels(const NamedKernels&) = delete;
  NamedKernels& operator=(const NamedKernels&) = delete;
};

}  // namespace untorch
