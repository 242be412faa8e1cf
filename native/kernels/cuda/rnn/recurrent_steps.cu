// All steps of a recurrent layer in one persistent kernel.
//
// A step multiplies a few rows by the weight of the hidden state, and the next one needs the result: what costs is
// latency, not arithmetic. Here the weight stays on the SMs for the whole sequence, and CTAs tell each other the new
// state through L2, in the words that have it.
//
//   grid      a CTA has `units` hidden units of one direction: the rows of the weight for their gates. A small layer's
//             has all of them, for a part of the sequences: it waits for no other
//   product   of these rows and the state, by all warps: RegisterProduct for few sequences, SharedProduct for more
//   thread    then has one element of the state, which it keeps
//
// Of each element of the state there is one 64-bit word: its value, and which step it is behind. Readers load it until
// the step is theirs, so one trip through L2 is all that is between two steps: there is no barrier. Words of two steps
// are enough: a CTA writes step s + 2 when it has read all of s + 1, which each CTA wrote when it had read all of s.
//
// A warp alone issues an instruction every two or three clocks: what is between two steps is kept short.
#include <algorithm>

#include "kernels/cuda/common/cooperative_launch.cuh"
#include "kernels/cuda/rnn/cell.cuh"
#include "kernels/rnn.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMostBatch = 32;
constexpr int kFewSequences = 4;    // RegisterProduct's, where several CTAs have a layer
constexpr int kSmallSequences = 8;  // and where each has all units

// What a product leaves in shared memory: parts [split][row][sequence]. An odd pitch spreads the rows over the banks.
struct Parts {
  int splits, rows, pitch;
  constexpr int size() const { return (splits * rows * pitch + 3) / 4 * 4; }
};

struct Layer {
  RecurrentSteps p;
  RecurrentStates states;
  RecurrentPlan plan;
  int gates, lanes;  // of the cell; RegisterProduct's, of a row in a warp
  Parts parts;       // of a CTA that has all its units
  std::uint64_t* exchange;
};

