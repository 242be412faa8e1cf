// Every kernel has a stub, which loads its Kernel's address and jumps to one trampoline. That keeps the registers that
// carry arguments, begins the range, copies the arguments on the stack, calls the kernel, and ends the range. Its frame
// has unwind tables: a kernel may throw.
#include "model/kernel_hooks.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "base/profile.h"

namespace untorch {

#if defined(__x86_64__)

namespace {

// Of a call, for its end: calls of kernels nest only if a kernel calls a model.
thread_local std::vector<std::int64_t>* tickets = nullptr;

}  // namespace

extern "C" {

__attribute__((used, visibility("hidden"))) void untorch_kernel_begin(const KernelHooks::Kernel* kernel) noexcept {
  try {
    if (tickets == nullptr) tickets = new std::vector<std::int64_t>;  // kept with its thread: profiles are rare
    tickets->push_back(-1);
  } catch (...) {
    return;
  }
  if (!profile::is_recording()) return;
  tickets->back() = profile::begin(profile::Kind::kKernel, kernel->name.c_str(), kernel->name.c_str(), false, nullptr);
}

__attribute__((used, visibility("hidden"))) void untorch_kernel_end() noexcept {
  if (tickets == nullptr || tickets->empty()) return;
  profile::end(tickets->back());
  tickets->pop_back();
}

void untorch_kernel_trampoline() noexcept __attribute__((visibility("hidden")));
}

// System V AMD64: arguments in rdi, rsi, rdx, rcx, r8, r9 and xmm0-7, then on the stack. r11 has the Kernel. 64 words
// of the caller's stack are copied, as nothing tells how many arguments there are.
asm(R"(
.text
.hidden untorch_kernel_trampoline
.type untorch_kernel_trampoline, @function
untorch_kernel_trampoline:
  .cfi_startproc
  pushq %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  movq %rsp, %rbp
  .cfi_def_cfa_register %rbp
  pushq %rbx
  .cfi_offset %rbx, -24
  subq $120, %rsp
  movq %r11, %rbx
  movq %rdi, 0(%rsp)
  movq %rsi, 8(%rsp)
  movq %rdx, 16(%rsp)
  movq %rcx, 24(%rsp)
  movq %r8, 32(%rsp)
  movq %r9, 40(%rsp)
  movsd %xmm0, 48(%rsp)
  movsd %xmm1, 56(%rsp)
  movsd %xmm2, 64(%rsp)
  movsd %xmm3, 72(%rsp)
  movsd %xmm4, 80(%rsp)
  movsd %xmm5, 88(%rsp)
  movsd %xmm6, 96(%rsp)
  movsd %xmm7, 104(%rsp)
  movq %rbx, %rdi
  call untorch_kernel_begin
  movq 0(%rsp), %rdi
  movq 8(%rsp), %rsi
  movq 16(%rsp), %rdx
  movq 24(%rsp), %rcx
  movq 32(%rsp), %r8
  movq 40(%rsp), %r9
  movsd 48(%rsp), %xmm0
  movsd 56(%rsp), %xmm1
  movsd 64(%rsp), %xmm2
  movsd 72(%rsp), %xmm3
  movsd 80(%rsp), %xmm4
  movsd 88(%rsp), %xmm5
  movsd 96(%rsp), %xmm6
  movsd 104(%rsp), %xmm7
  subq $512, %rsp
  xorl %eax, %eax
1:
  movq 16(%rbp,%rax,8), %r10
  movq %r10, (%rsp,%rax,8)
  incq %rax
  cmpq $64, %rax
  jne 1b
  call *(%rbx)
  call untorch_kernel_end
  movq -8(%rbp), %rbx
  leave
  .cfi_def_cfa %rsp, 8
  ret
  .cfi_endproc
.size untorch_kernel_trampoline, .-untorch_kernel_trampoline
)");

namespace {

constexpr std::size_t kStubBytes = 32;
constexpr std::string_view kPrefix = "cpp_";

void write_stub(std::byte* at, const KernelHooks::Kernel* kernel) {
  const auto put = [&](std::initializer_list<int> bytes) {
    for (const int byte : bytes) *at++ = static_cast<std::byte>(byte);
  };
  const auto put_address = [&](std::uintptr_t address) {
    std::memcpy(at, &address, sizeof address);
    at += sizeof address;
  };
  put({0xf3, 0x0f, 0x1e, 0xfa});  // endbr64
  put({0x49, 0xbb});              // movabs $kernel, %r11
  put_address(reinterpret_cast<std::uintptr_t>(kernel));
  put({0x48, 0xb8});  // movabs $trampoline, %rax
  put_address(reinterpret_cast<std::uintptr_t>(&untorch_kernel_trampoline));
  put({0xff, 0xe0});  // jmp *%rax
}

struct Slot {
  std::uintptr_t address, target;
  std::string name;
};

// The slots through which the library calls its own kernels.
std::vector<Slot> find_slots(const ElfImage& elf, std::uintptr_t base) {
  std::vector<Slot> found;
  const std::uint64_t table = elf.tag(DT_JMPREL), bytes = elf.tag(DT_PLTRELSZ);
  if (table == 0 || elf.tag(DT_PLTREL) != DT_RELA) return found;
  for (std::uint64_t at = 0; at + sizeof(Elf64_Rela) <= bytes; at += sizeof(Elf64_Rela)) {
    const auto relocation = elf.value_at<Elf64_Rela>(table + at, "a relocation");
    if (ELF64_R_TYPE(relocation.r_info) != R_X86_64_JUMP_SLOT) continue;
    const Elf64_Sym symbol = elf.symbol(ELF64_R_SYM(relocation.r_info));
    const std::string_view name = elf.string(symbol.st_name);
    if (symbol.st_shndx == SHN_UNDEF || ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || !name.starts_with(kPrefix))
      continue;
    found.push_back({base + relocation.r_offset, base + symbol.st_value, std::string(name)});
  }
  return found;
}

// Writes a slot that may be read-only since the library was opened, and leaves its page as it was.
bool write_slot(const ElfImage& elf, std::uintptr_t base, std::uintptr_t slot, std::uintptr_t value) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* const start = reinterpret_cast<void*>(slot / page * page);  // a slot is aligned: in one page
  const Elf64_Phdr* const relro = elf.segment(PT_GNU_RELRO);
  const bool is_sealed =
      relro != nullptr && slot >= base + relro->p_vaddr && slot < base + relro->p_vaddr + relro->p_memsz;
  if (is_sealed && mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return false;
  std::memcpy(reinterpret_cast<void*>(slot), &value, sizeof value);
  if (is_sealed) (void)mprotect(start, page, PROT_READ);
  return true;
}

}  // namespace

KernelHooks::KernelHooks(const ElfImage& elf, std::uintptr_t base) {
  const std::vector<Slot> slots = find_slots(elf, base);
  if (slots.empty()) return;
  code_bytes_ = slots.size() * kStubBytes;
  void* const code = mmap(nullptr, code_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (code == MAP_FAILED) return;
  code_ = code;
  for (const Slot& slot : slots) {
    auto* const stub = static_cast<std::byte*>(code) + kernels_.size() * kStubBytes;
    kernels_.push_back({slot.target, slot.name});
    write_stub(stub, &kernels_.back());
  }
  if (mprotect(code, code_bytes_, PROT_READ | PROT_EXEC) != 0) {  // a system that allows no code but a file's
    kernels_.clear();
    return;
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto stub = reinterpret_cast<std::uintptr_t>(static_cast<std::byte*>(code) + i * kStubBytes);
    (void)write_slot(elf, base, slots[i].address, stub);
  }
}

KernelHooks::~KernelHooks() {
  if (code_ != nullptr) (void)munmap(code_, code_bytes_);
}

#else

KernelHooks::KernelHooks(const ElfImage&, std::uintptr_t) {}
KernelHooks::~KernelHooks() = default;

#endif

}  // namespace untorch
