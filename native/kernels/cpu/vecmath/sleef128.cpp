// The SLEEF names of 128-bit vectors (f4, d2), compiled with the flags of that width (native/CMakeLists.txt).
#if defined(__x86_64__)
#define UNTORCH_SLEEF_F(name, accuracy) Sleef_##name##f4##accuracy
#define UNTORCH_SLEEF_D(name, accuracy) Sleef_##name##d2##accuracy
#define UNTORCH_SLEEF_TABLE kSleef128
#define UNTORCH_SLEEF_DOUBLE Double2

#include "kernels/cpu/vecmath/sleef_export.h"
#endif