__device__ __forceinline__ std::uint64_t load_word(const std::uint64_t* from) {
  std::uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ void store_word(std::uint64_t* to, float value, unsigned step) {
  const std::uint64_t word = std::uint64_t{step} << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// The state behind `step`, `count` words, into shared memory. This thread has the word of its own number, which is in
// sequence n, and every kThreads-th behind it. InFlight: words that it loads at once.
template <class Product, int InFlight>
__device__ __forceinline__ void receive(const std::uint64_t* words, unsigned step, int count, int n, int hidden,
                                        int pitch, float* state) {
  int k = static_cast<int>(threadIdx.x) - n * hidden;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < count; first += InFlight * kThreads) {
    std::uint64_t got[InFlight] = {};  // 0 is behind no step
    bool waits;
    do {
      waits = false;
#pragma unroll
      for (int j = 0; j < InFlight; ++j) {
        const bool is_missing = first + j * kThreads < count && static_cast<unsigned>(got[j] >> 32) != step;
        if (is_missing) got[j] = load_word(words + first + j * kThreads);
        waits |= is_missing;
      }
    } while (waits);
#pragma unroll
    for (int j = 0; j < InFlight; ++j) {
      if (first + j * kThreads >= count) break;
      state[n * pitch + Product::place_of(k)] = __uint_as_float(static_cast<unsigned>(got[j]));
      for (k += kThreads; k >= hidden; k -= hidden) ++n;
    }
  }
}

// 16 bytes of elements as float.
template <class T, int Count = 16 / sizeof(T)>
__device__ __forceinline__ void widen_16(const uint4& from, float (&to)[Count]) {
  T values[Count];
  memcpy(values, &from, 16);
#pragma unroll
  for (int i = 0; i < Count; ++i) to[i] = widen<T>(values[i]);
}

// The rows of a CTA's units in the layer's weight: those of a gate, then those of the next one.
template <class T>
class WeightRows {
 public:
  __device__ __forceinline__ WeightRows(const Layer& layer, int direction, int first, int units)
      : from_(static_cast<const T*>(layer.p.w_hidden)), hidden_(static_cast<int>(layer.p.hidden)), units_(units) {
    from_ += (std::int64_t{direction} * layer.gates * hidden_ + first) * hidden_;
  }
  __device__ __forceinline__ const T* row(int row) const {
    return from_ + (std::int64_t{row / units_} * hidden_ + row % units_) * hidden_;
  }

 private:
  const T* from_;
  int hidden_, units_;
};

// Few sequences, one after another. A lane has Columns of a row in registers; `lanes` of a warp and `splits` warps
// share a row.
template <class T, int Columns>
class RegisterProduct {
 public:
  static constexpr int kWide = 16 / sizeof(T);
  static constexpr Parts parts_of(int lanes, int rows, int hidden, int batch) {
    return {(hidden + Columns * lanes - 1) / (Columns * lanes), rows, batch | 1};
  }
  // Lanes whose registers hold all rows; 0 for none.
  static constexpr int lanes_for(int rows, int hidden) {
    for (const int lanes : {4, 2, 1}) {
      if ((rows * lanes + 31) / 32 * parts_of(lanes, rows, hidden, 1).splits <= kWarps) return lanes;
    }
    return 0;
  }
  // Elements of a sequence in shared memory; a few between the columns of two lanes put them in different banks.
  __host__ __device__ static constexpr int state_pitch(int lanes, const Parts& parts, int /*hidden*/) {
    return place_of(parts.splits * lanes * Columns);
  }
  __host__ __device__ static constexpr int state_rows(int batch) { return batch; }
  __host__ __device__ static constexpr int place_of(int column) { return column + column / Columns * 4; }
  static constexpr int shared_bytes(const Parts& /*parts*/, int /*hidden*/) { return 0; }

  __device__ __forceinline__ RegisterProduct(const WeightRows<T>& from, int lanes, const Parts& parts, int hidden,
                                             int batch, void* /*shared*/)
      : lanes_(lanes), batch_(batch) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int rows = 32 / lanes, split = warp % parts.splits, row = warp / parts.splits * rows + lane % rows;
    const int column = (split * lanes + lane / rows) * Columns;
    column_at_ = place_of(column);
    part_at_ = row < parts.rows && lane < rows ? (split * parts.rows + row) * parts.pitch : -1;
    const T* const weight = from.row(row) + column;
    const int count = row < parts.rows ? hidden - column : 0;
#pragma unroll
    for (int i = 0; i < Columns / kWide; ++i) {
      T values[kWide];
#pragma unroll
      for (int j = 0; j < kWide; ++j) values[j] = i * kWide + j < count ? weight[i * kWide + j] : T(0.0f);
      memcpy(&words_[i], values, 16);
    }
  }

  __device__ __forceinline__ void multiply(const float* state, int pitch, float* parts) const {
    const float* x = state + column_at_;
#pragma unroll 2
    for (int n = 0; n < batch_; ++n, x += pitch) {
      float sums[4] = {};
#pragma unroll
      for (int i = 0; i < Columns / kWide; ++i) {
        float weight[kWide];
        widen_16<T>(words_[i], weight);
#pragma unroll
        for (int j = 0; j < kWide; j += 4) {
          const float4 four = *reinterpret_cast<const float4*>(x + i * kWide + j);
          sums[0] = fmaf(weight[j], four.x, sums[0]), sums[1] = fmaf(weight[j + 1], four.y, sums[1]);
          sums[2] = fmaf(weight[j + 2], four.z, sums[2]), sums[3] = fmaf(weight[j + 3], four.w, sums[3]);
        }
      }
      float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      // Without a branch, which makes a shuffle take several times as long.
      const float half = sum + __shfl_xor_sync(0xffffffffu, sum, 16);
      sum = lanes_ > 1 ? half : sum;
      const float quarter = sum + __shfl_xor_sync(0xffffffffu, sum, 8);
      sum = lanes_ > 2 ? quarter : sum;
      if (part_at_ >= 0) parts[part_at_ + n] = sum;
    }
  }

 private:
  uint4 words_[Columns / kWide];
  int lanes_, batch_, column_at_, part_at_;
};

// More sequences. The rows are in shared memory; a warp multiplies kRows of them and kTile sequences, whose sums its
// lanes share.
template <class T>
class SharedProduct {
 public:
  static constexpr int kRows = 4, kTile = 8, kWide = 16 / sizeof(T);
  static constexpr Parts parts_of(int /*lanes*/, int rows, int /*hidden*/, int batch) { return {1, rows, batch | 1}; }
  __host__ __device__ static constexpr int groups_of(int rows) { return (rows + kRows - 1) / kRows; }
  __host__ __device__ static constexpr int state_pitch(int /*lanes*/, const Parts& /*parts*/, int hidden) {
    return (hidden + 7) / 8 * 8;
  }
  __host__ __device__ static constexpr int state_rows(int batch) { return (batch + kTile - 1) / kTile * kTile; }
  __host__ __device__ static constexpr int place_of(int column) { return column; }
  static constexpr int shared_bytes(const Parts& parts, int hidden) {
    return groups_of(parts.rows) * kRows * state_pitch(0, parts, hidden) * int{sizeof(T)};
  }

