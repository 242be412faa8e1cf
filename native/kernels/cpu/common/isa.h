// Function multiversioning: the CPU's instruction-set level, and the dispatch of kernels on it.
//
// A file named *.isa.cpp is compiled once for each level below, each time with UNTORCH_ISA set to the level's name
// (its namespace) and the compiler flags of that level. A caller picks with UNTORCH_ISA_CALL:
//
//   namespace untorch::kernels::UNTORCH_ISA { void sgemm(…); }                      // gemm.isa.cpp
//   UNTORCH_ISA_DECLARE(void sgemm(…);)                                             // header
//   UNTORCH_ISA_CALL(sgemm)(…);                                                     // anywhere
//
// *.isa.cpp files include no standard header that defines inline functions with external linkage beyond what is
// always inlined (no <vector>, <string>, <algorithm>): such a function compiled for AVX-512 could be the copy that the
// linker keeps for everybody.
#pragma once

namespace untorch::kernels {

enum class Isa : int {
  kBaseline = 0,  // x86-64-v2, or whatever the target's default is
  kV3 = 1,        // AVX2, FMA, F16C, BMI2
  kV4 = 2,        // AVX-512 F/BW/CD/DQ/VL
};

// The best level of this machine; UNTORCH_ISA=baseline|v3|v4 in the environment lowers it (for tests), and takes away
// what the functions below have on top of it: v3-vnni and v4-vnni keep VNNI, v4-bf16 keeps VNNI and AVX512_BF16.
Isa cpu_isa() noexcept;
// AVX512_BF16 on top of v4.
bool cpu_has_bf16() noexcept;
// Whether vdpbf16ps is faster than FMAs of widened operands, too: on Intel's CPUs it has half of their rate.
bool cpu_has_fast_bf16() noexcept;
// vpdpbusd in the level's widest vectors: AVX512_VNNI on top of v4, AVX-VNNI on top of v3.
bool cpu_has_vnni() noexcept;
// AMX in bfloat16 and int8, on top of v4 with VNNI and AVX512_BF16, where the operating system gives this process the
// registers. Asks it at the first call.
bool cpu_has_amx() noexcept;
const char* isa_name(Isa isa) noexcept;

}  // namespace untorch::kernels

// UNTORCH_WITHOUT_V4, and UNTORCH_WITHOUT_V3 beside it: a library without these levels (UNTORCH_HIGHEST_ISA of CMake).
#if !defined(__x86_64__) && !defined(UNTORCH_WITHOUT_V3)
#define UNTORCH_WITHOUT_V3
#endif
#define UNTORCH_ISA_DECLARE_BASELINE(...) \
  namespace untorch::kernels::baseline {  \
  __VA_ARGS__                             \
  }
#define UNTORCH_ISA_DECLARE_V3(...) \
  namespace untorch::kernels::v3 {  \
  __VA_ARGS__                       \
  }
#define UNTORCH_ISA_DECLARE_V4(...) \
  namespace untorch::kernels::v4 {  \
  __VA_ARGS__                       \
  }
#if defined(UNTORCH_WITHOUT_V3)
#define UNTORCH_ISA_DECLARE(...) UNTORCH_ISA_DECLARE_BASELINE(__VA_ARGS__)
#define UNTORCH_ISA_CALL(name) (::untorch::kernels::baseline::name)
#elif defined(UNTORCH_WITHOUT_V4)
#define UNTORCH_ISA_DECLARE(...)            \
  UNTORCH_ISA_DECLARE_BASELINE(__VA_ARGS__) \
  UNTORCH_ISA_DECLARE_V3(__VA_ARGS__)
#define UNTORCH_ISA_CALL(name)                                                                  \
  (::untorch::kernels::cpu_isa() == ::untorch::kernels::Isa::kV3 ? ::untorch::kernels::v3::name \
                                                                 : ::untorch::kernels::baseline::name)
#else
#define UNTORCH_ISA_DECLARE(...)            \
  UNTORCH_ISA_DECLARE_BASELINE(__VA_ARGS__) \
  UNTORCH_ISA_DECLARE_V3(__VA_ARGS__)       \
  UNTORCH_ISA_DECLARE_V4(__VA_ARGS__)
#define UNTORCH_ISA_CALL(name)                                                                    \
  (::untorch::kernels::cpu_isa() == ::untorch::kernels::Isa::kV4   ? ::untorch::kernels::v4::name \
   : ::untorch::kernels::cpu_isa() == ::untorch::kernels::Isa::kV3 ? ::untorch::kernels::v3::name \
                                                                   : ::untorch::kernels::baseline::name)
#endif
