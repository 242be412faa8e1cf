// The folders are names in a table: "untorch:<number>".
#include "model/cubins.h"

#include <map>
#include <mutex>

#include "base/fork.h"
#include "cuda/driver.h"
#include "shims/shim.h"

namespace untorch {
namespace {

struct Table {
  fork::Mutex mutex;
  std::map<std::string, std::pair<std::shared_ptr<const Archive>, const MethodSpec*>> folders;
  unsigned serial = 0;
};
Table& table() {
  static auto& made = *new Table;
  return made;
}

}  // namespace

CubinFolder::CubinFolder(std::shared_ptr<const Archive> archive, const MethodSpec& spec) {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  folder_ = "untorch:" + std::to_string(all.serial++);
  all.folders.emplace(folder_, std::make_pair(std::move(archive), &spec));
}

CubinFolder::~CubinFolder() {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  all.folders.erase(folder_);
}

}  // namespace untorch

// cuModuleLoad for model libraries.
UNTORCH_SHIM utModuleLoad(untorch::cuda::Module* module, const char* path) {
  using namespace untorch;
  try {
    const std::string text = path;
    const std::size_t slash = text.rfind('/');
    Table& all = table();
    std::shared_ptr<const Archive> archive;
    std::string entry;
    {
      const std::lock_guard lock(all.mutex);
      const auto it = slash == std::string::npos ? all.folders.end() : all.folders.find(text.substr(0, slash));
      if (it == all.folders.end()) {
        throw_error(ErrorKind::kInvalidFile, "the model asks for its kernel ", text,
                    ", which the package does not hold");
      }
      archive = it->second.first;
      const std::string name = text.substr(slash);  // with the slash
      for (const std::string& cubin : it->second.second->cubins) {
        if (cubin.size() > name.size() && cubin.compare(cubin.size() - name.size(), name.size(), name) == 0)
          entry = cubin;
      }
      if (entry.empty()) {
        throw_error(ErrorKind::kInvalidFile, archive->file()->path(), " lacks the kernel ", name.substr(1),
                    ", which its model asks for");
      }
    }
    return cuda::driver().module_load_data(module, archive->text(entry).data());
  } catch (const Error& e) {
    set_last_error(e.kind(), e.what());
  } catch (const std::exception& e) {
    set_last_error(ErrorKind::kInternal, e.what());
  }
  return cuda::kErrorNotFound;
}
