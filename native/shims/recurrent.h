// What untorch's recurrent operators share.
#pragma once

#include <string_view>

#include "kernels/recurrent_cell.h"
#include "shims/op.h"

namespace untorch::shims {

inline kernels::RecurrentCell cell_of(const char* op, const char* name) {
  using kernels::RecurrentCell;
  const std::string_view wanted = name == nullptr ? "" : name;
  if (wanted == "tanh") return RecurrentCell::kTanh;
  if (wanted == "relu") return RecurrentCell::kRelu;
  if (wanted == "lstm") return RecurrentCell::kLstm;
  if (wanted == "gru") return RecurrentCell::kGru;
  throw_error(ErrorKind::kUnsupported, op, ": cell '", wanted, "' is not supported, expected tanh, relu, lstm or gru");
}

// Null is an absent argument.
inline void check_argument(const char* op, const char* name, const Tensor* tensor, DType dtype, const Dims& shape) {
  if (tensor == nullptr) return;
  check(tensor->dtype() == dtype, op, ": argument '", name, "' must be ", dtype_name(dtype), ", got ",
        dtype_name(tensor->dtype()));
  check(tensor->sizes() == shape, op, ": argument '", name, "' must have shape ", to_string(shape), ", got ",
        to_string(tensor->sizes()));
}

inline void check_cell_state(const char* op, kernels::RecurrentCell cell, const Tensor* cx) {
  const bool lstm = cell == kernels::RecurrentCell::kLstm;
  check((cx != nullptr) == lstm, op, ": argument 'cx' ", lstm ? "is missing" : "is for an LSTM only");
}

}  // namespace untorch::shims
