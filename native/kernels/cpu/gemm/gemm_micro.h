// The GEMM's register-blocked microkernel. Included by *.isa.cpp files only, once for each level.
//
//   C[MR, NV·panel] (+)= A[MR, k] · B[k, NV·panel]
//
// A row is one broadcast a step, B arrives in panels of 64 bytes a row of k (16 floats, 8 doubles), either packed
// ([panel][k][64 bytes]: row_step = one panel row) or in place (row_step = ldb, panel_step = one panel row). Every
// element of C is one chain of multiply-adds in the order of k, so neither the tile's size nor the thread count
// can change a result. With 12×2 panels (AVX-512) a step is 24 FMAs for 14 loads: bound by the two FMA ports, not by
// L1.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/vecmath/inline.h"

namespace untorch::kernels::UNTORCH_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
inline constexpr int kPanelBytes = 64;
inline constexpr int kVectorsPerPanel = kPanelBytes / kVectorBytes;

// The same values for any alignment: packed weights come straight from a file.
template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef float loose __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef double loose __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::type;
template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
template <class T>
inline constexpr int kPanel = kPanelBytes / static_cast<int>(sizeof(T));

template <class T>
[[gnu::always_inline]] inline Vector<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::loose*>(p);
}
template <class T>
[[gnu::always_inline]] inline void store(T* p, Vector<T> v) {
  *reinterpret_cast<typename VectorOf<T>::loose*>(p) = v;
}

inline constexpr int kPrefetchSteps = 12;

// One tile of C: alpha·A·B + bias + beta·C. bias may be null; beta 0 does not read C.
template <class T>
struct Tile {
  std::int64_t k;
  const T* a;
  std::int64_t lda;
  const T* b;
  std::int64_t row_step, panel_step;  // of B, in elements
  T alpha, beta;
  T* c;
  std::int64_t ldc;
  const T* bias;
  // What to prefetch, in B's layout: a part of the next tile's panels, next_step elements further at every step of k;
  // null: this tile's own, a few steps ahead.
  const T* next_b;
  std::int64_t next_step;
  // Added at the end, laid out like C with stride ldr; may be null. The result is then clamped to [low, high].
  const T* residual = nullptr;
  std::int64_t ldr = 0;
  T low = -static_cast<T>(__builtin_inf()), high = static_cast<T>(__builtin_inf());
};

// Residual and clamp of a tile in registers. NaN stays NaN.
template <class T, int MR, int W>
[[gnu::always_inline]] inline void finish_tile(Vector<T> (&acc)[MR][W], const T* residual, std::int64_t ldr, T low,
                                               T high) {
  if (residual != nullptr) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) acc[i][j] += load(residual + i * ldr + j * kLanes<T>);
    }
  }
  if (low != -static_cast<T>(__builtin_inf())) {
    const Vector<T> least = Vector<T>{} + low, most = Vector<T>{} + high;
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) {
        if constexpr (sizeof(T) == sizeof(float)) {
          acc[i][j] = vecmath::at_most(vecmath::at_least(acc[i][j], least), most);
        } else {
          acc[i][j] = least > acc[i][j] ? least : acc[i][j];
          acc[i][j] = most < acc[i][j] ? most : acc[i][j];
        }
      }
    }
  }
}

template <class T, int MR, int NV>
[[gnu::noinline]] void micro(const Tile<T>& t) {
  constexpr int W = NV * kVectorsPerPanel;
  using V = Vector<T>;
  V acc[MR][W];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) acc[i][j] = V{};
  }
  // Three rows an address register: base, base + lda, base + 2·lda.
  constexpr int kBases = (MR + 2) / 3;
  const std::int64_t lda = t.lda;
  const T* base[kBases];
