// A compiled model's shared library: checked, opened from memory, its interface functions looked up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/interface_table.h"
#include "model/kernel_hooks.h"
#include "model/memory_file.h"
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
  // Checks the copy (machine, symbols: everything that is missing is named at once), rewrites it where it has to be,
  // and opens it. checks_its_inputs: nothing says what the library's inputs must be, so its own checks are switched on,
  // unless AOTI_RUNTIME_CHECK_INPUTS says otherwise; they cost a few microseconds a call.
  ModelLibrary(MemoryFile file, bool checks_its_inputs);
  ~ModelLibrary();
  ModelLibrary(const ModelLibrary&) = delete;
  ModelLibrary& operator=(const ModelLibrary&) = delete;

  const ModelApi& api() const noexcept { return api_; }
  const std::string& name() const noexcept { return file_.name(); }
  // True for a library that was compiled for untorch: it gets its weights from the manifest.
  bool is_own() const noexcept { return own_; }
  // What it was compiled for; none if it does not tell.
  const std::optional<json::Value>& interface() const noexcept { return interface_; }

 private:
  // Where a fault is the model's.
  void register_code(std::uintptr_t base, const ElfImage& elf);

  MemoryFile file_;  // stays open: its number is part of the path that the dynamic linker knows the library by
  void* handle_ = nullptr;
  std::uintptr_t start_ = 0, end_ = 0;  // where it is mapped
  bool own_ = false;
  std::optional<json::Value> interface_;
  std::vector<const std::byte*> code_;  // where its executable segments begin
  std::unique_ptr<KernelHooks> hooks_;  // of a library that was opened while a profile was recorded
  ModelApi api_;
};

}  // namespace untorch
