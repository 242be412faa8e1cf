// The SLEEF names of 512-bit vectors (f16, d8), compiled with the flags of that width (native/CMakeLists.txt).
#if defined(__x86_64__)
#define UNTORCH_SLEEF_F(name, accuracy) Sleef_##name##f16##accuracy
#define UNTORCH_SLEEF_D(name, accuracy) Sleef_##name##d8##accuracy
#define UNTORCH_SLEEF_TABLE kSleef512
#define UNTORCH_SLEEF_DOUBLE Double8

#include "kernels/cpu/vecmath/sleef_export.h"
#endif
