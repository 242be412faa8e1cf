// What the inputs of a stock package must be, read from the C++ that PyTorch packs beside the library.
//
// The library checks its inputs itself when AOTI_RUNTIME_CHECK_INPUTS is set, and then refuses what it runs well: the
// ranges of its dynamic sizes come from the example's, a batch of one among them. The loader checks the rest instead.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/manifest.h"

namespace untorch {

struct StockInputs {
  std::vector<std::string> symbols;
  std::vector<TensorSpec> inputs;
};

// Dtype, rank, device, fixed sizes and strides of every input, and which sizes must agree; no ranges. Nothing when the
// source is not as torch 2.6 and newer write it.
std::optional<StockInputs> read_stock_inputs(std::string_view source);

}  // namespace untorch
