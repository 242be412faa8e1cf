// untorch_vecmath_apply: a vector function over arrays, by its name. Vectors cannot be passed through ctypes, arrays
// can.
#include <cstring>
#include <initializer_list>

#include "kernels/cpu/vecmath/sleef_table.h"

// 0: done; 1: no function of this name; 2: this CPU lacks the function's vector width. b may be null for functions of
// one argument; Sleef_sincos… writes 2·n elements, sines first.
extern "C" __attribute__((visibility("default"))) int untorch_vecmath_apply(const char* name, const void* a,
                                                                            const void* b, void* out, std::int64_t n) {
#if defined(__x86_64__)
  using namespace untorch::kernels::vecmath;
  __builtin_cpu_init();
  const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_v4 = has_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  struct Width {
    const NamedFunction* table;
    bool usable;
  };
  for (const Width& width : {Width{kSleef128, true}, Width{kSleef256, has_v3}, Width{kSleef512, has_v4}}) {
    for (const NamedFunction* entry = width.table; entry->name != nullptr; ++entry) {
      if (std::strcmp(entry->name, name) != 0) continue;
      if (!width.usable) return 2;
      entry->apply(a, b, out, n);
      return 0;
    }
  }
#else
  (void)name, (void)a, (void)b, (void)out, (void)n;
#endif
  return 1;
}
