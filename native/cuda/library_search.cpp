// The search for NVIDIA's libraries. The process-wide lists are never freed: libraries may be opened at process exit.
#include "cuda/library_search.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <mutex>

namespace untorch::cuda {
namespace {

struct State {
  std::mutex mutex;
  std::vector<std::string> folders;
  std::vector<OpenedLibrary> opened;
};
State& state() {
  static State& made = *new State;
  return made;
}

// The file that a symbol of the library, or the library itself, comes from.
std::string path_of(void* library, const char* name) {
  // The link map's name is what the loader opened; dlinfo needs no symbol of the library.
  char folder[PATH_MAX + 1] = "";
  if (dlinfo(library, RTLD_DI_ORIGIN, folder) == 0 && folder[0] != '\0') return std::string(folder) + "/" + name;
  return name;
}

// The folder that libuntorch.so lies in, links resolved; empty when the loader does not know.
std::string own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&open_library), &info) == 0 || info.dli_fname == nullptr) return {};
  char resolved[PATH_MAX];
  const std::string path = realpath(info.dli_fname, resolved) != nullptr ? resolved : info.dli_fname;
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string(".") : path.substr(0, slash);
}

struct Place {
  std::string folder;  // empty: the system's search path
  const char* found;
};

std::vector<Place> places(const LibraryHint& hint) {
  std::vector<Place> list;
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    for (const std::string& folder : s.folders) list.push_back({folder, "added folder"});
  }
  if (const std::string own = own_folder(); !own.empty()) {
    const std::string wheels = own + "/../nvidia/";
    list.push_back({wheels + "cu13/lib", "wheel"});
    list.push_back({wheels + hint.folder + "/lib", "wheel"});
  }
  if (const char* const conda = std::getenv("CONDA_PREFIX"); conda != nullptr && conda[0] == '/') {
    list.push_back({std::string(conda) + "/lib", "conda"});
  }
  list.push_back({{}, "system"});
  list.push_back({"/usr/local/cuda/lib64", "toolkit"});
  return list;
}

void* record(void* library, const LibraryHint& hint, const char* name, const char* found) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.opened.push_back({hint.title, name, path_of(library, name), found});
  return library;
}

}  // namespace

void* open_library(std::initializer_list<const char*> names, const LibraryHint& hint, std::string& error) {
  // Two copies of one library in a process cost twice its memory: one that is already loaded is taken.
  for (const char* const name : names) {
    if (void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); library != nullptr) {
      return record(library, hint, name, "already loaded");
    }
  }
  std::string looked, broken;
  for (const Place& place : places(hint)) {
    for (const char* const name : names) {
      const std::string path = place.folder.empty() ? name : place.folder + "/" + name;
      if (!place.folder.empty() && access(path.c_str(), F_OK) != 0) continue;
      if (void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); library != nullptr) {
        return record(library, hint, name, place.found);
      }
      // A file that exists and does not open: its reason says more than "not found".
      if (const char* const reason = dlerror(); !place.folder.empty() && reason != nullptr) {
        broken += broken.empty() ? "; found, but it does not open: " : "; ";
        broken += reason;
      }
    }
    looked += looked.empty() ? "" : ", ";
    looked += place.folder.empty() ? "the system's search path" : place.folder;
  }
  std::string wanted;
  for (const char* const name : names) wanted += wanted.empty() ? name : std::string(" or ") + name;
  const std::string package = std::string("pip install ") + hint.package;
  error = std::string(hint.title) + " was not found: looked for " + wanted + " among the loaded libraries, in " +
          looked + broken +
          ". Install it with: " + (hint.in_extra ? "pip install 'untorch[cuda]' (or: " + package + ")" : package) +
          ", or name its folder with untorch_add_library_path";
  return nullptr;
}

void add_search_path(const std::string& folder) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  for (const std::string& known : s.folders) {
    if (known == folder) return;
  }
  s.folders.push_back(folder);
}

std::vector<OpenedLibrary> opened_libraries() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.opened;
}

}  // namespace untorch::cuda
