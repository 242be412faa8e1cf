// Random numbers. CPU: mt19937 (Matsumoto and Nishimura, 1998). CUDA: Philox4x32-10 (Salmon et al., 2011), a function
// of a seed and a position. Draws, their order, positions, grids and transformations are those of PyTorch's generators,
// so that the numbers are PyTorch's: on the CPU all of them, on CUDA those of uniform, normal, exponential, integer and
// scalar Bernoulli draws on the same kind of GPU; the other operators there have sequences of their own.
#pragma once

#include <optional>

#include "base/strided.h"
#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

class Generator;

// Elements are drawn in the memory order of `out`.
namespace cpu {
// Floating dtypes. The interval is [from, to).
void uniform(const Strided<1>& space, void* out, DType dtype, double from, double to, Generator& generator);
// `row_major`: from 16 elements on they are drawn in blocks, which PyTorch does for such tensors alone.
void normal(const Strided<1>& space, void* out, DType dtype, double mean, double deviation, bool row_major,
            Generator& generator);
void exponential(const Strided<1>& space, void* out, DType dtype, double rate, Generator& generator);
// low + one of `range` integers, in any real dtype. Slightly biased by the modulo, as in PyTorch. Range 0: all 2^64.
void random_integers(const Strided<1>& space, void* out, DType dtype, std::int64_t low, std::uint64_t range,
                     Generator& generator);
// Elements become 1 with the probability of operand 1 (a floating dtype, whose precision the draw has), else 0. Gives a
// probability outside of 0 to 1; nothing is drawn then.
std::optional<double> bernoulli(const Strided<2>& space, void* out, DType dtype, const void* probability,
                                DType probability_dtype, Generator& generator);
// A permutation of 0 … n - 1.
void permutation(std::int64_t* out, std::int64_t n, Generator& generator);
}  // namespace cpu

namespace cuda {
// Seed and first position of a launch. With a cell {seed, position} in device memory the seed is read there and
// `offset` counts from its position: for graphs, whose replays must differ.
struct PhiloxState {
  std::uint64_t seed = 0, offset = 0;
  const std::uint64_t* cell = nullptr;
};

// How many CTAs draw for `numel` elements, and how many positions each thread uses. Four words of Philox give
// `per_draw` values: 4, or 2 of 64 bits.
struct RandomGrid {
  unsigned ctas = 0;
  std::uint64_t positions = 0;
};
RandomGrid random_grid(std::int64_t numel, int per_draw, int num_sms, int threads_per_sm);
// Values of 64 bits: double precision, and integers of a range that 32 bits would not cover evenly.
inline int draws_of(DType dtype) { return dtype == DType::kFloat64 ? 2 : 4; }
inline int integer_draws(std::uint64_t range) { return range >= std::uint64_t{1} << 28 ? 2 : 4; }

int uniform(const Strided<1>& space, void* out, DType dtype, double from, double to, PhiloxState state, unsigned ctas,
            Stream stream);
int normal(const Strided<1>& space, void* out, DType dtype, double mean, double deviation, PhiloxState state,
           unsigned ctas, Stream stream);
int exponential(const Strided<1>& space, void* out, DType dtype, double rate, PhiloxState state, unsigned ctas,
                Stream stream);
int random_integers(const Strided<1>& space, void* out, DType dtype, std::int64_t low, std::uint64_t range,
                    PhiloxState state, unsigned ctas, Stream stream);
// Elements become `one` (the bytes of one element) with that probability, else 0. `wide`: the draw has 53 bits.
int bernoulli(const Strided<1>& space, void* out, int element_bytes, const void* one, bool wide, double probability,
              PhiloxState state, unsigned ctas, Stream stream);
// The same with a probability an element (operand 1: float32 or float64, whose precision the draw has). One outside of
// 0 to 1 is reported.
int bernoulli(const Strided<2>& space, void* out, int element_bytes, const void* one, const void* probability,
              DType probability_dtype, PhiloxState state, unsigned ctas, FaultWord* fault, Stream stream);
// Operands: out, mask (bool), input; floating dtypes. out = mask ? input / (1 - p) : 0, mask true with probability
// 1 - p.
int dropout(const Strided<3>& space, void* out, bool* mask, const void* input, DType dtype, double p, PhiloxState state,
            unsigned ctas, Stream stream);
// Sort keys and their numbers 0, 1, …: sorting the pairs gives a random permutation. Draws of 64 bits.
int random_keys(std::uint64_t* keys, std::uint32_t* values, std::int64_t n, PhiloxState state, unsigned ctas,
                Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