  __device__ __forceinline__ SharedProduct(const WeightRows<T>& from, int /*lanes*/, const Parts& parts, int hidden,
                                           int batch, void* shared)
      : weight_(static_cast<T*>(shared)),
        rows_(parts.rows),
        pitch_(state_pitch(0, parts, hidden)),
        batch_(batch),
        part_pitch_(parts.pitch) {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < rows_ * pitch_; i += kThreads) {
      const int row = i / pitch_, k = i - row * pitch_;
      weight_[i] = k < hidden ? from.row(row)[k] : T(0.0f);
    }
  }

  __device__ __forceinline__ void multiply(const float* state, int /*pitch*/, float* parts) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, groups = groups_of(rows_);
    int tile = 0, group = static_cast<int>(threadIdx.x) / 32;
    for (;; group += kWarps) {
      for (; group >= groups; group -= groups) ++tile;
      if (tile * kTile >= batch_) break;
      const T* const w = weight_ + group * kRows * pitch_;
      const float* const x = state + tile * kTile * pitch_;
      float sums[32] = {};  // [row][sequence]
      for (int k = lane * kWide; k < pitch_; k += 32 * kWide) {
        float weight[kRows][kWide];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          widen_16<T>(*reinterpret_cast<const uint4*>(w + r * pitch_ + k), weight[r]);
        }
#pragma unroll
        for (int n = 0; n < kTile; ++n) {
#pragma unroll
          for (int j = 0; j < kWide; j += 4) {
            const float4 four = *reinterpret_cast<const float4*>(x + n * pitch_ + k + j);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              float& sum = sums[r * kTile + n];
              sum = fmaf(weight[r][j], four.x, sum), sum = fmaf(weight[r][j + 1], four.y, sum);
              sum = fmaf(weight[r][j + 2], four.z, sum), sum = fmaf(weight[r][j + 3], four.w, sum);
            }
          }
        }
      }
      const float sum = scatter_sums(sums, lane);
      const int row = group * kRows + lane / kTile, n = tile * kTile + lane % kTile;
      if (row < rows_ && n < batch_) parts[row * part_pitch_ + n] = sum;
    }
  }

 private:
  // The sums of the values over the lanes: of value i in lane i.
  __device__ __forceinline__ static float scatter_sums(float (&values)[32], int lane) {
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      const bool upper = (lane & width) != 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i >= width) break;  // a constant bound, else the compiler leaves a loop
        const float sent = upper ? values[i] : values[i + width];
        values[i] = (upper ? values[i + width] : values[i]) + __shfl_xor_sync(0xffffffffu, sent, width);
      }
    }
    return values[0];
  }

  T* weight_;
  int rows_, pitch_, batch_, part_pitch_;
};
static_assert(SharedProduct<float>::kRows * SharedProduct<float>::kTile == 32);

// Shared memory: the parts, the state in float32, and what the product keeps there.
template <class Product>
int shared_bytes_of(int lanes, const Parts& parts, int hidden, int batch) {
  const int state = Product::state_rows(batch) * Product::state_pitch(lanes, parts, hidden);
  return (parts.size() + state) * 4 + Product::shared_bytes(parts, hidden);
}

