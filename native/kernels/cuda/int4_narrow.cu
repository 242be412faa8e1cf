// Products of at most 8 rows with int4 weights.
//
// Layout: a warp makes 16·Pairs columns (32, or 64 from 3 rows on) and takes turns with other warps along k, 128 at a
// step. It has a ring of stages of its own in shared memory, which cp.async fills ahead of it: the columns' weights as
// they are, 512 bytes for every 8; their scales, a line a group; x's rows, 256 bytes each, in 16-byte chunks permuted
// so that ldmatrix's eight rows come from different groups of banks. Warps meet at the end only. Two tiles of 8 columns
// are the rows of the matrix instruction's first operand: of a word of either, the four pairs are its four registers
// for 16 k's and again for the next 16. x's rows are its second operand's columns.
//
// Bytes: 0.5 a weight and 4/group for scale and zero (0.53 at group 128), once; x 2·m a k for every 32 or 64 columns,
// from the second-level cache. Operations: for 256 weights a warp issues 7 shifts and lop3, 8 half-precision additions
// and multiply-adds and one matrix instruction; with loads and addresses about 650 for 8192 weights, 50 a clock and
// multiprocessor, where the memory of an H200 delivers 33. So memory is the bound; the share that is reached has not
// been measured yet.
#include "kernels/cuda/gemm_small.cuh"
#include "kernels/cuda/int4_choice.h"
#include "kernels/cuda/int4_weights.cuh"
#include "kernels/cuda/tile_memory.cuh"

