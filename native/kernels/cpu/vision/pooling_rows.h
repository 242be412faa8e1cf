// The inner loop of channels-last maximum pooling, dispatched on the instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"

// best[i] = max(best[i], from[i]) over n channels and at[i] = here where it was taken; NaN wins. T is float or double.
UNTORCH_ISA_DECLARE(template <class T>
                    void max_channels(std::int64_t n, const T* from, std::int64_t here, T* best, std::int64_t* at);)
