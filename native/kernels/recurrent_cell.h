// The cells of recurrent layers. Included by *.isa.cpp files, so it includes nothing with inline functions.
#pragma once

#include <cstdint>

namespace untorch::kernels {

enum class RecurrentCell : std::int8_t { kTanh, kRelu, kLstm, kGru };
constexpr std::int64_t gates_of(RecurrentCell cell) {
  return cell == RecurrentCell::kLstm ? 4 : cell == RecurrentCell::kGru ? 3 : 1;
}

}  // namespace untorch::kernels