#pragma GCC unroll 16
  for (int i = 0; i < kBases; ++i) base[i] = t.a + 3 * i * lda;
  const T* b = t.b;
  const std::int64_t row_step = t.row_step, panel_step = t.panel_step;
  const T* ahead = t.next_b != nullptr ? t.next_b : b + kPrefetchSteps * row_step;
  const std::int64_t ahead_step = t.next_b != nullptr ? t.next_step : row_step;
  for (std::int64_t kk = 0; kk < t.k; ++kk) {
    V row[W];
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
      row[j] = load(b + (j / kVectorsPerPanel) * panel_step + (j % kVectorsPerPanel) * kLanes<T>);
    }
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) __builtin_prefetch(ahead + v * panel_step);
    b += row_step;
    ahead += ahead_step;
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const V x = base[i / 3][(i % 3) * lda + kk] - V{};  // a plain broadcast: x − 0 is x
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) acc[i][j] += x * row[j];
    }
  }
  // Each choice once, not for each row: stores to C may alias the tile, so the compiler would read it again.
  T* c = t.c;
  const std::int64_t ldc = t.ldc;
  const T alpha = t.alpha, beta = t.beta;
  if (alpha != T(1)) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) acc[i][j] *= alpha;
    }
  }
  if (t.bias != nullptr) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
      const V bias = load(t.bias + j * kLanes<T>);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) acc[i][j] += bias;
    }
  }
  if (beta != T(0)) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) acc[i][j] += load(c + i * ldc + j * kLanes<T>) * beta;
    }
  }
  finish_tile<T, MR, W>(acc, t.residual, t.ldr, t.low, t.high);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) store(c + i * ldc + j * kLanes<T>, acc[i][j]);
  }
}

// The first 8 columns of a panel, which a last panel often has alone: at AVX-512 of half a register each, which costs
// half where the CPU has 256-bit units.
inline constexpr int kHalf = 8;
inline constexpr int kHalfLanes = kVectorBytes == 16 ? 4 : 8;
inline constexpr int kHalfVectors = kHalf / kHalfLanes;
typedef float HalfVector __attribute__((vector_size(kHalfLanes * 4)));
typedef float LooseHalfVector __attribute__((vector_size(kHalfLanes * 4), aligned(4), may_alias));
[[gnu::always_inline]] inline HalfVector load_half(const float* p) {
  return *reinterpret_cast<const LooseHalfVector*>(p);
}
[[gnu::always_inline]] inline void store_half(float* p, HalfVector v) { *reinterpret_cast<LooseHalfVector*>(p) = v; }

// acc + bias, C where accumulate, the residual; then clamped and stored.
template <int MR>
[[gnu::always_inline]] inline void finish_half(HalfVector (&acc)[MR][kHalfVectors], const float* bias, bool accumulate,
                                               const float* residual, std::int64_t ldr, float low, float high, float* c,
                                               std::int64_t ldc) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kHalfVectors; ++j) {
      const int at = j * kHalfLanes;
      if (bias != nullptr) acc[i][j] += load_half(bias + at);
      if (accumulate) acc[i][j] += load_half(c + i * ldc + at);
      if (residual != nullptr) acc[i][j] += load_half(residual + i * ldr + at);
      acc[i][j] = low > acc[i][j] ? HalfVector{} + low : acc[i][j];
      acc[i][j] = high < acc[i][j] ? HalfVector{} + high : acc[i][j];
      store_half(c + i * ldc + at, acc[i][j]);
    }
  }
}

template <int MR>
[[gnu::noinline]] void micro_half(const Tile<float>& t) {
  HalfVector acc[MR][kHalfVectors] = {};
  constexpr int kBases = (MR + 2) / 3;
  const std::int64_t lda = t.lda;
  const float* base[kBases];
#pragma GCC unroll 16
  for (int i = 0; i < kBases; ++i) base[i] = t.a + 3 * i * lda;
  const float* b = t.b;
  for (std::int64_t kk = 0; kk < t.k; ++kk, b += t.row_step) {
    HalfVector row[kHalfVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kHalfVectors; ++j) row[j] = load_half(b + j * kHalfLanes);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const HalfVector x = base[i / 3][(i % 3) * lda + kk] - HalfVector{};
#pragma GCC unroll 2
      for (int j = 0; j < kHalfVectors; ++j) acc[i][j] += x * row[j];
    }
  }
  finish_half<MR>(acc, t.bias, t.beta != 0.0f, t.residual, t.ldr, t.low, t.high, t.c, t.ldc);
}

