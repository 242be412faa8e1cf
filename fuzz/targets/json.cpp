// The JSON reader: any text.
#include "model/json.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "input_limits.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const untorch::fuzz::Limits limits;
  try {
    (void)untorch::json::parse({reinterpret_cast<const char*>(data), size}, "input");
  } catch (const untorch::Error&) {
  }
  return 0;
}
