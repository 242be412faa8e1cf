// The kernels of a library's call, launched again without the library: what it does on the host for each call costs
// several times what a launch costs.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cuda/driver.h"

namespace untorch::cuda {

class RecordedLaunches {
 public:
  // Enqueues the call on memory at these addresses; false when it failed.
  using Enqueue = std::function<bool(std::span<const DevicePtr> addresses)>;

  // Captures the call on `stream` three times, each with other addresses; nothing runs. Null where the words that
  // differ are not the addresses, where one that does not differ is an address, too (memory of the library's own), and
  // where the call does something else than launching kernels and writing zeros.
  static std::unique_ptr<const RecordedLaunches> record(std::span<const DevicePtr> addresses, Stream stream,
                                                        const Enqueue& enqueue);

  // The same call on other memory, with the alignment of what was recorded. From any thread.
  void launch(std::span<const DevicePtr> addresses, Stream stream) const;

 private:
  static constexpr std::size_t kMostBytes = 4096;  // of a launch's arguments

  // Where in the arguments an address lies, and how far from the operand's beginning it is.
  struct Place {
    std::size_t byte, operand;
    DevicePtr distance;
  };
  struct Launch {
    Function function;  // null: MemsetParams in place of a kernel's arguments
    LaunchConfig config;
    std::vector<LaunchAttribute> attributes;
    std::vector<std::byte> arguments;
    std::vector<Place> places;
  };

  RecordedLaunches() = default;

  std::vector<Launch> launches_;
};

}  // namespace untorch::cuda