#if defined(__AVX512F__)
inline constexpr int kMaxRows = 12;
// Panels side by side in a tile of `rows` rows: as many as the registers hold.
constexpr int max_panels(int rows) { return rows <= 3 ? 8 : rows <= 6 ? 4 : rows <= 8 ? 3 : 2; }
#elif defined(__AVX2__)
inline constexpr int kMaxRows = 6;
constexpr int max_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
inline constexpr int kMaxRows = 3;
constexpr int max_panels(int rows) { return rows == 1 ? 2 : 1; }
#endif
inline constexpr int kMaxPanels = 8;

template <class T>
using MicroKernel = void (*)(const Tile<T>&);

// The microkernel for a tile of rows and panels; null where the tile does not exist (5…7 panels of few rows, say).
template <class T>
struct MicroTable {
  MicroKernel<T> kernel[kMaxRows][kMaxPanels] = {};

  template <int MR, int NV>
  constexpr void add() {
    if constexpr (MR <= kMaxRows && NV <= max_panels(MR <= kMaxRows ? MR : 1))
      kernel[MR - 1][NV - 1] = micro<T, MR, NV>;
  }
  template <int MR>
  constexpr void add_row() {
    add<MR, 1>(), add<MR, 2>(), add<MR, 3>(), add<MR, 4>(), add<MR, 8>();
  }
  constexpr MicroTable() {
    add_row<1>(), add_row<2>(), add_row<3>(), add_row<4>(), add_row<5>(), add_row<6>();
    add_row<7>(), add_row<8>(), add_row<9>(), add_row<10>(), add_row<11>(), add_row<12>();
  }
};
template <class T>
inline constexpr MicroTable<T> kMicro{};

struct HalfTable {
  MicroKernel<float> kernel[kMaxRows] = {};

  template <int MR>
  constexpr void add() {
    if constexpr (MR <= kMaxRows) kernel[MR - 1] = micro_half<MR>;
  }
  constexpr HalfTable() {
    add<1>(), add<2>(), add<3>(), add<4>(), add<5>(), add<6>();
    add<7>(), add<8>(), add<9>(), add<10>(), add<11>(), add<12>();
  }
};
inline constexpr HalfTable kMicroHalf{};

// The widest tile of `rows` rows that exists and needs at most `panels` panels (at least one).
inline int choose_panels(int rows, std::int64_t panels) {
  int best = max_panels(rows);
  while (best > panels) best = best > 4 ? 4 : best - 1;
  return best;
}

// N vectors of N lanes, transposed in place by log2(N) rounds of interleaving.
template <class T, int N>
[[gnu::always_inline]] inline void transpose(Vector<T> (&v)[N]) {
  static_assert(N == kLanes<T>);
#pragma GCC unroll 8
  for (int round = 1; round < N; round *= 2) {
    Vector<T> out[N];
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; ++i) {
      const Vector<T> x = v[i], y = v[i + N / 2];
      if constexpr (N == 16) {
        out[2 * i] = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        out[2 * i + 1] = __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      } else if constexpr (N == 8) {
        out[2 * i] = __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
        out[2 * i + 1] = __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
      } else if constexpr (N == 4) {
        out[2 * i] = __builtin_shufflevector(x, y, 0, 4, 1, 5);
        out[2 * i + 1] = __builtin_shufflevector(x, y, 2, 6, 3, 7);
      } else {
        out[2 * i] = __builtin_shufflevector(x, y, 0, 2);
        out[2 * i + 1] = __builtin_shufflevector(x, y, 1, 3);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) v[i] = out[i];
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
