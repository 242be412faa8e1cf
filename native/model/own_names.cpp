// One table: a whole name, or the start of names.
#include "model/own_names.h"

#include "model/elf_openmp.h"

namespace untorch {
namespace {

enum class Match { kName, kPrefix };

struct OwnName {
  Match match;
  std::string_view theirs, ours;
};

constexpr OwnName kOwnNames[] = {
    // The CUDA runtime's functions; the one driver function that reads a file; modules that containers share.
    {Match::kPrefix, "cuda", "utda"},
    {Match::kName, "cuModuleLoad", "utModuleLoad"},
    {Match::kName, "cuModuleLoadData", "utModuleLoadData"},
    {Match::kName, "cuModuleUnload", "utModuleUnload"},
    // Launches, which the profiler times.
    {Match::kName, "cuLaunchKernel", "utLaunchKernel"},
    {Match::kName, "cuLaunchKernelEx", "utLaunchKernelEx"},
    // glibc's keep a library in the process until the thread ends (model/thread_exit.h).
    {Match::kName, "__cxa_thread_atexit", "utcxx_thread_atexit"},
    {Match::kName, "__cxa_thread_atexit_impl", "utcxx_thread_atexit_impl"},
};

constexpr bool same_lengths() {
  for (const OwnName& name : kOwnNames) {
    if (name.theirs.size() != name.ours.size()) return false;
  }
  return true;
}
static_assert(same_lengths(), "names are overwritten in place");

}  // namespace

std::string own_name(std::string_view symbol) {
  for (const OwnName& name : kOwnNames) {
    const bool fits = name.match == Match::kName ? symbol == name.theirs : symbol.starts_with(name.theirs);
    if (fits) return std::string(name.ours) + std::string(symbol.substr(name.theirs.size()));
  }
  return own_openmp_name(symbol);
}

}  // namespace untorch
