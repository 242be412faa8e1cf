// What one input may take: a second of CPU time and 256 MB of memory. More than that ends the process, as a crash does.
#pragma once

#include <cstddef>

namespace untorch::fuzz {

constexpr unsigned kMaxSeconds = 1;
constexpr std::size_t kMaxBytes = std::size_t{256} << 20;

// From its construction to its end. CPU time, not wall time: other processes may keep the machine busy.
class Limits {
 public:
  Limits() noexcept;
  ~Limits();
  Limits(const Limits&) = delete;
  Limits& operator=(const Limits&) = delete;
};

// Prints the text and aborts: a finding that no sanitizer knows.
[[noreturn]] void finding(const char* what) noexcept;

}  // namespace untorch::fuzz
