// Draws of categories with given weights, by an exponential race: category j finishes at Exp(1) / weight[j], and the
// first ones in are the sample.
#pragma once

#include "kernels/cuda/common/device_fault.h"
#include "kernels/random.h"

namespace untorch::kernels::cuda {

// Weights [rows, categories], row-major, a floating dtype; not negative and finite, or a fault.
struct Race {
  const void* weights = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0, categories = 0;
};
inline constexpr int kRaceThreads = 256;

// The grid of race_winners, and the positions of the generator that each thread uses.
struct RaceGrid {
  unsigned ctas = 0;
  std::uint64_t positions = 0;
};
RaceGrid race_grid(const Race& race, std::int64_t samples);
// samples [rows, samples]: the winner of a race of its own each. A row without a weight above 0 is a fault.
int race_winners(const Race& race, std::int64_t samples, std::int64_t* out, PhiloxState state, FaultWord* faults,
                 Stream stream);
// speeds [rows, categories]: weight / Exp(1), and -1 for a weight of 0: the largest are the first. float64 for that
// dtype, else float32.
int race_speeds(const Race& race, void* speeds, PhiloxState state, FaultWord* faults, Stream stream);
// A fault for each row whose last chosen speed (rows, a step apart) is -1: more were drawn than have a weight.
int check_race(const void* speeds, bool wide, std::int64_t rows, std::int64_t step, FaultWord* faults, Stream stream);

}  // namespace untorch::kernels::cuda
