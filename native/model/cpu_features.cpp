// cpuid bits by name; vector features count only where the operating system saves their registers.
#include "model/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstdint>

namespace untorch {
namespace {

#if defined(__x86_64__)

enum Register { kEax, kEbx, kEcx, kEdx };

struct Feature {
  const char* name;
  unsigned leaf, subleaf;
  Register reg;
  unsigned bit;
  enum State { kPlain, kAvx, kAvx512, kAmx } state;
};

constexpr Feature kFeatures[] = {
    {"pni", 1, 0, kEcx, 0, Feature::kPlain},
    {"ssse3", 1, 0, kEcx, 9, Feature::kPlain},
    {"sse4_1", 1, 0, kEcx, 19, Feature::kPlain},
    {"sse4_2", 1, 0, kEcx, 20, Feature::kPlain},
    {"popcnt", 1, 0, kEcx, 23, Feature::kPlain},
    {"movbe", 1, 0, kEcx, 22, Feature::kPlain},
    {"abm", 0x80000001u, 0, kEcx, 5, Feature::kPlain},
    {"avx", 1, 0, kEcx, 28, Feature::kAvx},
    {"f16c", 1, 0, kEcx, 29, Feature::kAvx},
    {"fma", 1, 0, kEcx, 12, Feature::kAvx},
    {"bmi1", 7, 0, kEbx, 3, Feature::kPlain},
    {"avx2", 7, 0, kEbx, 5, Feature::kAvx},
    {"bmi2", 7, 0, kEbx, 8, Feature::kPlain},
    {"gfni", 7, 0, kEcx, 8, Feature::kPlain},
    {"vaes", 7, 0, kEcx, 9, Feature::kAvx},
    {"vpclmulqdq", 7, 0, kEcx, 10, Feature::kAvx},
    {"avx_vnni", 7, 1, kEax, 4, Feature::kAvx},
    {"avx512f", 7, 0, kEbx, 16, Feature::kAvx512},
    {"avx512dq", 7, 0, kEbx, 17, Feature::kAvx512},
    {"avx512ifma", 7, 0, kEbx, 21, Feature::kAvx512},
    {"avx512cd", 7, 0, kEbx, 28, Feature::kAvx512},
    {"avx512bw", 7, 0, kEbx, 30, Feature::kAvx512},
    {"avx512vl", 7, 0, kEbx, 31, Feature::kAvx512},
    {"avx512vbmi", 7, 0, kEcx, 1, Feature::kAvx512},
    {"avx512_vbmi2", 7, 0, kEcx, 6, Feature::kAvx512},
    {"avx512_vnni", 7, 0, kEcx, 11, Feature::kAvx512},
    {"avx512_bitalg", 7, 0, kEcx, 12, Feature::kAvx512},
    {"avx512_vpopcntdq", 7, 0, kEcx, 14, Feature::kAvx512},
    {"avx512_bf16", 7, 1, kEax, 5, Feature::kAvx512},
    {"avx512_fp16", 7, 0, kEdx, 23, Feature::kAvx512},
    {"amx_bf16", 7, 0, kEdx, 22, Feature::kAmx},
    {"amx_tile", 7, 0, kEdx, 24, Feature::kAmx},
    {"amx_int8", 7, 0, kEdx, 25, Feature::kAmx},
};

// XCR0: which register files the operating system saves.
std::uint64_t enabled_state() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & (1u << 27)) == 0) return 0;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

bool present(const Feature& feature) noexcept {
  static const std::uint64_t state = enabled_state();
  constexpr std::uint64_t kMasks[] = {0, 0x6, 0xe6, 0x60000};
  const std::uint64_t mask = kMasks[feature.state];
  if ((state & mask) != mask) return false;
  unsigned regs[4] = {};
  if (__get_cpuid_count(feature.leaf, feature.subleaf, &regs[0], &regs[1], &regs[2], &regs[3]) == 0) return false;
  return (regs[feature.reg] >> feature.bit & 1u) != 0;
}

#else

struct Feature {
  const char* name;
};
constexpr Feature kFeatures[] = {{"asimd"}};
bool present(const Feature&) noexcept { return true; }  // part of the aarch64 baseline

#endif

}  // namespace

const char* cpu_architecture() noexcept {
#if defined(__x86_64__)
  return "x86_64";
#else
  return "aarch64";
#endif
}

bool cpu_has(std::string_view feature) noexcept {
  for (const Feature& known : kFeatures) {
    if (feature == known.name) return present(known);
  }
  return false;
}

std::vector<std::string> cpu_features() {
  std::vector<std::string> names;
  for (const Feature& known : kFeatures) {
    if (present(known)) names.emplace_back(known.name);
  }
  return names;
}

std::vector<std::string> missing_cpu_features(const std::vector<std::string>& required) {
  std::vector<std::string> missing;
  std::copy_if(required.begin(), required.end(), std::back_inserter(missing),
               [](const std::string& name) { return !cpu_has(name); });
  return missing;
}

}  // namespace untorch
