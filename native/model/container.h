// One compiled method, ready to run: its library, the AOTInductor container made from it, its weights.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "model/archive.h"
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
  // Opens the library and gives it its weights: in place from the mapped file, except those that the model changes,
  // which get a copy of their own. `num_runners` calls may run at the same time.
  Container(const Archive& archive, const Manifest& manifest, const MethodSpec& spec, std::size_t num_runners);
  ~Container();
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;

  std::size_t num_inputs() const noexcept { return num_inputs_; }
  std::size_t num_outputs() const noexcept { return num_outputs_; }
  const std::string& in_spec() const noexcept { return in_spec_; }
  const std::string& out_spec() const noexcept { return out_spec_; }

  // Takes the inputs (slots are null afterwards) and fills the outputs; an output that the model leaves out stays null.
  // Throws kModel with what the shims and the library said. Thread-safe.
  void run(std::span<TensorPtr> inputs, std::span<TensorPtr> outputs, ProxyExecutor* proxy);

 private:
  void destroy() noexcept;
  void bind_weights(const Archive& archive, const Manifest& manifest, const MethodSpec& spec);
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
};

}  // namespace untorch
