// Products of at most 8 rows with int4 weights.
//
// Layout: a warp makes 16·Pairs columns (32 or 64) and takes turns with other warps along k, 128 at a step. Two tiles
// of 8 columns are the rows of the matrix instruction's first operand: of a word of either, the four pairs are its four
// registers for 16 k's and again for the next 16. x's rows are its second operand's columns. So a lane reads 16 bytes
// of a tile at once and unpacks them in registers; nothing goes through shared memory but the sums.
//
// Bytes: 0.5 a weight and 4/group for scale and zero (0.53 at group 128), once; x 2·m a k for every 32 or 64 columns,
// from the caches. Operations: for 256 weights a warp issues 4 shifts and lop3, 8 half-precision additions and
// multiply-adds and one matrix instruction, 17 in all: 60 weights a clock and multiprocessor, where the memory of an
// H200 delivers 33. So memory is the bound; the share that is reached has not been measured yet.
#include "kernels/cuda/gemm_small.cuh"
#include "kernels/cuda/int4_weights.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kRows = 8;

// Inner: inner_k_tiles; Groups: scales that are read a block of 128 k's, 1 for groups of 128 and more, else 4.
template <class T, int Inner, int Groups, int Pairs>
__global__ void __launch_bounds__(kGemmThreads, 2) narrow_int4(Int4Gemm p, SmallGemm end, Shares shares) {
  constexpr int kTiles = 2 * Pairs, kCols = 8 * kTiles, kWords = Inner / 2;
  // A step's loads start before the one before it is multiplied; with 8 tiles there are enough under way at once.
  constexpr bool kAhead = Pairs == 2;
  __shared__ float sums[kGemmWarps * kRows * kCols];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const Place place = place_of<kCols>(shares);
  const int group_bits = __ffs(static_cast<int>(p.group)) - 1, depth = static_cast<int>(p.k);
  const int blocks = (depth + kInt4BlockK - 1) / kInt4BlockK, width = static_cast<int>(p.x_width);

  const std::uint32_t* const words = static_cast<const std::uint32_t*>(p.weight) + place.first / 8 * p.k;
  const std::uint32_t* const scales = static_cast<const std::uint32_t*>(p.scales) + place.first + g;
  // Tiles there are; n is a multiple of 8.
  const std::int64_t left = p.n > place.first ? (p.n - place.first) / 8 : 0;
  const int tiles = left < kTiles ? static_cast<int>(left) : kTiles;
  const bool row_inside = g < p.m;
  const T* const row = static_cast<const T*>(p.x) + (row_inside ? g : 0) * p.x_row;

  const auto fetch = [&](uint4(&w)[kTiles], std::uint32_t(&s)[kTiles][Groups], int block) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      w[i] = uint4{0, 0, 0, 0};
      const bool inside = i < tiles && block < blocks;
      const std::uint32_t* const from = words + i * p.k + std::int64_t{block} * kInt4BlockK;
      if constexpr (Inner == 8) {
        if (inside) w[i] = load_once(from + lane * 4);
      } else {
        const auto word = [&](int j) {
          return inside && block * kInt4BlockK + 32 * j < depth ? __ldg(from + word_at(kWords, j, lane)) : 0u;
        };
        w[i] = uint4{word(0), word(1), word(2), word(3)};
      }
#pragma unroll
      for (int r = 0; r < Groups; ++r) {
        const int at = block * kInt4BlockK + r * (kInt4BlockK / Groups);
        s[i][r] = inside && at < depth ? __ldg(scales + std::int64_t{at >> group_bits} * p.n + i * 8) : 0u;
      }
    }
  };

  float acc[Pairs][4] = {};
  uint4 w[kTiles], next[kTiles];
  std::uint32_t s[kTiles][Groups], next_s[kTiles][Groups];
  int block = place.turn;
  if (kAhead) fetch(next, next_s, block);
  for (; block < blocks; block += place.turns) {
    if (kAhead) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        w[i] = next[i];
#pragma unroll
        for (int r = 0; r < Groups; ++r) s[i][r] = next_s[i][r];
      }
    } else {
      fetch(w, s, block);
    }
    std::uint32_t x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int k = block * kInt4BlockK + i * 8 + t * 2;
      x[i] = row_inside && k < width ? __ldg(reinterpret_cast<const std::uint32_t*>(row + k)) : 0u;
    }
    if (kAhead) fetch(next, next_s, block + place.turns);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < Pairs; ++i) {
        const auto word = [&](const uint4& v) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
        std::uint32_t low[4], high[4];
        unpack<T>(word(w[2 * i]), scale_pair(s[2 * i][j * Groups / 4]), low);
        unpack<T>(word(w[2 * i + 1]), scale_pair(s[2 * i + 1][j * Groups / 4]), high);
        mma<T>(acc[i], low[0], high[0], low[1], high[1], x[4 * j], x[4 * j + 1]);
        mma<T>(acc[i], low[2], high[2], low[3], high[3], x[4 * j + 2], x[4 * j + 3]);
      }
    }
  }

  float* const own = sums + warp * kRows * kCols;
#pragma unroll
  for (int i = 0; i < Pairs; ++i) {
    float* const at = own + 2 * t * kCols + i * 16 + g;
    at[0] = acc[i][0], at[kCols] = acc[i][1];
    at[8] = acc[i][2], at[kCols + 8] = acc[i][3];
  }
  __syncthreads();
  finish<T, kRows, kCols>(end, sums, shares);
}

template <class T, int Inner, int Groups, int Pairs>
int launch_narrow(const Int4Gemm& p, Stream stream) {
  constexpr int kCols = 16 * Pairs;
  SmallGemm end;
  end.m = p.m, end.n = p.n, end.k = p.k;
  end.c = p.bias, end.c_col = 1;
  end.out = p.out, end.out_row = p.n, end.out_col = 1;
  end.multiprocessors = p.multiprocessors, end.has_clusters = p.has_clusters;
  const Shares shares = shares_of(end, kCols, kInt4BlockK, 2 * kInt4BlockK);
  const std::int64_t per_block = std::int64_t{shares.tiles()} * kCols;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(((p.n + per_block - 1) / per_block) << shares.cluster_bits));
  config.blockDim = dim3(kGemmThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(shares.cluster());
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = shares.cluster_bits > 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, narrow_int4<T, Inner, Groups, Pairs>, p, end, shares);
}

template <class T>
int narrow_of(const Int4Gemm& p, Stream stream) {
  if (p.inner_k_tiles == 2) return launch_narrow<T, 2, 4, 2>(p, stream);
  if (p.inner_k_tiles == 4) return launch_narrow<T, 4, 4, 2>(p, stream);
  if (p.group < kInt4BlockK) return launch_narrow<T, 8, 4, 2>(p, stream);
  // Wide tiles read x less often, narrow ones make more blocks.
  return p.m <= 2 ? launch_narrow<T, 8, 1, 2>(p, stream) : launch_narrow<T, 8, 1, 4>(p, stream);
}

}  // namespace

int int4_narrow(const Int4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.m > kRows) return kNoKernel;
  if (p.dtype == Scalar::kFloat16) return narrow_of<__half>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? narrow_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