template <class T, class Product>
__global__ void __launch_bounds__(kThreads) steps_kernel(const __grid_constant__ Layer layer) {
  extern __shared__ __align__(16) float shared[];
  const RecurrentSteps& p = layer.p;
  const RecurrentPlan& plan = layer.plan;
  const int hidden = static_cast<int>(p.hidden), gates = layer.gates, tid = static_cast<int>(threadIdx.x);
  // CTAs with parts of the units, or with parts of the batch.
  const int ctas_of_units = (hidden + plan.units - 1) / plan.units;
  const int direction = static_cast<int>(blockIdx.x) / plan.ctas, cta = static_cast<int>(blockIdx.x) % plan.ctas;
  const int first = cta % ctas_of_units * plan.units, units = min(plan.units, hidden - first);
  const int first_sequence = cta / ctas_of_units * plan.sequences;
  const int batch = min(plan.sequences, static_cast<int>(p.batch) - first_sequence);
  const int pitch = Product::state_pitch(layer.lanes, layer.parts, hidden);
  const int state_size = Product::state_rows(plan.sequences) * pitch;
  const Parts own_parts{layer.parts.splits, units * gates, layer.parts.pitch};
  float *const parts = shared, *const state = parts + layer.parts.size();
  const Product product({layer, direction, first, units}, layer.lanes, own_parts, hidden, batch, state + state_size);

  const std::int64_t before = (direction * p.batch + first_sequence) * hidden;  // elements of states
  const T* const first_hidden = static_cast<const T*>(layer.states.first_hidden) + before;
  for (int i = tid; i < state_size; i += kThreads) state[i] = 0.0f;
  __syncthreads();
  for (int i = tid; i < batch * hidden; i += kThreads) {
    const int n = i / hidden, k = i - n * hidden;
    state[n * pitch + Product::place_of(k)] = widen<T>(first_hidden[i]);
  }

  // This thread's element of the state; sequences from `batch` are none.
  const int n = tid / units, unit = first + tid - n * units;
  const bool has_element = n < batch;
  const std::int64_t at = before + std::int64_t{n} * hidden + unit;
  const RecurrentCell cell = p.cell;
  const bool has_cell = layer.states.first_cell != nullptr;
  CellState own{0.0f, 0.0f};
  float bias[kMostGates] = {};
  std::int64_t end = p.steps;  // it takes part below
  if (has_element) {
    own.hidden = widen<T>(first_hidden[at - before]);
    if (has_cell) own.cell = widen<T>(static_cast<const T*>(layer.states.first_cell)[at]);
    if (const auto* const offsets = static_cast<const T*>(p.bias_hidden); offsets != nullptr) {
#pragma unroll
      for (int g = 0; g < kMostGates; ++g) {
        if (g < gates) bias[g] = widen<T>(offsets[(direction * gates + g) * hidden + unit]);
      }
    }
    if (p.lengths != nullptr) end = p.lengths[first_sequence + n];
  }

  // All addresses of a step are a distance from those of the step before.
  const std::int64_t width = std::int64_t{p.directions} * hidden, way = direction == 0 ? 1 : -1;
  const std::int64_t per_step = way * p.batch * width;
  std::int64_t t = direction == 0 ? 0 : p.steps - 1;
  const std::int64_t place = (t * p.batch + first_sequence + n) * width + std::int64_t{direction} * hidden;
  const T* from = static_cast<const T*>(p.input_gates) + place * gates + unit;
  T* to = static_cast<T*>(p.output) + place + unit;
  const float* const part = parts + (unit - first) * own_parts.pitch + n;
  const int gate_pitch = units * own_parts.pitch, split_pitch = own_parts.rows * own_parts.pitch;
  const int state_at = n * pitch + Product::place_of(unit);
  // Words of even steps, then of odd ones.
  std::uint64_t *words = layer.exchange + before, *next_words = words + p.states();
  const int count = batch * hidden, word_n = tid / hidden;
  const auto steps = static_cast<unsigned>(p.steps);

  for (unsigned step = 0; step < steps; ++step, t += way, from += per_step * gates, to += per_step) {
    float input[kMostGates] = {};  // on its way while the state is awaited
    if (has_element) {
#pragma unroll
      for (int g = 0; g < kMostGates; ++g) {
        if (g < gates) input[g] = widen<T>(from[g * hidden]);
      }
    }
    if (step > 0 && ctas_of_units > 1) {
      if (count <= kThreads) {
        receive<Product, 1>(words, step, count, word_n, hidden, pitch, state);
      } else {
        receive<Product, 4>(words, step, count, word_n, hidden, pitch, state);
      }
    }
    __syncthreads();
    product.multiply(state, pitch, parts);
    __syncthreads();
    if (has_element) {
      float from_hidden[kMostGates];
#pragma unroll
      for (int g = 0; g < kMostGates; ++g) from_hidden[g] = bias[g];
#pragma unroll 2
      for (int i = 0; i < own_parts.splits; ++i) {
#pragma unroll
        for (int g = 0; g < kMostGates; ++g) {
          if (g < gates) from_hidden[g] += part[i * split_pitch + g * gate_pitch];
        }
      }
      const bool active = t < end;
      if (active) own = next_state(cell, input, from_hidden, own);
      if (ctas_of_units == 1) {
        state[state_at] = own.hidden;
      } else if (step + 1 < steps) {
        store_word(next_words + (at - before), own.hidden, step + 1);
      }
      *to = narrow<T>(active ? own.hidden : 0.0f);
    }
    std::uint64_t* const previous = words;
    words = next_words, next_words = previous;
  }
  if (has_element) {
    static_cast<T*>(layer.states.last_hidden)[at] = narrow<T>(own.hidden);
    if (has_cell) static_cast<T*>(layer.states.last_cell)[at] = narrow<T>(own.cell);
  }
}

