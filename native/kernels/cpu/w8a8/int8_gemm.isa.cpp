// The W8A8 GEMM of quantized rows and packed int8 weights, with its epilogue.
//
//   for columns in blocks that fit L2        B [16 columns][k] in panels, read once for all rows
//     for tiles of rows                      A [12 rows][k] in L1 or L2
//       for tiles of 1, 2 or 4 panels        sums in registers over all of k, then scales, bias, activation, residual
//
// Roofline: at small M bound by reading B, a quarter of float32's bytes; at large M by vpdpbusd, four times the
// multiply-adds of an FMA, or by AMX, 64 times.
#include <cstdint>

#include "kernels/cpu/common/amx.h"
#include "kernels/cpu/gemm/gemm_epilogue.h"
#include "kernels/cpu/gemm/half_vector.h"
#include "kernels/cpu/w8a8/int8_micro.h"
#if defined(__AVX512F__)
#include "kernels/cpu/w8a8/int8_amx.h"
#endif

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr std::int64_t P = kPackWidth;
constexpr int N = kLanes<float>;
constexpr std::int64_t kBlockBytes = 256 << 10;  // of B

constexpr float kNoBias[kMostPanels * P] = {};
constexpr int kAmxTile = kAmxMostTiles * kAmxRows;  // rows and columns
constexpr int kMostTile = N == 16 ? kAmxTile * kAmxTile : kMostSums * P;

constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }
constexpr std::int64_t smaller(std::int64_t x, std::int64_t y) { return x < y ? x : y; }
constexpr std::int64_t larger(std::int64_t x, std::int64_t y) { return x > y ? x : y; }

template <HalfType H>
void widen_half(const std::uint16_t* from, std::int64_t count, float* to) {
  std::int64_t j = 0;
  for (; j + N <= count; j += N) store(to + j, load_half<H>(from + j));
  if (j < count) {
    const Vector<float> part = load_half_part<H>(from + j, count - j);
    for (std::int64_t x = j; x < count; ++x) to[x] = part[x - j];
  }
}

template <HalfType H>
void narrow_half(const float* from, std::int64_t count, std::uint16_t* to) {
  std::int64_t j = 0;
  for (; j + N <= count; j += N) store_half<H>(to + j, load(from + j));
  if (j < count) {
    Vector<float> part{};
    for (std::int64_t x = j; x < count; ++x) part[x - j] = from[x];
    store_half_part<H>(to + j, part, count - j);
  }
}

// Panels of the next tile, as an index of Int8Kernels: 1 << index.
int choose_width(const Int8Kernels& table, int rows, std::int64_t panels) {
  int index = 2;
  while (index > 0 && ((1 << index) > panels || table.kernel[rows - 1][index] == nullptr)) --index;
  return index;
}

// Results in float32 go to their place, the others through a tile of their own.
class Driver {
 public:
  Driver(const Int8Linear& problem, bool vnni, bool amx, const Int8Rows& quantized, const float* widened_bias)
      : p_(problem),
        rows_(quantized),
        bias_(widened_bias),
        table_(vnni ? kInt8Vnni : kInt8Madd),
        amx_(amx),
        most_rows_(int8_tile_rows(vnni, amx)),
        word_size_(vnni ? 1 : 2),
        inside_(problem.groups > 1 ? TileEpilogue{false, true, -__builtin_inff(), __builtin_inff()}
                                   : tile_epilogue(problem.epilogue, problem.residual != nullptr)) {}

  void run(std::int64_t row, std::int64_t row_end, std::int64_t col, std::int64_t col_end) {
    const std::int64_t panel_bytes = larger(ceil_div(p_.k, kInt8Group), 1) * kPanelBytes;
    const std::int64_t block = larger(kBlockBytes / panel_bytes / kMostPanels, 1) * kMostPanels * P;
    const std::int64_t m = row_end - row;
    const int tile_rows = static_cast<int>(amx_ ? smaller(m, most_rows_) : ceil_div(m, ceil_div(m, most_rows_)));
    const bool one_panel = m <= kFewRows && m * p_.k < kFewRowBytes;
    for (std::int64_t jc = col; jc < col_end; jc += block) {
      const std::int64_t end = smaller(jc + block, col_end);
      for (std::int64_t i = row; i < row_end; i += tile_rows) {
        const int count = static_cast<int>(smaller(tile_rows, row_end - i));
        for (std::int64_t j = jc; j < end;) {
          const std::int64_t panels = ceil_div(end - j, P);
          const int index = one_panel ? 0 : amx_ ? (panels > 1 ? 1 : 0) : choose_width(table_, count, panels);
          const std::int64_t width = smaller(P << index, end - j);
          tile(index, i, count, j, width);
          j += width;
        }
      }
    }
  }

