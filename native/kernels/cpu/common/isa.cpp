// The CPU's instruction-set level by CPUID, read once.
#include "kernels/cpu/common/isa.h"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace untorch::kernels {
namespace {

constexpr const char *kVnniSuffix = "-vnni", *kBf16Suffix = "-bf16";

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
      const char* const suffix = wanted + length;
      const bool named =
          std::strncmp(wanted, isa_name(isa), length) == 0 &&
          (*suffix == '\0' || std::strcmp(suffix, kVnniSuffix) == 0 || std::strcmp(suffix, kBf16Suffix) == 0);
      if (named && isa < best) best = isa;
    }
  }
  return best;
}

#if defined(__x86_64__)
// Whether UNTORCH_ISA leaves what has one of these suffixes.
bool is_left(std::initializer_list<const char*> suffixes) noexcept {
  const char* const wanted = std::getenv("UNTORCH_ISA");
  if (wanted == nullptr) return true;
  for (const char* const suffix : suffixes) {
    if (std::strstr(wanted, suffix) != nullptr) return true;
  }
  return false;
}
#endif

bool detect_bf16() noexcept {
#if defined(__x86_64__)
  return is_left({kBf16Suffix}) && detect() == Isa::kV4 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool detect_fast_bf16() noexcept {
#if defined(__x86_64__)
  return detect_bf16() && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

bool detect_vnni() noexcept {
#if defined(__x86_64__)
  if (!is_left({kVnniSuffix, kBf16Suffix})) return false;
  const Isa isa = detect();
  return (isa == Isa::kV4 && __builtin_cpu_supports("avx512vnni")) ||
         (isa == Isa::kV3 && __builtin_cpu_supports("avxvnni"));
#else
  return false;
#endif
}

bool detect_amx() noexcept {
#if defined(__x86_64__) && defined(__linux__)
  if (!is_left({}) || !detect_bf16() || !detect_vnni()) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAll) != kAll) return false;
  // Of arch_prctl: Linux gives no process the tiles' 8 KiB of state, of which signal stacks have to be larger, unasked.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

const Isa detected = detect();
const bool has_bf16 = detect_bf16();
const bool has_fast_bf16 = detect_fast_bf16();
const bool has_vnni = detect_vnni();

}  // namespace

Isa cpu_isa() noexcept { return detected; }

bool cpu_has_bf16() noexcept { return has_bf16; }

bool cpu_has_fast_bf16() noexcept { return has_fast_bf16; }

bool cpu_has_vnni() noexcept { return has_vnni; }

bool cpu_has_amx() noexcept {
  static const bool has_amx = detect_amx();
  return has_amx;
}

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
