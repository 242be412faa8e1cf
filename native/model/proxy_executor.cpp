// Sends proxy calls to the native operators (shims/proxy_op.h) or to the method's callback, on the call's stream.
#include "model/proxy_executor.h"

#include <optional>

#include "base/error.h"
#include "threads/call.h"
#include "untorch/caller_stream.h"

namespace untorch {
namespace {

constexpr int kCaptureInvalidated = 2;  // CU_STREAM_CAPTURE_STATUS_INVALIDATED

int capture_status(cuda::Stream stream) {
  int status = 0;
  return cuda::driver().stream_capturing(stream, &status) == cuda::kSuccess ? status : 0;
}

}  // namespace

DeviceType ProxyCalls::device_of(const ExternNode& node, std::span<const AtenTensorHandle> tensors) const noexcept {
  const std::size_t count = std::min(node.node.num_inputs, tensors.size());
  bool seen = false;
  for (const AtenTensorHandle handle : tensors.first(count)) {
    if (handle == nullptr || !shims::unwrap(handle)->defined()) continue;
    seen = true;
    if (shims::unwrap(handle)->device().type == DeviceType::kCUDA) return DeviceType::kCUDA;
  }
  return seen ? DeviceType::kCPU : device_.type;
}

void ProxyCalls::check_results(const ExternNode& node, std::span<AtenTensorHandle> tensors) const {
  for (std::size_t i = node.node.num_inputs; i < tensors.size(); ++i) {
    if (tensors[i] == nullptr || !shims::unwrap(tensors[i])->defined()) continue;
    const Device lies = shims::unwrap(tensors[i])->device();
    if (lies == device_) continue;
    throw_error(ErrorKind::kModel, "kernel of `", node.target, "` (node `", node.node.name, "`), result ",
                i - node.node.num_inputs, ": expected an array on ", device_name(device_), ", got one on ",
                device_name(lies));
  }
}

std::string ProxyCalls::describe(int index) const {
  const auto at = static_cast<std::size_t>(index);
  if (index < 0 || at >= nodes_.size() || nodes_[at].target.empty()) return "operator node " + std::to_string(index);
  return "operator `" + nodes_[at].target + "` (node " + std::to_string(index) + ")";
}

AOTITorchError ProxyCalls::call(int index, std::span<const std::int64_t> ints,
                                std::span<AtenTensorHandle> tensors) const noexcept {
  if (threads::call_failed()) return 1;
  const AOTITorchError code = dispatch(index, ints, tensors);
  // Code of PyTorch before 2.13 goes on after a failure: this one must stay the call's.
  if (code != 0) threads::fail_call(last_error_kind(), last_error());
  return code;
}

AOTITorchError ProxyCalls::dispatch(int index, std::span<const std::int64_t> ints,
                                    std::span<AtenTensorHandle> tensors) const noexcept {
  try {
    const auto at = static_cast<std::size_t>(index);
    const ExternNode* const node = index >= 0 && at < nodes_.size() ? &nodes_[at] : nullptr;
    const DeviceType device = node != nullptr ? device_of(*node, tensors) : device_.type;
    if (node != nullptr && node->op != nullptr && node->op->enabled(device)) {
      return node->op->run(device, node->node, ints, tensors);
    }
    if (executor_.call == nullptr) {
      set_last_error(ErrorKind::kUnsupported,
                     "the model calls " + describe(index) + " on " + device_name(device_) +
                         ", which has neither a C function nor a native kernel there, and no proxy callback was set: "
                         "set one with untorch_method_set_proxy");
      return 1;
    }
    const auto run = [&] {
      return executor_.call(executor_.context, index, static_cast<std::int32_t>(ints.size()), ints.data(),
                            static_cast<std::int32_t>(tensors.size()),
                            reinterpret_cast<untorch_tensor**>(tensors.data()));
    };
    if (device_.type != DeviceType::kCUDA) return run();
    const CallerStreamGuard current(stream_);  // so that untorch_call_stream says it
    const bool capturing = capture_status(stream_) != 0;
    const AOTITorchError code = run();
    if (capturing && capture_status(stream_) == kCaptureInvalidated) {
      set_last_error(ErrorKind::kUnsupported,
                     "the kernel of " + describe(index) +
                         " did what a CUDA graph cannot hold: while a call is captured it may only enqueue work on the "
                         "call's stream; it must not wait, and not use another stream. Change the kernel, or call the "
                         "method without a graph");
      return 1;
    }
    if (code == 0 && node != nullptr && node->known && device == DeviceType::kCUDA) check_results(*node, tensors);
    return code;
  } catch (const Error& e) {
    set_last_error(e.kind(), e.what());
  } catch (const std::exception& e) {
    set_last_error(ErrorKind::kInternal, e.what());
  }
  return 1;
}

}  // namespace untorch

UNTORCH_SHIM aoti_torch_proxy_executor_call_function(void* proxy_executor, int extern_node_index, int num_ints,
                                                     std::int64_t* ints, int num_tensors, AtenTensorHandle* tensors) {
  const auto count = [](int n) { return static_cast<std::size_t>(n < 0 ? 0 : n); };
  if (proxy_executor == nullptr) {
    untorch::set_last_error(untorch::ErrorKind::kUnsupported,
                            "the model calls operator node " + std::to_string(extern_node_index) +
                                " outside of a run, where there is no proxy executor");
    return 1;
  }
  return static_cast<const untorch::ProxyCalls*>(proxy_executor)
      ->call(extern_node_index, {ints, count(num_ints)}, {tensors, count(num_tensors)});
}
