// Kernels that lie beside the library in a stock package: model libraries load them by a path, which is served from the
// archive, so that nothing is written to disk.
#pragma once

#include <memory>
#include <string>

#include "model/archive.h"
#include "model/manifest.h"

namespace untorch {

// While it lives, files below folder() are the method's kernels for utModuleLoad.
class CubinFolder {
 public:
  CubinFolder(std::shared_ptr<const Archive> archive, const MethodSpec& spec);
  ~CubinFolder();
  CubinFolder(const CubinFolder&) = delete;
  CubinFolder& operator=(const CubinFolder&) = delete;
  const std::string& folder() const noexcept { return folder_; }

 private:
  std::string folder_;
};

}  // namespace untorch