// body(Type<the product>{}, its lanes) for so many units and sequences a CTA; false where there is none.
template <class T, class Body>
bool dispatch_product(const RecurrentSteps& p, int units, int sequences, Body&& body) {
  const int hidden = static_cast<int>(p.hidden), rows = units * static_cast<int>(gates_of(p.cell));
  const bool is_small = units == p.hidden;
  if (units * sequences > kThreads || sequences > (is_small ? kSmallSequences : kMostBatch)) return false;
  if (is_small || sequences <= kFewSequences) {
    if (const int lanes = RegisterProduct<T, 32>::lanes_for(rows, hidden); lanes > 0) {
      return body(Type<RegisterProduct<T, 32>>{}, lanes);
    }
    if (const int lanes = RegisterProduct<T, 64>::lanes_for(rows, hidden); lanes > 0) {
      return body(Type<RegisterProduct<T, 64>>{}, lanes);
    }
    if (is_small) return false;
  }
  return body(Type<SharedProduct<T>>{}, 1);
}

}  // namespace

RecurrentPlan plan_recurrent_steps(const RecurrentSteps& p, int num_sms, int max_shared_bytes) {
  constexpr std::int64_t kMostHidden = 1 << 14, kMostSequences = 1 << 14;
  const int most_ctas = num_sms / p.directions;
  if (p.batch > kMostSequences || p.hidden > kMostHidden || p.steps > 0x7fffffff || most_ctas == 0) return {};
  const int hidden = static_cast<int>(p.hidden), batch = static_cast<int>(p.batch);
  const int gates = static_cast<int>(gates_of(p.cell));
  RecurrentPlan plan;
  (void)dispatch_up_to_float32(p.dtype, [&](auto type) -> int {
    const auto take = [&](int units, int sequences) {
      return dispatch_product<typename decltype(type)::type>(p, units, sequences, [&](auto product, int lanes) {
        using Product = typename decltype(product)::type;
        const Parts parts = Product::parts_of(lanes, units * gates, hidden, sequences);
        const int bytes = shared_bytes_of<Product>(lanes, parts, hidden, sequences);
        if (bytes > max_shared_bytes) return false;
        const int ctas = (hidden + units - 1) / units * ((batch + sequences - 1) / sequences);
        plan = {.units = units, .sequences = sequences, .ctas = ctas, .shared_bytes = bytes};
        return true;
      });
    };
    const int least = (hidden + most_ctas - 1) / most_ctas;
    const int few = std::min(std::max(least, batch <= kFewSequences ? 8 : 4), hidden);
    // All units, or few CTAs, which have fewer words to wait for.
    return take(hidden, (batch + most_ctas - 1) / most_ctas) || take(few, batch) || take(least, batch);
  });
  return plan;
}

int recurrent_steps(const RecurrentSteps& p, const RecurrentStates& states, const RecurrentPlan& plan, void* exchange,
                    Stream stream) {
  if (plan.units < p.hidden) {  // no word may have the number of a step from before
    const int code = cudaMemsetAsync(exchange, 0, recurrent_exchange_bytes(p), stream);
    if (code != 0) return code;
  }
  const int hidden = static_cast<int>(p.hidden), gates = static_cast<int>(gates_of(p.cell));
  return dispatch_up_to_float32(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    int code = kNoKernel;
    (void)dispatch_product<T>(p, plan.units, plan.sequences, [&](auto product, int lanes) {
      using Product = typename decltype(product)::type;
      const Layer layer{.p = p,
                        .states = states,
                        .plan = plan,
                        .gates = gates,
                        .lanes = lanes,
                        .parts = Product::parts_of(lanes, plan.units * gates, hidden, plan.sequences),
                        .exchange = static_cast<std::uint64_t*>(exchange)};
      code = launch_cooperative(steps_kernel<T, Product>, plan.ctas * p.directions, kThreads, plan.shared_bytes, false,
                                stream, layer);
      return true;
    });
    return code;
  });
}

}  // namespace untorch::kernels::cuda
