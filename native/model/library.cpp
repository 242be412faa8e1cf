// Opens model libraries from a memfd, so that no file is written and a read-only container works.
#include "model/library.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/kernel_registry.h"
#include "model/elf.h"
#include "model/elf_check.h"
#include "model/elf_rewrite.h"

namespace untorch {
namespace {

// The name that the dynamic linker knows this very library by; model libraries are bound to it.
constexpr const char* kSoname = "libuntorch.so";

void* own_handle() {
  static void* const handle = [] {
    Dl_info info{};
    void* self = nullptr;
    if (dladdr(reinterpret_cast<void*>(&own_handle), &info) != 0 && info.dli_fname != nullptr) {
      self = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    }
    return self;
  }();
  return handle;
}

// True for names that only libtorch, or untorch in its place, can define.
bool is_ours_to_serve(std::string_view symbol) {
  for (const char* prefix : {"aoti_", "torch_", "Sleef_", "_ZN2at", "_ZNK2at", "_ZN3c10", "_ZNK3c10", "_ZN5torch"}) {
    if (symbol.starts_with(prefix)) return true;
  }
  return false;
}

// The CUDA runtime's functions and the one driver function that reads a file are ours, under names of their own:
// NVIDIA's may be in the process too, and would be found first. Empty for every other symbol.
std::string own_name(std::string_view symbol) {
  if (symbol.starts_with("cuda")) return "ut" + std::string(symbol.substr(2));
  if (symbol == "cuModuleLoad") return "utModuleLoad";
  return {};
}

void check_symbols(const std::vector<ElfSymbol>& symbols, const std::string& name) {
  std::string missing;
  std::size_t count = 0, of_cuda = 0;
  for (const ElfSymbol& symbol : symbols) {
    const std::string own = own_name(symbol.name);
    if (symbol.is_defined || symbol.is_weak || (own.empty() && !is_ours_to_serve(symbol.name))) continue;
    if (exports_symbol(own.empty() ? symbol.name.data() : own.c_str())) continue;
    missing += (count++ == 0 ? "" : ", ") + std::string(symbol.name);
    if (symbol.name.starts_with("aoti_torch_cuda_")) ++of_cuda;
  }
  if (count != 0) {
    const std::string todo = of_cuda != 0 && !cuda::has_kernels() ? std::string("; ") + cuda::kBuiltWithoutCuda
                                                                  : "; change the model, or update untorch";
    throw_error(ErrorKind::kUnsupported, name, " needs ", count, count == 1 ? " function" : " functions",
                " that this build of untorch does not have: ", missing, todo);
  }
}

// Each open library needs a path of its own: the dynamic linker takes a path that it has seen for the same library,
// and descriptor numbers are used again. "/./" in a path means nothing, so a serial number is written with it.
std::string unique_path(int fd) {
  static std::atomic<unsigned> serial{0};
  std::string path = "/proc/self/fd";
  for (unsigned bits = serial.fetch_add(1); bits != 0; bits >>= 1) path += (bits & 1u) != 0 ? "/./" : "/";
  return path + "/" + std::to_string(fd);
}

int copy_to_memory(const ElfImage& elf, const std::vector<ElfSymbol>& symbols) {
  const std::span<const std::byte> bytes = elf.bytes();
  const std::string& name = elf.name();
  const int fd = memfd_create("untorch-model", MFD_CLOEXEC);
  if (fd < 0)
    throw_error(ErrorKind::kUnsupported, "cannot create a memory file for ", name, ": ", std::strerror(errno));
  const auto fail = [&](const char* what) {
    const int error = errno;
    close(fd);
    throw_error(ErrorKind::kOutOfMemory, what, " (", bytes.size(), " bytes of ", name, "): ", std::strerror(error));
  };
  if (ftruncate(fd, static_cast<off_t>(bytes.size())) != 0) fail("cannot size a memory file");
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = write(fd, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("cannot fill a memory file");
    done += static_cast<std::size_t>(n);
  }
  const bool renames = std::ranges::any_of(
      symbols, [](const ElfSymbol& symbol) { return !symbol.is_defined && !own_name(symbol.name).empty(); });
  if (renames || needs_libtorch(elf) || asks_for_executable_stack(elf)) {
    void* mapped = mmap(nullptr, bytes.size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) fail("cannot map a memory file");
    const std::span<std::byte> copy(static_cast<std::byte*>(mapped), bytes.size());
    try {
      clear_executable_stack(elf, copy);
      for (const ElfSymbol& symbol : symbols) {
        const std::string own = symbol.is_defined ? std::string() : own_name(symbol.name);
        if (!own.empty()) rename_symbol(copy, symbol, own);
      }
      if (needs_libtorch(elf)) rebind_libtorch(elf, copy, kSoname);
    } catch (...) {
      munmap(mapped, bytes.size());
      close(fd);
      throw;
    }
    munmap(mapped, bytes.size());
  }
  return fd;
}

template <class Fn>
void look_up(void* handle, const char* symbol, Fn*& slot) {
  slot = reinterpret_cast<Fn*>(dlsym(handle, symbol));
}

}  // namespace

bool exports_symbol(const char* name) noexcept {
  Dl_info found{}, self{};
  void* address = dlsym(own_handle(), name);
  // dlsym also looks into the libraries that this one needs (libc, libm …); those do not count.
  return address != nullptr && dladdr(address, &found) != 0 &&
         dladdr(reinterpret_cast<void*>(&exports_symbol), &self) != 0 && found.dli_fbase == self.dli_fbase;
}

ModelLibrary::ModelLibrary(std::span<const std::byte> bytes, const std::string& name, bool checks_its_inputs)
    : name_(name) {
  const ElfImage elf(bytes, name);
  check_elf_machine(elf);
  const std::vector<ElfSymbol> symbols = elf.symbols();
  check_symbols(symbols, name);
  own_ = elf.needs(kSoname);
  // Before it is opened: opening runs its initialisers, and those of a library that is no model may do anything.
  const std::vector<std::string_view> functions = check_elf_image(elf);
  for (const char* required : {"CreateWithDevice", "Delete", "Run", "GetNumInputs", "GetNumOutputs", "GetCallSpec"}) {
    const std::string symbol = std::string("AOTInductorModelContainer") + required;
    if (std::find(functions.begin(), functions.end(), symbol) == functions.end()) {
      throw_error(ErrorKind::kInvalidFile, name, " is no model library: it lacks the AOTInductor function ", symbol);
    }
  }
  if (checks_its_inputs) {
    // Generated code looks at this variable before a library's first run. A value that the user has set stays.
    setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0);
  }
  fd_ = copy_to_memory(elf, symbols);
  // RTLD_LOCAL: two models in one process must not run each other's code.
  handle_ = dlopen(unique_path(fd_).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) {
    const char* reason = dlerror();
    close(fd_);
    throw_error(ErrorKind::kUnsupported, "cannot open ", name, ": ", reason != nullptr ? reason : "unknown reason");
  }
  const std::string prefix = "AOTInductorModelContainer";
  const auto find = [&](const std::string& symbol, auto& slot) { look_up(handle_, symbol.c_str(), slot); };
  find(prefix + "CreateWithDevice", api_.create);
  find(prefix + "Delete", api_.destroy);
  find(prefix + "Run", api_.run);
  find(prefix + "RunSingleThreaded", api_.run_single_threaded);
  find(prefix + "GetNumInputs", api_.num_inputs);
  find(prefix + "GetNumOutputs", api_.num_outputs);
  find(prefix + "GetNumConstants", api_.num_constants);
  find(prefix + "GetConstantName", api_.constant_name);
  find(prefix + "GetConstantOriginalFQN", api_.constant_fqn);
  find(prefix + "GetConstantDtype", api_.constant_dtype);
  find(prefix + "GetConstantFromFolded", api_.constant_from_folded);
  find(prefix + "UpdateUserManagedConstantBufferPairs", api_.set_constants_pairs);
  find(prefix + "UpdateUserManagedConstantBuffer", api_.set_constants_map);
  find(prefix + "RunConstantFolding", api_.fold_constants);
  find(prefix + "GetCallSpec", api_.call_spec);
  find(prefix + "GetConstantsBlobSize", api_.blob_size);
  find("AOTInductorModelUpdateConstantsFromBlob", api_.load_blob);
  find("AOTInductorGetLastError", api_.last_error);
}

ModelLibrary::~ModelLibrary() {
  dlclose(handle_);
  close(fd_);
}

}  // namespace untorch
