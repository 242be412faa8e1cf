// Program and Method: a loaded .pt2 file and what can be called in it.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fork.h"
#include "model/container.h"
#include "model/graph_cache.h"
#include "model/view.h"

namespace untorch {

struct LoadOptions {
  std::string device;               // "" for what the file was compiled for
  std::size_t num_runners = 1;      // calls of one method that may run at the same time
  int num_threads = 0;              // OpenMP threads of a call; 0: OpenMP's own choice
  int spin_us = -1;                 // that a thread of a call spins before it sleeps; -1: UNTORCH_SPIN_US
  std::size_t cuda_graphs = 0;      // that a method keeps of its calls, for as many shapes of inputs
  bool dequantize_weights = false;  // also keep int4 and NVFP4 weights dequantized on GPUs
  bool verify = false;              // compare every entry with its digest first; UNTORCH_VERIFY=1 does, too
  bool verify_external = false;     // those weights beside the file alone: a trust policy accepted the manifest
  bool copy = false;                // read them into memory
  std::string weights;              // where they are: a .safetensors file or a folder; "": external_weights.h says
  std::optional<bool> tf32;         // in convolutions and GEMMs on GPUs; nothing: as each method says
};

// What all sessions' instances of a method have in common: its library, opened when first needed.
class MethodLibrary {
 public:
  MethodLibrary(std::shared_ptr<const Archive> archive, const MethodSpec& spec)
      : archive_(std::move(archive)), spec_(spec) {}
  std::shared_ptr<ModelLibrary> open();
  // Lets go of it; containers that were made keep it.
  void release() noexcept;

 private:
  std::shared_ptr<const Archive> archive_;
  const MethodSpec& spec_;
  fork::Mutex mutex_;
  std::shared_ptr<ModelLibrary> library_;
};

class Method {
 public:
  Method(std::shared_ptr<const Archive> archive, std::shared_ptr<const Manifest> manifest, const MethodSpec& spec,
         const LoadOptions& options, Device device, std::shared_ptr<MutableBuffers> buffers,
         std::shared_ptr<cuda::UploadRing> ring);
  // The same method on a session's buffers. One that changes nothing is `shared` itself, which must outlive it.
  Method(Method& shared, std::shared_ptr<MutableBuffers> buffers);

  const MethodSpec& spec() const noexcept { return spec_; }
  Device device() const noexcept { return device_; }
  const std::string& gpu_architecture() const noexcept { return spec_.gpu_architecture; }
  // Opened on first use, then kept; throws kClosed after close().
  std::shared_ptr<Container> container();
  // JSON text that describes the operators without a C shim; empty when there are none.
  std::string_view extern_nodes() const;
  // The generated C++ beside the library, as stock packages have it; empty when there is none.
  std::string_view source() const;
  // Where those operators go. Before the first run.
  void set_proxy(untorch_proxy_callback callback, void* context) noexcept { proxy_ = {callback, context}; }

  // Checks the inputs against the method's specification, runs, and gives the outputs in `outputs` (one slot for each;
  // null where the model has None). aliases[i] is the input whose memory output i is, or -1. Thread-safe.
  // On CUDA it returns when everything is enqueued on the call stream (cuda/stream.h); inputs in the CPU's memory are
  // copied to the device in the stream's order.
  void run(std::span<const untorch_view> inputs, std::span<TensorPtr> outputs, std::span<std::int32_t> aliases);
  // Of LoadOptions::cuda_graphs.
  GraphCache::Report graphs();
  void close() noexcept;
  // Lets go of the library, for all sessions; for when the program is closed.
  void release_library() noexcept { library_->release(); }

  // Number, dtypes, shapes, strides and devices against the specification. For run and for graphs.
  void check_inputs(std::span<const untorch_view> inputs, const Container& container) const;
  const ProxyExecutor& proxy() const noexcept { return proxy_; }
  const TensorSpec* input_spec(std::size_t i) const noexcept {
    return spec_.inputs.empty() ? nullptr : &spec_.inputs[i];
  }
  // True when input i of a CUDA method is to be on the CPU.
  bool input_on_cpu(std::size_t i) const noexcept {
    return device_.type == DeviceType::kCPU || (!spec_.inputs.empty() && spec_.inputs[i].on_cpu);
  }

 private:
  void run_cpu(Container& container, std::span<const untorch_view> inputs, std::span<StorageRef> storages,
               std::span<TensorPtr> outputs);
  void run_cuda(Container& container, std::span<const untorch_view> inputs, std::span<StorageRef> storages,
                std::span<TensorPtr> outputs);

  std::shared_ptr<const Archive> archive_;
  std::shared_ptr<const Manifest> manifest_;
  const MethodSpec& spec_;  // in manifest_
  const LoadOptions options_;
  const Device device_;
  std::shared_ptr<MethodLibrary> library_;
  std::shared_ptr<MutableBuffers> buffers_;  // null when the model changes nothing
  Method* shared_ = nullptr;                 // whose container this one uses
  const char* const owner_;                  // "program" or "session", for messages
  ProxyExecutor proxy_;
  const std::unique_ptr<GraphCache> graphs_;  // null: none are kept, or shared_ has them
  void open_container();

  fork::Mutex mutex_;
  std::shared_ptr<Container> container_;
  std::shared_ptr<cuda::UploadRing> ring_;  // until it is opened: the program's methods share one
  std::atomic<bool> closed_{false};
};

// The view as a tensor that borrows the caller's memory. Dimensions of size 1 get the strides that `spec` (may be null)
// expects: any would do, but generated code may compare them.
TensorPtr borrow_view(const untorch_view& view, const TensorSpec* spec = nullptr);
// A view that the loader made itself, of an output that looks at memory of the model library: keeps the container.
TensorPtr keep_container(TensorPtr tensor, std::shared_ptr<Container> container);

// Buffers of its own and the program's methods on them. The program must outlive it.
class Session {
 public:
  Session(std::span<const std::unique_ptr<Method>> methods, std::shared_ptr<MutableBuffers> buffers);

  // In the program's order.
  std::span<const std::unique_ptr<Method>> methods() const noexcept { return methods_; }
  MutableBuffers& buffers() const noexcept { return *buffers_; }
  void close() noexcept;

 private:
  std::shared_ptr<MutableBuffers> buffers_;
  std::vector<std::unique_ptr<Method>> methods_;
};

class Program {
 public:
  // `manifest` is the archive's. The methods' libraries are checked and opened when first used.
  Program(std::shared_ptr<const Archive> archive, Manifest manifest, const LoadOptions& options);

  const Manifest& manifest() const noexcept { return *manifest_; }
  const Archive& archive() const noexcept { return *archive_; }
  std::span<const std::unique_ptr<Method>> methods() const noexcept { return methods_; }
  // Buffers as they are in the file. The methods of the program itself have a session of their own.
  std::unique_ptr<Session> session();
  MutableBuffers& buffers() const noexcept { return *buffers_; }
  // Calls that still run finish; everything is freed when the last of them and the last output that looks at a weight
  // is gone.
  void close() noexcept;

 private:
  std::shared_ptr<const Archive> archive_;
  std::shared_ptr<const Manifest> manifest_;
  int device_index_ = -1;
  std::shared_ptr<MutableBuffers> buffers_;
  std::vector<std::unique_ptr<Method>> methods_;
};

}  // namespace untorch
