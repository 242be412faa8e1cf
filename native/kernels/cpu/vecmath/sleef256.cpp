// The SLEEF names of 256-bit vectors (f8, d4), compiled with the flags of that width (native/CMakeLists.txt).
#if defined(__x86_64__)
#define UNTORCH_SLEEF_F(name, accuracy) Sleef_##name##f8##accuracy
#define UNTORCH_SLEEF_D(name, accuracy) Sleef_##name##d4##accuracy
#define UNTORCH_SLEEF_TABLE kSleef256
#define UNTORCH_SLEEF_DOUBLE Double4

#include "kernels/cpu/vecmath/sleef_export.h"
#endif
