// Times the loops of a model library on the CPU. Its wrapper calls them (cpp_fused_…) through the procedure linkage
// table; while a profile is recorded, slots of the global offset table are pointed at trampolines (PLT hooking).
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "model/elf.h"

namespace untorch {

// Hooks of one open library, for its lifetime. x86-64 only: elsewhere nothing is hooked, and the profile shows the time
// between C functions instead.
class KernelHooks {
 public:
  // Redirects the kernels of a library that was opened at `base`. Where the system gives no memory for trampolines,
  // nothing is hooked.
  KernelHooks(const ElfImage& elf, std::uintptr_t base);
  ~KernelHooks();
  KernelHooks(const KernelHooks&) = delete;
  KernelHooks& operator=(const KernelHooks&) = delete;

  std::size_t count() const noexcept { return kernels_.size(); }

  struct Kernel {
    std::uintptr_t target;  // first: the trampoline calls it
    std::string name;
  };

 private:
  std::deque<Kernel> kernels_;  // their addresses are in the code of the trampolines
  void* code_ = nullptr;
  std::size_t code_bytes_ = 0;
};

}  // namespace untorch
