// What the files of the C interface share: the opaque handles, and the guard that turns exceptions into statuses.
#pragma once

#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/text.h"
#include "model/program.h"
#include "untorch/untorch.h"

// The handles that untorch.h leaves opaque are these.
struct untorch_program {
  std::unique_ptr<untorch::Program> program;
  std::vector<std::unique_ptr<untorch_method>> methods;
};
struct untorch_method {
  explicit untorch_method(untorch::Method* of) : method(of) {}

  untorch::Method* method;
  // What untorch_method_call_spec gave: another thread may close the method meanwhile.
  std::once_flag has_specs;
  std::string in_spec, out_spec;
};
// The manifest is read once: reading it tells the archive its digests.
struct untorch_archive {
  std::shared_ptr<untorch::Archive> archive;
  std::optional<untorch::Manifest> manifest;
  std::string methods;           // what untorch_archive_methods gave
  bool verify_external = false;  // a trust policy accepted the manifest, and so the digests in it

  const untorch::Manifest& read_manifest() {
    if (!manifest) manifest = untorch::read_manifest(*archive);
    return *manifest;
  }
};

namespace untorch::capi {

template <class Body>
untorch_status guarded(Body&& body) noexcept {
  try {
    body();
    return UNTORCH_OK;
  } catch (const untorch::Error& e) {
    // What comes from a file is escaped; a model's own message may have lines.
    const bool keep_lines =
        e.kind() != untorch::ErrorKind::kInvalidFile && e.kind() != untorch::ErrorKind::kUnsupported;
    untorch::set_last_error(e.kind(), untorch::escape_controls(e.what(), keep_lines), e.system_error());
  } catch (const std::bad_alloc&) {
    untorch::set_last_error(untorch::ErrorKind::kOutOfMemory, "out of memory");
  } catch (const std::exception& e) {
    untorch::set_last_error(untorch::ErrorKind::kInternal, e.what());
  } catch (...) {
    untorch::set_last_error(untorch::ErrorKind::kInternal, "unknown failure");
  }
  return static_cast<untorch_status>(untorch::last_error_kind());
}

inline untorch::Tensor* unwrap(untorch_tensor* tensor) { return reinterpret_cast<untorch::Tensor*>(tensor); }
inline const untorch::Tensor* unwrap(const untorch_tensor* tensor) {
  return reinterpret_cast<const untorch::Tensor*>(tensor);
}
inline untorch_tensor* wrap(untorch::Tensor* tensor) { return reinterpret_cast<untorch_tensor*>(tensor); }

// The caller's memory as a tensor that borrows it; any view is checked.
inline untorch::TensorPtr borrow_checked(const untorch_view& view) {
  untorch::check_view(view);
  untorch::check(untorch::is_known(untorch::dtype_of(view)), "unknown dtype code ", view.dtype);
  return untorch::borrow_view(view);
}

// Room for the outputs of a call: small calls allocate nothing for it.
template <class Body>
void with_outputs(untorch_tensor** outputs, size_t num_outputs, Body&& body) {
  untorch::SmallVector<untorch::TensorPtr, 8> results(num_outputs);
  body(std::span<untorch::TensorPtr>(results.data(), num_outputs));
  for (std::size_t i = 0; i < num_outputs; ++i) outputs[i] = wrap(results[i].release());
}

}  // namespace untorch::capi
