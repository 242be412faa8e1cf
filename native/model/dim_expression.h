// The value of a size that is an expression over symbols.
#pragma once

#include <cstdint>
#include <span>

#include "model/manifest.h"

namespace untorch {

// False when it divides by zero, overflows, or has a symbol without a value (negative).
bool evaluate(std::span<const DimSpec::Token> tokens, std::span<const std::int64_t> symbols, std::int64_t& result);

}  // namespace untorch
