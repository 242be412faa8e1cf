// Products of some hundreds of rows with int4 weights, by the tensor instructions of sm_90.
//
// Layout: a block makes a tile of 128 columns and Rows rows (128 or 256), from blocks of 128 k's in shared memory: x's
// rows in two halves of 64 k's, 128 bytes each, permuted as the instruction's 128-byte swizzle wants them; weights and
// scales as in int4_mma.cu. cp.async fills four stages (three for 256 rows). Two warpgroups have 64 columns each. The
// weights are the instruction's first operand, which may be in registers: a warp's 16 columns and 16 k's lie in them as
// in mma.m16n8k16, so they are unpacked there as everywhere; x is the second one, 128 rows an instruction, from shared
// memory. Of a stage, a warpgroup unpacks the next 32 k's while the tensor cores work on the last.
//
// Bytes: of shared memory a stage, (256 Rows + 10240); from the second-level cache likewise. Operations: 2·m·n·k. For
// 16 k's a warp issues some 40 instructions beside Rows / 128 of 64 clocks on the tensor cores, which two warpgroups
// share: arithmetic is the bound from about 90 rows on. The share that is reached has not been measured yet.
#include "kernels/cuda/int4_choice.h"
#include "kernels/cuda/int4_tile.cuh"
#include "kernels/cuda/int4_weights.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kPart = 128;  // rows of x an instruction

// Orders what the warpgroup's threads wrote to registers before the instructions that follow.
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Makes what this thread copied to shared memory visible to the tensor cores' own reads.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An operand in shared memory: rows of 128 bytes along k, swizzled, 8 of them 1024 bytes, at `address`.
__device__ __forceinline__ std::uint64_t operand_at(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = 1ull << 62, kEightRows = (1024ull >> 4) << 32, kUnused = 1ull << 16;
  return kSwizzle128 | kEightRows | kUnused | ((address & 0x3ffff) >> 4);
}

// d (64 x 128, float32) += a (64 x 16, in registers) · b (16 x 128). A warp has 16 rows of a and d, as in gemm_mma.cuh;
// of d the columns 8 i + 2 t and the next in d[4 i] to d[4 i + 3].
template <class T>
__device__ __forceinline__ void warpgroup_mma(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

template <int Rows>
struct Stage {
  static constexpr int kHalf = Rows * 128, kX = 2 * kHalf;
  static constexpr int kBytes = kX + kWeightBytes + kScaleBytes;  // a multiple of 1024, as the swizzle wants it
  static constexpr int kCount = Rows == 256 ? 3 : 4;
  static constexpr int kShared = kCount * kBytes + 1024;  // to begin at a multiple of it
};
static_assert(Stage<256>::kShared == kInt4SharedOfWgmma && Stage<256>::kBytes % 1024 == 0);
static_assert(Stage<128>::kShared <= kInt4SharedOfWgmma && Stage<128>::kBytes % 1024 == 0);

template <class T, int Rows>
__global__ void __launch_bounds__(kThreads, 1) wgmma_int4(Int4Gemm p, Split split) {
  using S = Stage<Rows>;
  constexpr int kParts = Rows / kPart, kStages = S::kCount;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const int first = static_cast<int>(blockIdx.x) / split.parts * kCols, top = static_cast<int>(blockIdx.y) * Rows;
  const int group_bits = __ffs(static_cast<int>(p.group)) - 1;
  const int blocks = static_cast<int>(p.k / kInt4BlockK);
  const int begin = split.rank() * split.depth, end = begin + split.depth < blocks ? begin + split.depth : blocks;
  // Every block of a cluster pads alike: its shared memory begins at the same address.
  const std::uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  unsigned char* const stages = memory + (base - start);

  const int thread = static_cast<int>(threadIdx.x), row = thread / 16, chunk = thread % 16;
  const StageCopies copies(p, top, first, chunk / 8 * S::kHalf + row * 128 + (((chunk ^ row) & 7) << 4));

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) copies.load<Rows, 16 * 128, S::kX>(base + i * S::kBytes, begin + i);
    commit_copies();
  }

  float acc[kParts][64] = {};
  int stage = 0;
  for (int block = begin; block < end; ++block) {
    wait_copies_but<kStages - 2>();
    publish_shared();
    __syncthreads();  // this stage is here, and the tensor cores are done with the one before it
    const unsigned char* const here = stages + stage * S::kBytes;
    const std::uint32_t x = base + stage * S::kBytes;
    const auto* const tiles = reinterpret_cast<const uint4*>(here + S::kX) + warp * 2 * 32 + lane;
    const auto* const scales = reinterpret_cast<const std::uint32_t*>(here + S::kX + kWeightBytes) + warp * 16 + g;
    const uint4 low_words = tiles[0], high_words = tiles[32];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto word = [&](const uint4& v) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
      const int line = (j * 32 >> group_bits) * kCols;
      std::uint32_t low[4], high[4];
      unpack<T>(word(low_words), scale_pair(scales[line]), low);
      unpack<T>(word(high_words), scale_pair(scales[line + 8]), high);
      std::uint32_t operand[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        operand[half][0] = low[2 * half], operand[half][1] = high[2 * half];
        operand[half][2] = low[2 * half + 1], operand[half][3] = high[2 * half + 1];
      }
      warpgroup_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * j + half;
#pragma unroll
        for (int r = 0; r < kParts; ++r) {
          warpgroup_mma<T>(acc[r], operand[half],
                           operand_at(x + step / 4 * S::kHalf + r * (kPart * 128) + step % 4 * 32));
        }
      }
      warpgroup_commit();
      // The operand before this one is free. All are at a stage's end: ptxas keeps instructions of one turn of a loop
      // out of the next one by making all of them wait for each other.
      if (j < 3) {
        warpgroup_wait<1>();
      } else {
        warpgroup_wait<0>();
      }
      if (j == 0) {
        const int next = stage == 0 ? kStages - 1 : stage - 1;
        if (block + kStages - 1 < end) {
          copies.load<Rows, 16 * 128, S::kX>(base + next * S::kBytes, block + kStages - 1);
        }
        commit_copies();
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  warpgroup_wait<0>();
  wait_copies_but<0>();
  __syncthreads();

  // The sums take the stages' place, [row][column].
  float* const sums = reinterpret_cast<float*>(stages);
#pragma unroll
  for (int r = 0; r < kParts; ++r) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int row = r * kPart + i / 4 * 8 + 2 * t + (i & 1), column = warp * 16 + g + (i >> 1 & 1) * 8;
      sums[row * kPitch + column] = acc[r][i];
    }
  }
  __syncthreads();
  finish_tile<T, Rows>(p, split, sums, top, first);
}

template <class T>
int wgmma_of(const Int4Gemm& p, Stream stream) {
  return int4_wgmma_rows(p.m) == 128 ? launch_tiles<128>(wgmma_int4<T, 128>, p, Stage<128>::kShared, stream)
                                     : launch_tiles<256>(wgmma_int4<T, 256>, p, Stage<256>::kShared, stream);
}

}  // namespace

int int4_wgmma(const Int4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.inner_k_tiles != 8 || !p.has_wgmma || !p.has_clusters) return kNoKernel;
  if (p.dtype == Scalar::kFloat16) return wgmma_of<__half>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? wgmma_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
