// cummax and cummin. The values are compared as sort keys (NaN above everything), so two types of state serve every
// dtype; the winning value is copied from its position. See scan.cuh. Also the scratch size of every scan.
#include "kernels/cuda/scan/scan.cuh"
#include "kernels/cuda/sort/sort_key.cuh"
#include "kernels/scan.h"

namespace untorch::kernels::cuda {
namespace {

struct Extremum {
  static constexpr int kOperands = 3;
  Lanes<3> lanes;
  void* values;
  std::int64_t* indices;
  const void* input;
  KeyRule rule;

  template <class Key>
  __device__ __forceinline__ Key key(const std::int64_t (&at)[3], std::int64_t i) const {
    // Of smallest values, NaN wins as well: the complement puts it last.
    const Key made = load_key<Key>(input, at[2] + i * lanes.step[2], rule);
    return rule.descending && rule.kind == KeyRule::kFloating && made == 0 ? static_cast<Key>(rule.mask) : made;
  }
  __device__ __forceinline__ void put(const std::int64_t (&at)[3], std::int64_t i, std::int64_t from) const {
    move_element(values, at[0] + i * lanes.step[0], input, at[2] + from * lanes.step[2], rule.bits / 8);
    indices[at[1] + i * lanes.step[1]] = from;
  }
};

// Keys of up to 32 bits over rows of fewer than 2^32 - 1 elements: key above position, so that the largest word is the
// latest of the largest keys.
struct KeyAndPosition : Extremum {
  using State = std::uint64_t;
  __device__ static State identity() { return 0; }
  __device__ static State combine(State a, State b) { return b > a ? b : a; }
  __device__ State load(const std::int64_t (&at)[3], std::int64_t i) const {
    return static_cast<std::uint64_t>(key<std::uint32_t>(at, i)) << 32 | static_cast<std::uint32_t>(i + 1);
  }
  __device__ void store(const std::int64_t (&at)[3], std::int64_t i, State state) const {
    put(at, i, static_cast<std::int64_t>(state & 0xffffffffu) - 1);
  }
};

struct KeyAt {
  std::uint64_t key;
  std::int64_t position;  // -1: nothing yet
};

struct WideKeyAndPosition : Extremum {
  using State = KeyAt;
  __device__ static State identity() { return {0, -1}; }
  __device__ static State combine(State a, State b) { return b.position >= 0 && b.key >= a.key ? b : a; }
  __device__ State load(const std::int64_t (&at)[3], std::int64_t i) const {
    return {rule.bits == 64 ? key<std::uint64_t>(at, i) : key<std::uint32_t>(at, i), i};
  }
  __device__ void store(const std::int64_t (&at)[3], std::int64_t i, State state) const { put(at, i, state.position); }
};

}  // namespace

std::size_t scan_scratch(std::int64_t rows, std::int64_t n) {
  const std::int64_t along = scan::row_chunks(rows, n).count, across = scan::column_chunks(rows, n).count,
                     most = along > across ? along : across;
  return most == 1 ? 0 : static_cast<std::size_t>(most * rows) * scan::kStateBytes;
}

int cumulative_extremum(const ExtremumParams& params, void* scratch, Stream stream) {
  KeyRule rule;
  if (!key_rule(params.dtype, !params.largest, rule)) return kNoKernel;
  const Extremum base{params.lanes, params.values, params.indices, params.input, rule};
  if (rule.bits == 64 || params.lanes.n >= 0xffffffff) return scan::run(WideKeyAndPosition{base}, scratch, stream);
  return scan::run(KeyAndPosition{base}, scratch, stream);
}

}  // namespace untorch::kernels::cuda
