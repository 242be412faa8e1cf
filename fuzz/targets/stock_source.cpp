// The generated source of a stock package, of which the inputs' checks are read: any text.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "input_limits.h"
#include "model/stock_inputs.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const untorch::fuzz::Limits limits;
  (void)untorch::read_stock_inputs({reinterpret_cast<const char*>(data), size});
  return 0;
}
