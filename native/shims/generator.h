// The object behind an AtenGeneratorHandle: a counted reference to a random number generator.
#pragma once

#include <memory>

#include "kernels/cpu/random/mt19937.h"
#include "shims/shim.h"

namespace untorch::shims {

using GeneratorRef = std::shared_ptr<kernels::Generator>;

inline GeneratorRef* unwrap(AtenGeneratorHandle handle) noexcept { return reinterpret_cast<GeneratorRef*>(handle); }
inline AtenGeneratorHandle wrap(GeneratorRef* generator) noexcept {
  return reinterpret_cast<AtenGeneratorHandle>(generator);
}

}  // namespace untorch::shims
