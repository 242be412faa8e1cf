// The CPU's instruction-set level by CPUID, read once.
#include "kernels/cpu/common/isa.h"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace untorch::kernels {
namespace {

constexpr const char* kVnniSuffix = "-vnni";

Isa detect() noexcept {
  Isa best = Isa::kBaseline;
#if !defined(UNTORCH_WITHOUT_V3)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    best = Isa::kV3;
#if !defined(UNTORCH_WITHOUT_V4)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      best = Isa::kV4;
    }
#endif
  }
#endif
  if (const char* wanted = std::getenv("UNTORCH_ISA")) {
    for (const Isa isa : {Isa::kBaseline, Isa::kV3, Isa::kV4}) {
      const std::size_t length = std::strlen(isa_name(isa));
      const bool named = std::strncmp(wanted, isa_name(isa), length) == 0 &&
                         (wanted[length] == '\0' || std::strcmp(wanted + length, kVnniSuffix) == 0);
      if (named && isa < best) best = isa;
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

bool detect_vnni() noexcept {
#if defined(__x86_64__)
  const char* const wanted = std::getenv("UNTORCH_ISA");
  if (wanted != nullptr && std::strstr(wanted, kVnniSuffix) == nullptr) return false;
  const Isa isa = detect();
  return (isa == Isa::kV4 && __builtin_cpu_supports("avx512vnni")) ||
         (isa == Isa::kV3 && __builtin_cpu_supports("avxvnni"));
#else
  return false;
#endif
}

const Isa detected = detect();
const bool has_bf16 = detect_bf16();
const bool has_vnni = detect_vnni();

}  // namespace

Isa cpu_isa() noexcept { return detected; }

bool cpu_has_bf16() noexcept { return has_bf16; }

bool cpu_has_vnni() noexcept { return has_vnni; }

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
