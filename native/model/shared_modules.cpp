// A table by image and device. Model libraries call utModuleLoadData and utModuleUnload (model/own_names.h).
#include "model/shared_modules.h"

#include <map>
#include <mutex>
#include <utility>

#include "base/fork.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "shims/shim.h"

namespace untorch {
namespace {

using Key = std::pair<std::uintptr_t, int>;  // image, device

struct Table {
  fork::Mutex mutex;  // held while a module is loaded: a second container waits for it
  std::map<Key, cuda::Module> modules;
};
Table& table() {
  static auto& made = *new Table;
  return made;
}

}  // namespace

void unload_modules(std::uintptr_t start, std::uintptr_t end) noexcept {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  auto it = all.modules.lower_bound({start, -1});
  while (it != all.modules.end() && it->first.first < end) {
    try {
      const cuda::DeviceGuard guard(it->first.second);
      (void)cuda::driver().module_unload(it->second);
    } catch (...) {  // the driver is going down with the process
    }
    it = all.modules.erase(it);
  }
}

}  // namespace untorch

// cuModuleLoadData for model libraries: images are in their read-only data.
UNTORCH_SHIM utModuleLoadData(untorch::cuda::Module* module, const void* image) {
  using namespace untorch;
  try {
    const Key key{reinterpret_cast<std::uintptr_t>(image), cuda::current_device()};
    Table& all = table();
    const std::lock_guard lock(all.mutex);
    const auto it = all.modules.find(key);
    if (it != all.modules.end()) {
      *module = it->second;
      return cuda::kSuccess;
    }
    const cuda::Result code = cuda::driver().module_load_data(module, image);
    if (code == cuda::kSuccess) all.modules.emplace(key, *module);
    return code;
  } catch (const Error& e) {
    set_last_error(e.kind(), e.what());
  } catch (const std::exception& e) {
    set_last_error(ErrorKind::kInternal, e.what());
  }
  return cuda::kErrorNotFound;
}

// cuModuleUnload for model libraries: shared modules stay until the library is closed.
UNTORCH_SHIM utModuleUnload(untorch::cuda::Module module) {
  using namespace untorch;
  try {
    Table& all = table();
    const std::lock_guard lock(all.mutex);
    for (const auto& [key, shared] : all.modules) {
      if (shared == module) return cuda::kSuccess;
    }
    return cuda::driver().module_unload(module);
  } catch (...) {
    return cuda::kErrorNotInitialized;
  }
}
