// AMX: GEMMs of tiles. Included by *.isa.cpp files only, of which those of v4 have it; callers ask
// cpu_has_amx() first.
//
// A tile has 16 rows of 64 bytes, all eight of them: tiles 0 to 3 are sums (16 × 16, float32 or int32), 4 and 5 are of
// A (16 rows; 32 k in bfloat16, 64 in bytes), 6 and 7 of B (16 columns; a row has as many neighbours along k of each as
// fit 4 bytes, which is how panels for vpdpbusd and vdpbf16ps lie).
//
// A k that is no multiple of 16 words of 4 bytes may be cut into steps of fewer: A's tiles then have shorter rows, B's
// fewer, and nothing is left over.
//
// The kernels take the tiles as a parameter, so that tests run them on CPUs without AMX.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/amx_limits.h"

namespace untorch::kernels::UNTORCH_ISA {

inline constexpr int kAmxRows = 16;                         // of a tile
inline constexpr int kAmxMostTiles = 2;                     // of A and of B at once
inline constexpr int kAmxTileBytes = 64;                    // of a row
inline constexpr int kAmxBlock = kAmxMostTiles * kAmxRows;  // rows, and columns, of four tiles of sums
inline constexpr std::int64_t kAmxOneRun[] = {0};

#if defined(__x86_64__)
#define UNTORCH_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8")))

// The CPU's own. `from` and `to`: the first row, rows `stride` bytes apart.
struct AmxTiles {
  // Once before the others, in each thread; end() behind the last, so that the operating system has less to save.
  // words: of 4 bytes, that a row of A's tiles has, and rows of B's.
  UNTORCH_AMX static void begin(int words) {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = kAmxTileBytes, config.rows[tile] = kAmxRows;
    config.row_bytes[4] = config.row_bytes[5] = static_cast<std::uint16_t>(4 * words);
    config.rows[6] = config.rows[7] = static_cast<std::uint8_t>(words);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  UNTORCH_AMX static void end() { asm volatile("tilerelease" ::: "memory"); }

  template <int T>
  UNTORCH_AMX [[gnu::always_inline]] static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  UNTORCH_AMX [[gnu::always_inline]] static void load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  UNTORCH_AMX [[gnu::always_inline]] static void store(void* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  // C += A · B
  template <int C, int A, int B>
  UNTORCH_AMX [[gnu::always_inline]] static void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  // A unsigned, B signed.
  template <int C, int A, int B>
  UNTORCH_AMX [[gnu::always_inline]] static void dot_u8s8() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

// Where a kernel's operands lie. Strides are bytes; `a` has whole tiles of rows, whatever is in those that do not
// count.
struct AmxOperands {
  const void* a;
  std::int64_t a_stride;
  const void* b;             // a panel: 64 bytes a row, dense
  std::int64_t panel_bytes;  // from a panel to the next
  void* c;
  std::int64_t c_stride;
  std::int64_t steps;  // of a run: `words` of A's rows, as many rows of B
  // What the sums begin with, laid out like c, or one row for all with a stride of 0; null: zeros.
  const void* start = nullptr;
  std::int64_t start_stride = 0;
  // A's rows are runs, each so many bytes from `a`; B's lie one behind the other.
  const std::int64_t* runs = kAmxOneRun;
  std::int64_t run_count = 1;
  int words = kAmxMostWords;
};

template <class Tiles, bool kInt8, int C, int A, int B>
UNTORCH_AMX [[gnu::always_inline]] inline void amx_dot() {
  if constexpr (kInt8) {
    Tiles::template dot_u8s8<C, A, B>();
  } else {
    Tiles::template dot_bf16<C, A, B>();
  }
}

// R tiles of rows by P panels. Tile 2·r + p has the sums.
template <class Tiles, bool kInt8, int R, int P>
UNTORCH_AMX inline void amx_gemm(const AmxOperands& o) {
  const auto c_at = [&](int r, int p) {
    return static_cast<char*>(o.c) + r * kAmxRows * o.c_stride + p * kAmxTileBytes;
  };
  if (o.start != nullptr) {
    const auto start_at = [&](int r, int p) {
      return static_cast<const char*>(o.start) + r * kAmxRows * o.start_stride + p * kAmxTileBytes;
    };
    Tiles::template load<0>(start_at(0, 0), o.start_stride);
    if constexpr (P > 1) Tiles::template load<1>(start_at(0, 1), o.start_stride);
    if constexpr (R > 1) Tiles::template load<2>(start_at(1, 0), o.start_stride);
    if constexpr (R > 1 && P > 1) Tiles::template load<3>(start_at(1, 1), o.start_stride);
  } else {
    Tiles::template zero<0>();
    if constexpr (P > 1) Tiles::template zero<1>();
    if constexpr (R > 1) Tiles::template zero<2>();
    if constexpr (R > 1 && P > 1) Tiles::template zero<3>();
  }
  const char* b = static_cast<const char*>(o.b);
  const std::int64_t a_step = 4 * o.words, b_step = kAmxTileBytes * o.words;
  for (std::int64_t run = 0; run < o.run_count; ++run) {
    const char* a = static_cast<const char*>(o.a) + o.runs[run];
    for (std::int64_t step = 0; step < o.steps; ++step) {
      Tiles::template load<6>(b, kAmxTileBytes);
      Tiles::template load<4>(a, o.a_stride);
      amx_dot<Tiles, kInt8, 0, 4, 6>();
      if constexpr (R > 1) Tiles::template load<5>(a + kAmxRows * o.a_stride, o.a_stride);
      if constexpr (P > 1) Tiles::template load<7>(b + o.panel_bytes, kAmxTileBytes);
      if constexpr (R > 1) amx_dot<Tiles, kInt8, 2, 5, 6>();
      if constexpr (P > 1) amx_dot<Tiles, kInt8, 1, 4, 7>();
      if constexpr (R > 1 && P > 1) amx_dot<Tiles, kInt8, 3, 5, 7>();
      a += a_step, b += b_step;
    }
  }
  Tiles::template store<0>(c_at(0, 0), o.c_stride);
  if constexpr (P > 1) Tiles::template store<1>(c_at(0, 1), o.c_stride);
  if constexpr (R > 1) Tiles::template store<2>(c_at(1, 0), o.c_stride);
  if constexpr (R > 1 && P > 1) Tiles::template store<3>(c_at(1, 1), o.c_stride);
}

// As many tiles of rows, 1 or 2, and panels, 1 or 2.
template <class Tiles, bool kInt8>
UNTORCH_AMX inline void amx_gemm(const AmxOperands& o, int row_tiles, int panels) {
  if (row_tiles > 1) {
    panels > 1 ? amx_gemm<Tiles, kInt8, 2, 2>(o) : amx_gemm<Tiles, kInt8, 2, 1>(o);
  } else {
    panels > 1 ? amx_gemm<Tiles, kInt8, 1, 2>(o) : amx_gemm<Tiles, kInt8, 1, 1>(o);
  }
}

// A GEMM of any M (rows) and N (panels of 16). M is padded to a multiple of 16: A and C have memory for these rows.
template <class Tiles, bool kInt8>
void amx_gemm_blocks(const AmxOperands& whole, std::int64_t rows, std::int64_t panels) {
  for (std::int64_t j = 0; j < panels; j += kAmxMostTiles) {
    for (std::int64_t i = 0; i < rows; i += kAmxBlock) {
      AmxOperands o = whole;
      o.a = static_cast<const char*>(whole.a) + i * whole.a_stride;
      o.b = static_cast<const char*>(whole.b) + j * whole.panel_bytes;
      o.c = static_cast<char*>(whole.c) + i * whole.c_stride + j * kAmxTileBytes;
      if (whole.start != nullptr) {
        o.start = static_cast<const char*>(whole.start) + i * whole.start_stride + j * kAmxTileBytes;
      }
      amx_gemm<Tiles, kInt8>(o, rows - i > kAmxRows ? 2 : 1, panels - j > 1 ? 2 : 1);
    }
  }
}

// The CPU's tiles while it lives, if they are used.
class AmxScope {
 public:
  explicit AmxScope(bool used, int words = kAmxMostWords) : used_(used) {
    if (used_) AmxTiles::begin(words);
  }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
  ~AmxScope() {
    if (used_) AmxTiles::end();
  }

 private:
  const bool used_;
};
#else
class AmxScope {
 public:
  explicit AmxScope(bool, int = kAmxMostWords) {}
};
#endif

}  // namespace untorch::kernels::UNTORCH_ISA
