// Parsing of device names (stable/c/shim.h).
#include <array>
#include <charconv>
#include <string_view>

#include "shims/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

struct DeviceName {
  std::string_view name;
  std::uint32_t code;
};
constexpr std::array kDevices{DeviceName{"cpu", 0},  DeviceName{"cuda", 1},  DeviceName{"xpu", 12},
                              DeviceName{"mps", 13}, DeviceName{"meta", 14}, DeviceName{"privateuseone", 20}};

}  // namespace

UNTORCH_SHIM torch_parse_device_string(const char* device_string, std::uint32_t* type, std::int32_t* index) {
  return guarded("parse_device_string", [&] {
    check(device_string != nullptr, "parse_device_string: the string is null");
    const std::string_view text = device_string;
    const std::size_t colon = text.find(':');
    const std::string_view name = text.substr(0, colon);
    for (const DeviceName& device : kDevices) {
      if (device.name != name) continue;
      std::int32_t number = -1;
      if (colon != std::string_view::npos) {
        const std::string_view digits = text.substr(colon + 1);
        const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
        check(error == std::errc() && end == digits.data() + digits.size() && number >= 0 && number < 128,
              "parse_device_string: \"", text, "\" has no valid index after the colon");
      }
      *type = device.code;
      *index = number;
      return;
    }
    throw_error(ErrorKind::kInvalidArgument, "parse_device_string: \"", text,
                "\" is no device, expected cpu, cuda, xpu, mps, meta or privateuseone, with :index or without");
  });
}
