// GEMM with a packed B (weights): bias, activation and residual in the epilogue, while the tile is in L1.
//
// B [ceil(n/16)][k][16] is read once for each block of rows: at small M (≤ 128) the GEMM is bound by reading the
// weights from L2 or memory, and packing is what the others pay on top.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/gemm/gemm_epilogue.h"
#include "kernels/cpu/gemm/gemm_levels.h"
#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr std::int64_t kBlockK = 384, kBlockM = 240, kBlockN = 512;
constexpr std::int64_t kLargeOutput = 65536;  // elements

constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }
constexpr std::int64_t smaller(std::int64_t x, std::int64_t y) { return x < y ? x : y; }

// Asks for a tile's lines for writing or reading, while there is a tile to compute before they are needed.
template <int kWrite>
[[gnu::always_inline]] inline void prefetch_tile(int rows, std::int64_t width, const float* c, std::int64_t ldc) {
  for (int r = 0; r < rows; ++r, c += ldc) {
    for (std::int64_t j = 0; j < width; j += kPackWidth) __builtin_prefetch(c + j, kWrite, 3);
  }
}

}  // namespace

void packed_slice(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t total_m, const float* a,
                  std::int64_t lda, const float* packed, const float* bias, Epilogue epilogue, const float* residual,
                  std::int64_t ldr, float* c, std::int64_t ldc) {
  constexpr int P = kPanel<float>;
  static_assert(P == kPackWidth);
  // From the whole problem's rows, so that a slice gives the same bits.
  const std::int64_t limit = total_m <= kMaxRows ? 2048 : kBlockK;
  const std::int64_t kc = k == 0 ? 1 : k <= limit ? k : ceil_div(k, ceil_div(k, limit));
  alignas(64) float buffer[kMaxRows * kMaxPanels * P];
  alignas(64) float bias_tail[P];
  if (bias != nullptr && n % P != 0) {
    for (std::int64_t j = 0; j < P; ++j) bias_tail[j] = j < n % P ? bias[n / P * P + j] : 0.0f;
  }
  // A C beyond the caches costs a read from memory for every line that is written first.
  const bool large = m * n > kLargeOutput;
  const TileEpilogue inside = tile_epilogue(epilogue, residual != nullptr);
  for (std::int64_t jc = 0; jc < n; jc += kBlockN) {
    const std::int64_t nb = smaller(kBlockN, n - jc);
    for (std::int64_t ic = 0; ic < m; ic += kBlockM) {
      const std::int64_t mb = smaller(kBlockM, m - ic);
      // Tiles of tile_m rows, then some of one less: a last tile of a row or two would wait for its own sums.
      const std::int64_t tiles = ceil_div(mb, kMaxRows);
      const int tile_m = static_cast<int>(ceil_div(mb, tiles));
      const std::int64_t fuller = mb - tiles * (tile_m - 1);
      // k == 0 passes once: C is the epilogue of 0.
      for (std::int64_t pc = 0; pc == 0 || pc < k; pc += kc) {
        const std::int64_t kb = smaller(kc, k - pc);
        const bool last = pc + kb >= k;
        for (std::int64_t j = 0; j < nb;) {
          // A partial last panel is a tile of its own.
          const std::int64_t full = (nb - j) / P;
          const int group = full == 0 ? 1 : choose_panels(tile_m, full);
          const std::int64_t width = full == 0 ? nb - j : static_cast<std::int64_t>(group) * P;
          const bool half = full == 0 && width == kHalf, partial = full == 0 && !half;
          Tile<float> tile{};
          tile.k = kb, tile.lda = lda, tile.alpha = 1.0f, tile.beta = pc == 0 ? 0.0f : 1.0f;
          tile.b = packed + (jc + j) * k + pc * P;
          tile.row_step = P, tile.panel_step = P * k;
          // While the last rows pass over these panels, the next ones come out of memory, spread over up to eight
          // tiles: all at once they would take every line fill buffer.
          const std::int64_t parts = tiles > 8 ? 8 : tiles > 4 ? 4 : tiles > 2 ? 2 : 1;
          const float* next = nullptr;
          if (j + width < nb) {
            next = tile.b + width * k;
          } else if (!last) {
            next = packed + jc * k + (pc + kb) * P;
          } else if (ic + mb < m) {
            next = packed + jc * k;
          } else if (jc + kBlockN < n) {
            next = packed + (jc + kBlockN) * k;
          }
          if (last && bias != nullptr) tile.bias = full == 0 ? bias_tail : bias + jc + j;
          for (std::int64_t i = 0, left = tiles; left > 0; --left) {
            const int rows = tiles - left < fuller ? tile_m : tile_m - 1;
            float* const to = c + (ic + i) * ldc + jc + j;
            tile.a = a + (ic + i) * lda + pc;
            tile.c = to, tile.ldc = ldc;
            const bool spread = next != nullptr && i > 0 && left <= parts;
            tile.next_b = spread ? next + (parts - left) * (kb / parts) * P : nullptr;
            tile.next_step = P / parts;
            if (large) {
              prefetch_tile<1>(rows, width, to, ldc);
              if (last && residual != nullptr) prefetch_tile<0>(rows, width, residual + (ic + i) * ldr + jc + j, ldr);
            }
            const float* const from = residual == nullptr ? nullptr : residual + (ic + i) * ldr + jc + j;
            const bool in_registers = last && !partial;
            tile.residual = in_registers && inside.residual ? from : nullptr, tile.ldr = ldr;
            if (in_registers) tile.low = inside.low, tile.high = inside.high;
            if (partial) {
              tile.c = buffer, tile.ldc = P;
              for (int r = 0; r < rows && pc > 0; ++r) {
                for (std::int64_t x = 0; x < width; ++x) buffer[r * P + x] = to[r * ldc + x];
              }
            }
            (half ? kMicroHalf.kernel[rows - 1] : kMicro<float>.kernel[rows - 1][group - 1])(tile);
            if (partial) {
              for (int r = 0; r < rows; ++r) {
                for (std::int64_t x = 0; x < width; ++x) to[r * ldc + x] = buffer[r * P + x];
              }
            }
            if (last && partial) {
              apply_epilogue(rows, width, epilogue, from, ldr, to, ldc);
            } else if (last && inside.rest) {
              apply_epilogue(rows, width, epilogue, inside.residual ? nullptr : from, ldr, to, ldc);
            }
            i += rows;
          }
          j += width;
        }
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
