// Activation and residual on a tile of C. Included by *.isa.cpp files only.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {

void apply_epilogue(std::int64_t rows, std::int64_t cols, Epilogue epilogue, const float* residual, std::int64_t ldr,
                    float* c, std::int64_t ldc);

}  // namespace untorch::kernels::UNTORCH_ISA
