// SwiGLU of merged gate and up projections: a thread has 16 bytes of the gate and of its up.
//
//   gate_up [rows, 2 · width]   a row: gate │ up
//   out     [rows, width]       silu(gate) · up
//
// Roofline: memory, 3 · rows · width elements. Share of the roofline: not measured alone.
#include "kernels/silu_and_mul.h"

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/divide.cuh"
#include "kernels/cuda/common/launch.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, int kLanes>
struct alignas(kLanes * sizeof(T)) Chunk {
  T values[kLanes];
};

// width is a multiple of kLanes. chunks: those of all rows.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    silu_and_mul_kernel(const T* gate_up, T* out, std::int64_t chunks, std::int64_t width) {
  using Part = Chunk<T, kLanes>;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads, in_row = width / kLanes;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < chunks; i += step) {
    const std::int64_t row = divided(i, in_row, chunks);
    const T* const from = gate_up + (i + row * in_row) * kLanes;
    const Part gate = *reinterpret_cast<const Part*>(from), up = *reinterpret_cast<const Part*>(from + width);
    Part result;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      const float g = widen<T>(gate.values[j]);
      result.values[j] = narrow<T>(g / (1.0f + expf(-g)) * widen<T>(up.values[j]));
    }
    *reinterpret_cast<Part*>(out + i * kLanes) = result;
  }
}

template <class T, int kLanes>
int launch(const SiluAndMul& p, Stream stream) {
  const std::int64_t chunks = p.rows * p.width / kLanes;
  Launch how{};
  how.blocks = dim3(blocks_for(chunks, kThreads));
  how.threads = kThreads;
  how.pdl = p.pdl;
  return launch_kernel(silu_and_mul_kernel<T, kLanes>, how, stream, static_cast<const T*>(p.gate_up),
                       static_cast<T*>(p.out), chunks, p.width);
}

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

}  // namespace

int silu_and_mul(const SiluAndMul& p, Stream stream) {
  if (p.rows == 0 || p.width == 0) return 0;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      return kNoKernel;
    } else {
      constexpr int kLanes = 16 / static_cast<int>(sizeof(T));
      const bool whole = p.width % kLanes == 0 && aligned(p.gate_up) && aligned(p.out);
      return whole ? launch<T, kLanes>(p, stream) : launch<T, 1>(p, stream);
    }
  });
}

}  // namespace untorch::kernels::cuda
