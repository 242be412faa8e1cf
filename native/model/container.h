// One compiled method, ready to run: its library, the AOTInductor container made from it, its weights.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "cuda/stream.h"
#include "model/archive.h"
#include "model/cubins.h"
#include "model/library.h"
#include "model/manifest.h"
#include "untorch/untorch.h"

namespace untorch {

// Operators without a C shim are sent here by the model library; `call` gets the node's index in the extern nodes.
// Returns 0, or an error code after set_last_error.
struct ProxyExecutor {
  untorch_proxy_callback call = nullptr;
  void* context = nullptr;
};

class Container {
 public:
  // Opens the library and gives it its weights: in place from the mapped file or as shared copies on the device, except
  // those that the model changes, which get a copy of their own. `num_runners` calls may run at the same time; on CUDA
  // a call only enqueues, so there one model serves all threads.
  Container(const std::shared_ptr<const Archive>& archive, const Manifest& manifest, const MethodSpec& spec,
            Device device, std::size_t num_runners);
  ~Container();
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;

  std::size_t num_inputs() const noexcept { return num_inputs_; }
  std::size_t num_outputs() const noexcept { return num_outputs_; }
  const std::string& in_spec() const noexcept { return in_spec_; }
  const std::string& out_spec() const noexcept { return out_spec_; }

  Device device() const noexcept { return device_; }

  // Takes the inputs (slots are null afterwards) and fills the outputs; an output that the model leaves out stays null.
  // On CUDA everything is enqueued on `stream`. Throws kModel with what the shims and the library said. Thread-safe.
  void run(std::span<TensorPtr> inputs, std::span<TensorPtr> outputs, ProxyExecutor* proxy,
           cuda::Stream stream = nullptr);
  // For a model that changes its buffers: `stream` waits for the last run, and the next run will wait for `stream`.
  // Nothing for other models. Around graph launches, which the container does not see.
  class SerialScope;
  bool serial() const noexcept { return serial_; }

 private:
  void destroy() noexcept;
  void bind_weights(const Archive& archive, const Manifest& manifest, const MethodSpec& spec);
  TensorPtr bind_weight(const Archive& archive, const Manifest& manifest, const ConstantSpec& constant,
                        const std::vector<StorageRef>& shared) const;
  bool has_folded_constants() const;
  void wait_for_last_run(cuda::Stream stream);
  void note_run(cuda::Stream stream);
  [[noreturn]] void fail(const std::string& what) const;
  void check_code(std::int32_t code, const char* what) const;

  std::string method_;
  std::unique_ptr<ModelLibrary> library_;
  ModelApi::Handle handle_ = nullptr;
  std::vector<TensorPtr> constants_;           // the container borrows them
  std::unordered_set<Tensor*> extra_handles_;  // on the same storages: the container makes them and forgets them
  std::size_t num_inputs_ = 0, num_outputs_ = 0;
  std::string in_spec_, out_spec_;
  bool serial_ = false;  // the model changes its buffers: one call at a time
  std::mutex serial_mutex_;
  Device device_;
  std::unique_ptr<CubinFolder> cubins_;
  cuda::Event last_run_ = nullptr;  // of a serial model on CUDA
  bool has_run_ = false;
};

class Container::SerialScope {
 public:
  SerialScope(Container& container, cuda::Stream stream);
  ~SerialScope();
  SerialScope(const SerialScope&) = delete;
  SerialScope& operator=(const SerialScope&) = delete;

 private:
  Container& container_;
  cuda::Stream stream_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace untorch
