// _core.Archive: a .pt2 file as the loader reads it, for untorch.archive and for Program.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "tensor.h"

namespace untorch::python {

struct ArchiveHandle {
  explicit ArchiveHandle(untorch_archive* handle) : archive(handle) {}
  ~ArchiveHandle() { untorch_archive_free(archive); }
  ArchiveHandle(const ArchiveHandle&) = delete;
  ArchiveHandle& operator=(const ArchiveHandle&) = delete;
  untorch_archive* archive;
};

class Archive {
 public:
  explicit Archive(untorch_archive* archive) : handle_(std::make_shared<ArchiveHandle>(archive)) {}
  untorch_archive* get() const noexcept { return handle_->archive; }
  const std::shared_ptr<ArchiveHandle>& handle() const noexcept { return handle_; }

 private:
  std::shared_ptr<ArchiveHandle> handle_;
};

void bind_archive(nanobind::module_& m);

}  // namespace untorch::python
