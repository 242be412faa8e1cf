// A compiled model's shared library: checked, opened from memory, its interface functions looked up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "shims/shim.h"

namespace untorch {

// torch/csrc/inductor/aoti_runtime/interface.h. All are optional to look up: older libraries lack the newer ones.
struct ModelApi {
  using Handle = void*;
  struct ConstantEntry {
    const char* name;
    AtenTensorHandle handle;
  };
  std::int32_t (*create)(Handle* container, std::size_t num_models, const char* device,
                         const char* cubin_dir) = nullptr;
  std::int32_t (*destroy)(Handle container) = nullptr;
  std::int32_t (*run)(Handle container, AtenTensorHandle* inputs, std::size_t num_inputs, AtenTensorHandle* outputs,
                      std::size_t num_outputs, void* stream, void* proxy_executor) = nullptr;
  // The same without looking at earlier runs: it never waits for the GPU, and may be captured.
  std::int32_t (*run_single_threaded)(Handle container, AtenTensorHandle* inputs, std::size_t num_inputs,
                                      AtenTensorHandle* outputs, std::size_t num_outputs, void* stream,
                                      void* proxy_executor) = nullptr;
  std::int32_t (*num_inputs)(Handle container, std::size_t* n) = nullptr;
  std::int32_t (*num_outputs)(Handle container, std::size_t* n) = nullptr;
  std::int32_t (*num_constants)(Handle container, std::size_t* n) = nullptr;
  std::int32_t (*constant_name)(Handle container, std::size_t i, const char** name) = nullptr;
  std::int32_t (*constant_fqn)(Handle container, std::size_t i, const char** name) = nullptr;
  std::int32_t (*constant_dtype)(Handle container, std::size_t i, std::int32_t* dtype) = nullptr;
  std::int32_t (*constant_from_folded)(Handle container, std::size_t i, bool* folded) = nullptr;
  // Names that cross as pairs (2.12 and newer) or as a std::unordered_map<std::string, AtenTensorHandle> (all).
  std::int32_t (*set_constants_pairs)(Handle container, const ConstantEntry* pairs, std::size_t n, bool inactive,
                                      bool validate) = nullptr;
  std::int32_t (*set_constants_map)(Handle container, void* map, bool inactive, bool validate) = nullptr;
  std::int32_t (*fold_constants)(Handle container, bool inactive, void* stream, void* proxy_executor) = nullptr;
  std::int32_t (*call_spec)(Handle container, const char** in_spec, const char** out_spec) = nullptr;
  std::int32_t (*blob_size)(Handle container, std::uint64_t* nbytes) = nullptr;
  std::int32_t (*load_blob)(Handle container, const std::uint8_t* blob) = nullptr;
  std::int32_t (*last_error)(const char** message) = nullptr;
};

// True when libuntorch.so itself defines a function of that name.
bool exports_symbol(const char* name) noexcept;

class ModelLibrary {
 public:
  // Checks `bytes` (machine, symbols: everything that is missing is named at once) and opens a private copy of them
  // from memory. `name` is for messages. checks_its_inputs: no manifest says what the library's inputs must be, so
  // its own checks are switched on; they cost a few microseconds a call.
  ModelLibrary(std::span<const std::byte> bytes, const std::string& name, bool checks_its_inputs);
  ~ModelLibrary();
  ModelLibrary(const ModelLibrary&) = delete;
  ModelLibrary& operator=(const ModelLibrary&) = delete;

  const ModelApi& api() const noexcept { return api_; }
  const std::string& name() const noexcept { return name_; }
  // True for a library that was compiled for untorch: it gets its weights from the manifest.
  bool is_own() const noexcept { return own_; }

 private:
  std::string name_;
  int fd_ = -1;  // stays open: its number is part of the path that the dynamic linker knows the library by
  void* handle_ = nullptr;
  bool own_ = false;
  ModelApi api_;
};

}  // namespace untorch
