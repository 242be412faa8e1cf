// One compiled method, ready to run: its library, the AOTInductor container made from it, its weights.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "cuda/stream.h"
#include "cuda/tf32.h"
#include "cuda/upload.h"
#include "model/archive.h"
#include "model/call_slots.h"
#include "model/cubins.h"
#include "model/kernel_assertions.h"
#include "model/library.h"
#include "model/manifest.h"
#include "model/mutable_buffers.h"
#include "model/proxy_executor.h"

namespace untorch {

class Container {
 public:
  // Gives the library its weights: in place from the mapped file or as shared copies on the device, and those that the
  // model changes from `states`. `num_runners` calls may run at the same time; on CUDA a call only enqueues, so there
  // one model serves all threads. The copies go up through `ring`; `dequantize` says whether weights in four bits are
  // kept there as whole matrices, too, `tf32` what its float32 operators may use.
  Container(const std::shared_ptr<const Archive>& archive, const Manifest& manifest, const MethodSpec& spec,
            std::shared_ptr<ModelLibrary> library, std::shared_ptr<MutableBuffers> buffers, Device device,
            std::size_t num_runners, bool dequantize, cuda::Tf32 tf32, cuda::UploadRing& ring);
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
  void run(std::span<TensorPtr> inputs, std::span<TensorPtr> outputs, const ProxyExecutor& proxy,
           cuda::Stream stream = nullptr);
  // Whether a fork left calls of other threads in the middle: their runners are in use for ever.
  bool torn() { return runners_.torn(); }
  // The buffers that the model changes, whose lock every run holds; null when there are none. For graph launches, which
  // the container does not see.
  MutableBuffers* buffers() const noexcept { return buffers_.get(); }

 private:
  void destroy() noexcept;
  void bind_weights(const Archive& archive, const Manifest& manifest, const MethodSpec& spec, bool dequantize,
                    cuda::UploadRing& ring);
  TensorPtr bind_weight(const Archive& archive, const Manifest& manifest, const ConstantSpec& constant,
                        const std::vector<StorageRef>& shared) const;
  bool has_folded_constants() const;
  [[noreturn]] void fail(const std::string& what, bool library_knows = true) const;
  void check_code(std::int32_t code, const char* what) const;

  std::string method_;
  std::shared_ptr<ModelLibrary> library_;
  std::shared_ptr<MutableBuffers> buffers_;  // null when the model changes nothing
  ModelApi::Handle handle_ = nullptr;
  std::vector<TensorPtr> constants_;           // the container borrows them
  std::unordered_set<Tensor*> extra_handles_;  // on the same storages: the container makes them and forgets them
  bool single_ = false;  // one model: runners_ serialises its calls, without the library's own locks
  std::size_t num_inputs_ = 0, num_outputs_ = 0;
  std::string in_spec_, out_spec_;
  std::vector<ExternNode> extern_nodes_;
  CallSlots runners_;  // on CUDA one: the container is one model
  Device device_;
  cuda::Tf32 tf32_;
  std::unique_ptr<CubinFolder> cubins_;
  std::unique_ptr<NamedKernels> named_kernels_;  // on CUDA
};

}  // namespace untorch