namespace untorch::kernels::cuda {
namespace {

// Rows: 1, 2, 4 or 8, at least m; Groups: scales of a column in a block of 128 k's that are read, 1 or 4.
template <int Rows, int Groups>
struct Ring {
  static constexpr int kPairs = Rows <= 2 ? 2 : 4;
  static constexpr int kTiles = 2 * kPairs, kCols = 8 * kTiles;
  static constexpr int kX = kTiles * 512, kScales = kX + Rows * 256, kBytes = kScales + Groups * kCols * 4;
  // What two blocks (of few rows), or one, have room for on sm_80 and sm_90.
  static constexpr int kStages = Rows <= 2 ? 4 : Rows == 8 && Groups == 4 ? 2 : 3;
  static constexpr int kResident = Rows <= 2 ? 2 : 1;  // blocks of a multiprocessor
  static constexpr int kSums = 8 * kCols * 4;          // of a warp, at the end: eight rows whatever Rows is
  static constexpr int kShared = kGemmWarps * (kStages * kBytes > kSums ? kStages * kBytes : kSums);
};

// Wide: inner_k_tiles is 8, a lane's four words lie together.
template <class T, bool Wide, int Rows, int Groups>
__global__ void __launch_bounds__(kGemmThreads, (Ring<Rows, Groups>::kResident))
    narrow_int4(Int4Gemm p, SmallGemm end, Shares shares) {
  using R = Ring<Rows, Groups>;
  constexpr int kTiles = R::kTiles, kCols = R::kCols, kStages = R::kStages;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const Place place = place_of<kCols>(shares);
  const int group_bits = __ffs(static_cast<int>(p.group)) - 1, depth = static_cast<int>(p.k);
  const int blocks = (depth + kInt4BlockK - 1) / kInt4BlockK, lane_words = p.inner_k_tiles / 2;
  // Columns there are; n is a multiple of 8.
  const std::int64_t left = p.n - place.first;
  const int columns = left >= kCols ? kCols : left > 0 ? static_cast<int>(left) : 0;
  const char* const words = static_cast<const char*>(p.weight) + place.first / 8 * p.k * 4;
  const char* const scales = static_cast<const char*>(p.scales) + place.first * 4;
  unsigned char* const ring = memory + warp * (kStages * R::kBytes);

  // Where this lane's copies begin; what varies from stage to stage is added.
  const int x_row = lane / 16, x_chunk = lane % 16;
  const char* const my_words = words + lane * 16;
  const char* const my_x = static_cast<const char*>(p.x) + (x_row * p.x_row + x_chunk * 8) * 2;
  const std::int64_t tile_step = p.k * 4, x_step = p.x_row * 4, scale_step = p.n * 4;
  const int words_left = depth - lane * 4, width = static_cast<int>(p.x_width) - x_chunk * 8;
  const auto load_stage = [&](int stage, int block) {
    const std::uint32_t to = shared_address(ring + stage * R::kBytes);
    const int k0 = block * kInt4BlockK;
    const int word_bytes = k0 < words_left ? 16 : 0, x_bytes = k0 < width ? 16 : 0;
    const char* from = my_words + std::int64_t{k0} * 4;
#pragma unroll
    for (int i = 0; i < kTiles; ++i, from += tile_step) {
      copy_chunk(to + i * 512 + lane * 16, from, i * 8 < columns ? word_bytes : 0);
    }
    from = my_x + std::int64_t{k0} * 2;
#pragma unroll
    for (int i = 0; i < (Rows + 1) / 2; ++i, from += x_step) {
      const int row = 2 * i + x_row;
      if (row < Rows) {
        copy_chunk(to + R::kX + row * 256 + ((x_chunk ^ row) << 4), from, row < p.m ? x_bytes : 0);
      }
    }
#pragma unroll
    for (int r = 0; r < Groups; ++r) {
      const int k = k0 + r * (kInt4BlockK / Groups);
      from = scales + std::int64_t{k >> group_bits} * scale_step + lane * 4;
#pragma unroll
      for (int i = 0; i < kCols / 32; ++i) {
        const bool inside = k < depth && i * 32 + lane < columns;
        copy_word(to + R::kScales + (r * kCols + i * 32 + lane) * 4, from + i * 128, inside ? 4 : 0);
      }
    }
  };

  int block = place.turn;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    load_stage(i, block + i * place.turns);
    commit_copies();
  }
  float acc[R::kPairs][4] = {};
  // Rows that are not there are other ones, and so are their sums; nobody reads those.
  const int row = (lane & 7) < Rows ? lane & 7 : Rows - 1;
  int stage = 0;
  for (; block < blocks; block += place.turns) {
    wait_copies_but<kStages - 2>();
    __syncwarp();  // this stage is here, and no lane reads the one before it any more
    load_stage(stage == 0 ? kStages - 1 : stage - 1, block + (kStages - 1) * place.turns);
    commit_copies();
    const unsigned char* const here = ring + stage * R::kBytes;
    const auto* const at = reinterpret_cast<const std::uint32_t*>(here);
    const auto* const by = reinterpret_cast<const std::uint32_t*>(here + R::kScales) + g;
    const std::uint32_t x_row = shared_address(here + R::kX + row * 256);
    std::uint32_t x[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) load_matrices(x[j], x_row + (((j * 4 + (lane >> 3)) ^ row) << 4));
#pragma unroll
    for (int i = 0; i < R::kPairs; ++i) {
      std::uint32_t word[2][4];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const std::uint32_t* const tile = at + (2 * i + side) * 128;
        if constexpr (Wide) {
          const uint4 v = *reinterpret_cast<const uint4*>(tile + lane * 4);
          word[side][0] = v.x, word[side][1] = v.y, word[side][2] = v.z, word[side][3] = v.w;
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) word[side][j] = tile[word_at(lane_words, j, lane)];
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t* const line = by + j * Groups / 4 * kCols + i * 16;
        std::uint32_t low[4], high[4];
        unpack<T>(word[0][j], scale_pair(line[0]), low);
        unpack<T>(word[1][j], scale_pair(line[8]), high);
        mma<T>(acc[i], low[0], high[0], low[1], high[1], x[j][0], x[j][1]);
        mma<T>(acc[i], low[2], high[2], low[3], high[3], x[j][2], x[j][3]);
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  wait_copies_but<0>();
  __syncthreads();

  // The sums take the stages' place.
  float* const sums = reinterpret_cast<float*>(memory);
  float* const own = sums + warp * 8 * kCols + 2 * t * kCols + g;
#pragma unroll
  for (int i = 0; i < R::kPairs; ++i) {
    float* const to = own + i * 16;
    to[0] = acc[i][0], to[kCols] = acc[i][1];
    to[8] = acc[i][2], to[kCols + 8] = acc[i][3];
  }
  __syncthreads();
  finish<T, 8, kCols>(end, sums, shares);
}

template <class T, bool Wide, int Rows, int Groups>
int launch_narrow(const Int4Gemm& p, Stream stream) {
  using R = Ring<Rows, Groups>;
  static_assert(R::kShared <= kInt4NarrowShared);
  SmallGemm end;
  end.m = p.m, end.n = p.n, end.k = p.k;
  end.c = p.bias, end.c_col = 1;
  end.out = p.out, end.out_row = p.n, end.out_col = 1;
  end.has_clusters = p.has_clusters;
  end.multiprocessors = p.multiprocessors * R::kResident / 2;  // shares_of counts two blocks for each
  const Shares shares = shares_of(end, R::kCols, kInt4BlockK, 2 * kInt4BlockK);
  const std::int64_t per_block = std::int64_t{shares.tiles()} * R::kCols;
  const auto kernel = narrow_int4<T, Wide, Rows, Groups>;
  if (R::kShared > 48 * 1024) {
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, R::kShared);
    if (code != cudaSuccess) return code;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(((p.n + per_block - 1) / per_block) << shares.cluster_bits));
  config.blockDim = dim3(kGemmThreads);
  config.dynamicSmemBytes = R::kShared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(shares.cluster());
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = shares.cluster_bits > 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p, end, shares);
}

template <class T, bool Wide, int Groups>
int narrow_of_rows(const Int4Gemm& p, Stream stream) {
  if (p.m == 1) return launch_narrow<T, Wide, 1, Groups>(p, stream);
  if (p.m == 2) return launch_narrow<T, Wide, 2, Groups>(p, stream);
  return p.m <= 4 ? launch_narrow<T, Wide, 4, Groups>(p, stream) : launch_narrow<T, Wide, 8, Groups>(p, stream);
}

template <class T>
int narrow_of(const Int4Gemm& p, Stream stream) {
  if (p.inner_k_tiles != 8) return narrow_of_rows<T, false, 4>(p, stream);
  return p.group >= kInt4BlockK ? narrow_of_rows<T, true, 1>(p, stream) : narrow_of_rows<T, true, 4>(p, stream);
}

}  // namespace

int int4_narrow(const Int4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.m > 8) return kNoKernel;
  if (p.dtype == Scalar::kFloat16) return narrow_of<__half>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? narrow_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
