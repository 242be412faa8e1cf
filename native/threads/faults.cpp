// Faults of generated code that no check catches: an integer division by zero, and an exception that leaves a parallel
// region. Both would end the process; in a model call they become the call's error.
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "threads/call.h"

namespace untorch::threads {
namespace {

// Code of libuntorch and of opened model libraries. A signal handler reads it, so there is no lock: a slot is free
// when its begin is 0.
struct CodeRange {
  std::atomic<std::uintptr_t> begin, end;
};
CodeRange code_ranges[4096];
std::atomic<int> num_code_ranges{0};  // slots that were ever used

#if defined(__x86_64__)

bool is_model_code(std::uintptr_t address) noexcept {
  const int count = num_code_ranges.load(std::memory_order_acquire);
  for (int i = 0; i < count; ++i) {
    const std::uintptr_t begin = code_ranges[i].begin.load(std::memory_order_acquire);
    if (begin != 0 && address >= begin && address < code_ranges[i].end.load(std::memory_order_relaxed)) return true;
  }
  return false;
}

constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// div or idiv, as AMD64 Architecture Programmer's Manual, volume 3, encodes it: prefixes, REX, F6 or F7, ModRM with /6
// or /7, SIB, displacement.
struct Division {
  unsigned length;  // of the instruction
  unsigned bits;    // of an operand
  bool is_signed;
  std::int64_t divisor;  // sign-extended
};

template <class T>
T read(std::uintptr_t address) noexcept {
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
}

std::optional<Division> decode_division(const greg_t* registers) noexcept {
  const auto start = static_cast<std::uintptr_t>(registers[REG_RIP]);
  std::uintptr_t at = start;
  bool is_short = false, is_address_short = false;
  for (;; ++at) {
    const auto prefix = read<std::uint8_t>(at);
    if (prefix == 0x66) {
      is_short = true;
    } else if (prefix == 0x67) {
      is_address_short = true;
    } else if (prefix != 0x2e && prefix != 0x36 && prefix != 0x3e && prefix != 0x26 && prefix != 0xf2 &&
               prefix != 0xf3) {
      break;  // FS and GS change the address: nothing that computes tensors uses them
    }
    if (at - start > 8) return {};
  }
  unsigned rex = 0;
  if ((read<std::uint8_t>(at) & 0xf0u) == 0x40) rex = read<std::uint8_t>(at++);
  const auto opcode = read<std::uint8_t>(at++);
  const auto modrm = read<std::uint8_t>(at++);
  const unsigned operation = modrm >> 3 & 7u, mode = modrm >> 6;
  if ((opcode != 0xf6 && opcode != 0xf7) || operation < 6) return {};
  Division found{};
  found.is_signed = operation == 7;
  found.bits = opcode == 0xf6 ? 8 : (rex & 8u) != 0 ? 64 : is_short ? 16 : 32;
  const unsigned base_bit = (rex & 1u) << 3, index_bit = (rex & 2u) << 2;

  std::uintptr_t operand = 0;
  std::uint64_t value = 0;
  if (mode == 3) {
    unsigned reg = (modrm & 7u) | base_bit;
    const bool is_high = found.bits == 8 && rex == 0 && reg >= 4;  // AH, CH, DH, BH
    if (is_high) reg -= 4;
    value = static_cast<std::uint64_t>(registers[kRegisters[reg]]) >> (is_high ? 8 : 0);
  } else {
    std::uint64_t address = 0;
    unsigned base = modrm & 7u;
    bool has_base = true;
    if (base == 4) {
      const auto sib = read<std::uint8_t>(at++);
      const unsigned index = (sib >> 3 & 7u) | index_bit;
      base = sib & 7u;
      has_base = !(base == 5 && mode == 0);
      if (index != 4) address += static_cast<std::uint64_t>(registers[kRegisters[index]]) << (sib >> 6);
    } else if (base == 5 && mode == 0) {
      has_base = false;
      address = at + 4;  // relative to the next instruction, which follows the displacement
    }
    if (has_base) address += static_cast<std::uint64_t>(registers[kRegisters[base | base_bit]]);
    if (mode == 1) {
      address += static_cast<std::uint64_t>(std::int64_t{read<std::int8_t>(at)});
      at += 1;
    } else if (mode == 2 || !has_base) {
      address += static_cast<std::uint64_t>(std::int64_t{read<std::int32_t>(at)});
      at += 4;
    }
    operand = is_address_short ? address & 0xffffffffu : address;
    // The processor has just read it.
    value = found.bits == 8    ? read<std::uint8_t>(operand)
            : found.bits == 16 ? read<std::uint16_t>(operand)
            : found.bits == 32 ? read<std::uint32_t>(operand)
                               : read<std::uint64_t>(operand);
  }
  const unsigned unused = 64 - found.bits;
  found.divisor = static_cast<std::int64_t>(value << unused) >> unused;
  found.length = static_cast<unsigned>(at - start);
  return found;
}

// Replaces the low bits of a register; 32 bits clear the upper half, as the processor does.
void put(greg_t& reg, unsigned bits, unsigned shift, std::uint64_t value) noexcept {
  const std::uint64_t mask = (bits == 64 ? ~0ull : (1ull << bits) - 1) << shift;
  const std::uint64_t kept = bits == 32 ? 0 : static_cast<std::uint64_t>(reg) & ~mask;
  reg = static_cast<greg_t>(kept | (value << shift & mask));
}

// Gives the division a result and goes on behind it. False: it is no such fault.
bool repair_division(greg_t* registers) noexcept {
  const std::optional<Division> division = decode_division(registers);
  if (!division) return false;
  std::uint64_t quotient = 0;
  if (division->divisor == 0) {
    this_thread.call->note_division_by_zero();
  } else if (division->is_signed && division->divisor == -1) {
    quotient = 0 - static_cast<std::uint64_t>(registers[REG_RAX]);  // the smallest number by -1: it wraps, as eager's
  } else {
    return false;
  }
  put(registers[REG_RAX], division->bits, 0, quotient);
  if (division->bits == 8) {
    put(registers[REG_RAX], 8, 8, 0);
  } else {
    put(registers[REG_RDX], division->bits, 0, 0);
  }
  registers[REG_RIP] += division->length;
  return true;
}

struct sigaction previous_action;

void on_sigfpe(int number, siginfo_t* info, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  if (info->si_code == FPE_INTDIV && this_thread.call != nullptr &&
      is_model_code(static_cast<std::uintptr_t>(registers[REG_RIP])) && repair_division(registers)) {
    return;
  }
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(number, info, context);
  } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(number);
  } else {
    const bool was_sent = info->si_code <= 0;
    if (was_sent && previous_action.sa_handler == SIG_IGN) return;
    signal(number, SIG_DFL);
    if (was_sent) raise(number);  // an instruction faults again by itself; either ends the process
  }
}

