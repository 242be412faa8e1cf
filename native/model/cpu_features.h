// What this CPU can do, by the names that Linux gives the features in /proc/cpuinfo.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace untorch {

// "x86_64" or "aarch64".
const char* cpu_architecture() noexcept;
bool cpu_has(std::string_view feature) noexcept;  // false for a name that is not known here
// All features that are known by name here and present, in a fixed order.
std::vector<std::string> cpu_features();
// The features of `required` that this CPU lacks.
std::vector<std::string> missing_cpu_features(const std::vector<std::string>& required);

}  // namespace untorch
