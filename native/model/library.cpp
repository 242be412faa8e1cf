// Opens model libraries from a memfd, so that no file is written and a read-only container works.
#include "model/library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/profile.h"
#include "cuda/kernel_registry.h"
#include "model/elf.h"
#include "model/elf_check.h"
#include "model/elf_openmp.h"
#include "model/elf_rewrite.h"
#include "model/own_names.h"
#include "model/shared_modules.h"
#include "model/thread_exit.h"
#include "threads/call.h"

namespace untorch {
namespace {

// The name that the dynamic linker knows this very library by; model libraries are bound to it.
constexpr const char* kSoname = "libuntorch.so";
constexpr const char* kGetenv = "utgenv";  // below; as long as the usual name

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

// Makes the copy a library that the dynamic linker opens here. `elf` is a view of it.
void rewrite(const ElfImage& elf, const std::vector<ElfSymbol>& symbols, bool checks_its_inputs,
             std::span<std::byte> copy) {
  clear_executable_stack(elf, copy);
  make_closable(elf, copy);
  for (const ElfSymbol& symbol : symbols) {
    if (symbol.is_defined) continue;
    const std::string own = checks_its_inputs && symbol.name == "getenv" ? kGetenv : own_name(symbol.name);
    if (!own.empty()) rename_symbol(copy, symbol, own);
  }
  if (needs_libtorch(elf)) rebind_libtorch(elf, copy, kSoname);
  if (needs_openmp(elf)) rebind_openmp(elf, copy, kSoname);
}

// Where an open library's addresses start.
std::uintptr_t load_address(void* handle) {
  link_map* map = nullptr;
  check(dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr, "dlinfo failed");
  return map->l_addr;
}

// Where it is mapped.
std::pair<std::uintptr_t, std::uintptr_t> mapped_range(std::uintptr_t base, const ElfImage& elf) {
  std::uint64_t start = UINT64_MAX, end = 0;
  for (const Elf64_Phdr& segment : elf.segments()) {
    if (segment.p_type != PT_LOAD) continue;
    start = std::min(start, segment.p_vaddr);
    end = std::max(end, segment.p_vaddr + segment.p_memsz);
  }
  return {base + start, base + end};
}

}  // namespace

bool exports_symbol(const char* name) noexcept {
  Dl_info found{}, self{};
  void* address = dlsym(own_handle(), name);
  // dlsym also looks into the libraries that this one needs (libc, libm …); those do not count.
  return address != nullptr && dladdr(address, &found) != 0 &&
         dladdr(reinterpret_cast<void*>(&exports_symbol), &self) != 0 && found.dli_fbase == self.dli_fbase;
}

ModelLibrary::ModelLibrary(MemoryFile file, bool checks_its_inputs) : file_(std::move(file)) {
  const std::string& name = file_.name();
  const ElfImage elf(file_.bytes(), name);
  check_elf_machine(elf);
  const std::vector<ElfSymbol> symbols = elf.symbols();
  check_symbols(symbols, name);
  own_ = elf.needs(kSoname);
  // Before it is opened: opening runs its initialisers, and those of a library that is no model may do anything.
  const std::unordered_map<std::string_view, std::uint64_t> functions = check_elf_image(elf);
  for (const char* required : {"CreateWithDevice", "Delete", "Run", "GetNumInputs", "GetNumOutputs", "GetCallSpec"}) {
    const std::string symbol = std::string("AOTInductorModelContainer") + required;
    if (functions.count(symbol) == 0) {
      throw_error(ErrorKind::kInvalidFile, name, " is no model library: it lacks the AOTInductor function ", symbol);
    }
  }
  interface_ = read_interface_table(elf);
  rewrite(elf, symbols, checks_its_inputs, file_.bytes());
  file_.seal();
  const fork::Uncut uncut;  // a child would find the dynamic linker's lock taken
  // RTLD_LOCAL: two models in one process must not run each other's code.
  handle_ = dlopen(unique_path(file_.descriptor()).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) {
    const char* const error = dlerror();
    const std::string reason = error != nullptr ? error : "unknown reason";
    ErrorKind kind = ErrorKind::kUnsupported;
    int system_error = 0;  // the dynamic linker tells the system's reason as text only
    for (const int number : {EMFILE, ENFILE, ENOMEM}) {
      if (reason.find(std::strerror(number)) != std::string::npos) kind = kind_of_errno(system_error = number, kind);
    }
    if (reason.find("failed to map segment") != std::string::npos) kind = ErrorKind::kOutOfMemory;
    throw Error(kind, "cannot open " + name + ": " + reason, system_error);
  }
  const std::uintptr_t base = load_address(handle_);
  std::tie(start_, end_) = mapped_range(base, elf);
  register_code(base, elf);
  if (profile::is_recording()) hooks_ = std::make_unique<KernelHooks>(elf, base);
  const std::string prefix = "AOTInductorModelContainer";
  // In the table that was checked, without the dynamic linker: it would also look into the libraries that are needed.
  const auto find = [&]<class Fn>(const std::string& symbol, Fn*& slot) {
    const auto it = functions.find(symbol);
    if (it != functions.end()) slot = reinterpret_cast<Fn*>(base + it->second);
  };
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

void ModelLibrary::register_code(std::uintptr_t base, const ElfImage& elf) {
  for (const Elf64_Phdr& segment : elf.segments()) {
    if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
    const auto* const begin = reinterpret_cast<const std::byte*>(base + segment.p_vaddr);
    threads::add_code(begin, begin + segment.p_memsz);
    code_.push_back(begin);
  }
}

ModelLibrary::~ModelLibrary() {
  const fork::Uncut uncut;
  for (const std::byte* begin : code_) threads::remove_code(begin);
  destroy_thread_locals(start_, end_);
  unload_modules(start_, end_);
  dlclose(handle_);
}

}  // namespace untorch

// What libraries that check their own inputs have in the place of getenv.
extern "C" UNTORCH_EXPORT char* utgenv(const char* name) {
  static char on[] = "1";
  char* const value = std::getenv(name);
  return value == nullptr && std::strcmp(name, "AOTI_RUNTIME_CHECK_INPUTS") == 0 ? on : value;
}