void install_sigfpe() noexcept {
  Dl_info self{};
  if (dladdr(reinterpret_cast<void*>(&install_sigfpe), &self) != 0) {
    const auto* const image = static_cast<const char*>(self.dli_fbase);
    const auto* const header = reinterpret_cast<const Elf64_Ehdr*>(image);
    const auto* const segments = reinterpret_cast<const Elf64_Phdr*>(image + header->e_phoff);
    for (unsigned i = 0; i < header->e_phnum; ++i) {
      if (segments[i].p_type != PT_LOAD || (segments[i].p_flags & PF_X) == 0) continue;
      add_code(image + segments[i].p_vaddr, image + segments[i].p_vaddr + segments[i].p_memsz);
    }
  }
  struct sigaction action {};
  action.sa_sigaction = on_sigfpe;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGFPE, &action, &previous_action);
}

#else

void install_sigfpe() noexcept {}  // a division by zero gives 0 on aarch64, without a trap

#endif

std::terminate_handler previous_terminate = nullptr;

std::string text_of_current_exception() {
  try {
    if (const std::exception_ptr caught = std::current_exception()) std::rethrow_exception(caught);
    return "a parallel loop ended with std::terminate";
  } catch (const std::exception& e) {
    return std::string("a parallel loop threw: ") + e.what();
  } catch (...) {
    return "a parallel loop threw an exception";
  }
}

// The runtime calls it where an exception meets the edge of a region, with the exception caught.
[[noreturn]] void on_terminate() {
  if (in_generated_region()) {
    const bool is_caught = std::current_exception() != nullptr;
    fail_call(ErrorKind::kModel, text_of_current_exception());
    if (is_caught) abi::__cxa_end_catch();
    leave_region();
  }
  if (previous_terminate != nullptr) previous_terminate();
  std::abort();
}

}  // namespace

void add_code(const void* begin, const void* end) noexcept {
  for (int i = 0; i < static_cast<int>(std::size(code_ranges)); ++i) {
    std::uintptr_t free = 0;
    // The end is written last: until then the range is empty.
    if (!code_ranges[i].begin.compare_exchange_strong(free, reinterpret_cast<std::uintptr_t>(begin))) continue;
    code_ranges[i].end.store(reinterpret_cast<std::uintptr_t>(end), std::memory_order_relaxed);
    int count = num_code_ranges.load(std::memory_order_relaxed);
    while (count <= i && !num_code_ranges.compare_exchange_weak(count, i + 1, std::memory_order_release)) {
    }
    return;
  }
}

void remove_code(const void* begin) noexcept {
  const int count = num_code_ranges.load(std::memory_order_acquire);
  for (int i = 0; i < count; ++i) {
    if (code_ranges[i].begin.load(std::memory_order_relaxed) != reinterpret_cast<std::uintptr_t>(begin)) continue;
    code_ranges[i].end.store(0, std::memory_order_relaxed);
    code_ranges[i].begin.store(0, std::memory_order_release);
    return;
  }
}

void install_fault_handlers() noexcept {
  [[maybe_unused]] static const bool installed = [] {
    install_sigfpe();
    previous_terminate = std::set_terminate(on_terminate);
    return true;
  }();
}

}  // namespace untorch::threads
