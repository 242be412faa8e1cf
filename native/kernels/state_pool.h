// A state pool: what recurrent layers keep of each sequence, and the tokens of a step by sequence.
#pragma once

#include <cstdint>

namespace untorch::kernels {

// Tokens lie one behind the other, those of sequence s at [cu_seqlens_q[s], cu_seqlens_q[s + 1]); they are the last of
// its seqlens_k[s] positions. Where they are all of them, the sequence begins, and its state is zero; else the state is
// in row state_slots[s], from `offset` on. The state behind the last token goes there. Slot −1, and sequences without
// tokens: nothing is read or written.
struct StatePool {
  float* states = nullptr;  // [slots, row elements]
  std::int64_t slots = 0, row = 0, offset = 0;
  const std::int32_t *state_slots = nullptr, *cu_seqlens_q = nullptr, *seqlens_k = nullptr;
  std::int64_t sequences = 0, tokens = 0;

  // Of a sequence; null: nowhere.
  float* state(std::int64_t sequence) const {
    const std::int64_t slot = state_slots[sequence];
    return slot < 0 ? nullptr : states + slot * row + offset;
  }
  std::int64_t begin(std::int64_t sequence) const { return cu_seqlens_q[sequence]; }
  std::int64_t end(std::int64_t sequence) const { return cu_seqlens_q[sequence + 1]; }
  bool begins(std::int64_t sequence) const { return seqlens_k[sequence] == end(sequence) - begin(sequence); }
};

// The first of the three lists that has a wrong value, and where; null if all are right.
struct StateFault {
  const char* argument = nullptr;
  std::int64_t index = 0, value = 0;
};
inline StateFault check_states(const StatePool& p) noexcept {
  std::int64_t before = 0;
  for (std::int64_t s = 0; s <= p.sequences; ++s) {
    const std::int64_t end = p.cu_seqlens_q[s];
    if (end < before || end > p.tokens || (s == 0 && end != 0)) return {"cu_seqlens_q", s, end};
    if (s > 0 && end > before) {
      if (p.seqlens_k[s - 1] < end - before) return {"seqlens_k", s - 1, p.seqlens_k[s - 1]};
      const std::int64_t slot = p.state_slots[s - 1];
      if (slot < -1 || slot >= p.slots) return {"state_slots", s - 1, slot};
    }
    before = end;
  }
  return {};
}

}  // namespace untorch::kernels
