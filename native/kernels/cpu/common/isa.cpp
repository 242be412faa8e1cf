// The CPU's instruction-set level by CPUID, read once.
#include "kernels/cpu/common/isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace untorch::kernels {
namespace {

Isa detect() noexcept {
  Isa best = Isa::kBaseline;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    best = Isa::kV3;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      best = Isa::kV4;
    }
  }
#endif
  if (const char* wanted = std::getenv("UNTORCH_ISA")) {
    for (const Isa isa : {Isa::kBaseline, Isa::kV3, Isa::kV4}) {
      if (std::strcmp(wanted, isa_name(isa)) == 0 && isa < best) best = isa;
    }
  }
  return best;
}

bool detect_bf16() noexcept {
#if defined(__x86_64__)
  return std::getenv("UNTORCH_ISA") == nullptr && detect() == Isa::kV4 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

const Isa detected = detect();
const bool has_bf16 = detect_bf16();

}  // namespace

Isa cpu_isa() noexcept { return detected; }

bool cpu_has_bf16() noexcept { return has_bf16; }

const char* isa_name(Isa isa) noexcept {
  switch (isa) {
    case Isa::kV3:
      return "v3";
    case Isa::kV4:
      return "v4";
    default:
      return "baseline";
  }
}

}  // namespace untorch::kernels
