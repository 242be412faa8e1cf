// NVIDIA's libraries (cuBLAS, cuDNN …), opened with dlopen at first use, wherever they are installed.
//
//   std::string error;
//   void* const library = open_library({"libcublasLt.so.13", "libcublasLt.so.12"}, kCublas, error);
//   if (library == nullptr) throw_error(ErrorKind::kUnsupported, error);
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

namespace untorch::cuda {

// A library's name, and how to install it.
struct LibraryHint {
  const char* title;     // "cuBLAS"
  const char* folder;    // of NVIDIA's wheel: <site-packages>/nvidia/<folder>/lib
  const char* package;   // what pip installs
  bool in_extra = true;  // untorch[cuda] brings it
};
inline constexpr LibraryHint kCublas{"cuBLAS", "cublas", "nvidia-cublas"};
inline constexpr LibraryHint kCudnn{"cuDNN", "cudnn", "nvidia-cudnn-cu13"};

// dlopen's handle on the first of `names` (sonames, the preferred one first) that one of these places has, in this
// order: libraries that the process has loaded, folders given to add_search_path, NVIDIA's wheels beside this package,
// $CONDA_PREFIX/lib, the system's search path, /usr/local/cuda/lib64. Null when none has: `error` then says what was
// looked for, where, and what to install. The library stays open until the process ends.
void* open_library(std::initializer_list<const char*> names, const LibraryHint& hint, std::string& error);

// Adds a folder to look in, before the places that are known; for what is opened after the call.
void add_search_path(const std::string& folder);

// What open_library has opened so far, for reports on the installation.
struct OpenedLibrary {
  std::string title;  // "cuBLAS"
  std::string name;   // the soname
  std::string path;   // the file
  std::string found;  // where: "already loaded", "wheel", …
};
std::vector<OpenedLibrary> opened_libraries();

}  // namespace untorch::cuda