 private:
  void tile(int index, std::int64_t i, int count, std::int64_t j, std::int64_t width) {
    const bool direct = p_.type == ActivationType::kFloat32 && width == P << index;
    Int8Tile t{};
    t.groups = ceil_div(p_.k, kInt8Group);
    t.a = rows_.words + i * rows_.stride, t.lda = rows_.stride;
    t.panel_step = t.groups * kPanelBytes, t.b = p_.weight + j / P * t.panel_step;
    t.row_scale = rows_.scale + i, t.row_zero = rows_.zero + i;
    t.scale = p_.scale + j, t.sums = p_.column_sums + j, t.bias = bias_ + j;
    t.low = -__builtin_inff(), t.high = __builtin_inff();
    if (direct) {
      float* const c = static_cast<float*>(p_.out) + i * p_.n + j;
      const float* const residual =
          p_.residual == nullptr ? nullptr : static_cast<const float*>(p_.residual) + i * p_.ldr + j;
      t.c = c, t.ldc = p_.n;
      t.residual = inside_.residual ? residual : nullptr, t.ldr = p_.ldr;
      t.low = inside_.low, t.high = inside_.high;
      multiply(count, index, t);
      if (inside_.rest) {
        apply_epilogue(count, width, p_.epilogue, inside_.residual ? nullptr : residual, p_.ldr, c, p_.n);
      }
      return;
    }
    t.c = sums_, t.ldc = P << index;
    multiply(count, index, t);
    switch (p_.type) {
      case ActivationType::kFloat32: {
        const float* const residual =
            p_.residual == nullptr ? nullptr : static_cast<const float*>(p_.residual) + i * p_.ldr + j;
        apply_epilogue(count, width, p_.epilogue, residual, p_.ldr, sums_, t.ldc);
        for (int y = 0; y < count; ++y) {
          float* const to = static_cast<float*>(p_.out) + (i + y) * p_.n + j;
          for (std::int64_t x = 0; x < width; ++x) to[x] = sums_[y * t.ldc + x];
        }
        return;
      }
      case ActivationType::kBFloat16:
        return finish_half<HalfType::kBFloat16>(i, count, j, width, t.ldc);
      case ActivationType::kFloat16:
        return finish_half<HalfType::kFloat16>(i, count, j, width, t.ldc);
    }
  }

  // A group of k after the other, each added to what is there.
  void multiply(int count, int index, Int8Tile& t) {
#if defined(__AVX512F__)
    if (amx_) return int8_amx(t, count, 1 << index);
#endif
    const Int8Kernel kernel = table_.kernel[count - 1][index];
    if (p_.groups == 1) return kernel(t);
    const std::int64_t padded = ceil_div(p_.n, P) * P;
    t.groups = p_.k / p_.groups / kInt8Group;
    for (std::int64_t g = 0; g < p_.groups; ++g) {
      kernel(t);
      t.a += t.groups * word_size_, t.b += t.groups * kPanelBytes;
      t.scale += padded, t.sums += padded, t.bias = kNoBias;
      t.residual = t.c, t.ldr = t.ldc;
    }
  }

  template <HalfType H>
  void finish_half(std::int64_t i, int count, std::int64_t j, std::int64_t width, std::int64_t ld) {
    const float* residual = nullptr;
    if (p_.residual != nullptr) {
      for (int y = 0; y < count; ++y) {
        widen_half<H>(static_cast<const std::uint16_t*>(p_.residual) + (i + y) * p_.ldr + j, width, added_ + y * ld);
      }
      residual = added_;
    }
    apply_epilogue(count, width, p_.epilogue, residual, ld, sums_, ld);
    for (int y = 0; y < count; ++y) {
      narrow_half<H>(sums_ + y * ld, width, static_cast<std::uint16_t*>(p_.out) + (i + y) * p_.n + j);
    }
  }

  const Int8Linear& p_;
  const Int8Rows& rows_;
  const float* const bias_;
  const Int8Kernels& table_;
  const bool amx_;
  const std::int64_t most_rows_, word_size_;
  const TileEpilogue inside_;
  alignas(64) float sums_[kMostTile];
  alignas(64) float added_[kMostTile];
};

}  // namespace

void widen_bias(const Int8Linear& p, float* bias) {
  const std::int64_t padded = ceil_div(p.n, P) * P;
  std::int64_t j = 0;
  if (p.bias != nullptr) {
    if (p.type == ActivationType::kFloat32) {
      for (; j < p.n; ++j) bias[j] = static_cast<const float*>(p.bias)[j];
    } else if (p.type == ActivationType::kBFloat16) {
      widen_half<HalfType::kBFloat16>(static_cast<const std::uint16_t*>(p.bias), p.n, bias);
    } else {
      widen_half<HalfType::kFloat16>(static_cast<const std::uint16_t*>(p.bias), p.n, bias);
    }
    j = p.n;
  }
  for (; j < padded; ++j) bias[j] = 0.0f;
}

bool takes_amx(const Int8Linear& p) {
  return N == 16 && p.m >= kAmxFewestRows && p.k >= kAmxTileBytes && p.groups == 1;
}

void gemm_int8_slice(const Int8Linear& p, bool vnni, bool amx, const Int8Rows& rows, const float* bias,
                     std::int64_t row, std::int64_t row_end, std::int64_t col, std::int64_t col_end) {
  const AmxScope scope(amx);
  Driver(p, vnni, amx, rows, bias).run(row, row_end, col, col_end);
}

int int8_tile_rows(bool vnni, bool amx) { return amx ? kAmxTile : vnni ? kVnniRows : kMaddRows; }

}  // namespace untorch::kernels::UNTORCH_ISA
