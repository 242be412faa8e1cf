// The exported vector functions by name, for the test hook.
#pragma once

#include <cstdint>

namespace untorch::kernels::vecmath {

struct NamedFunction {
  const char* name;  // null ends a table
  // out[i] = f(a[i], b[i]) for n elements; b is null for functions of one argument. The sine and cosine pair writes n
  // sines, then n cosines.
  void (*apply)(const void* a, const void* b, void* out, std::int64_t n);
};

extern const NamedFunction kSleef128[];
extern const NamedFunction kSleef256[];
extern const NamedFunction kSleef512[];

}  // namespace untorch::kernels::vecmath
