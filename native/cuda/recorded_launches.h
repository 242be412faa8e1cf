// The kernels of a library's call, launched again without the library: what it does on the host for each call costs
// several times what a launch costs.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cuda/driver.h"

namespace untorch::cuda {

// The addresses of a call's operands and of its workspace, without those that there are none of.
class OperandAddresses {
 public:
  static constexpr std::size_t kMost = 11;

  void add(const void* pointer) noexcept {
    if (pointer != nullptr) values_[count_++] = reinterpret_cast<DevicePtr>(pointer);
  }
  std::span<const DevicePtr> all() const noexcept { return {values_.data(), count_}; }

 private:
  std::array<DevicePtr, kMost> values_{};
  std::size_t count_ = 0;
};

class RecordedLaunches {
 public:
  // Enqueues the call on memory at these addresses; false when it failed.
  using Enqueue = std::function<bool(std::span<const DevicePtr> addresses, Stream stream)>;

  // Captures the call three times, each with other addresses; nothing runs. Null where the words that differ are not
  // the addresses, where one that does not differ is an address, too (memory of the library's own), where kernels may
  // run beside each other, and where the call does something else than launching kernels and writing zeros.
  static std::unique_ptr<const RecordedLaunches> record(int device, std::span<const DevicePtr> addresses,
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

// A call that may come again, and its kernels from the third time on: calls that come once are not worth three
// captures, and the first one loads code.
class RepeatedCall {
 public:
  // Null: call the library.
  const RecordedLaunches* launches() const noexcept { return launches_.load(std::memory_order_acquire); }

  // Behind a call of the library's on `stream`. Where recording fails, calls stay the library's.
  template <class Enqueue>
  void called(int device, Stream stream, std::span<const DevicePtr> addresses, const Enqueue& enqueue) {
    if (is_second(stream)) record(device, addresses, enqueue);
  }

 private:
  bool is_second(Stream stream) noexcept;  // while a stream is captured nothing counts
  void record(int device, std::span<const DevicePtr> addresses, const RecordedLaunches::Enqueue& enqueue);

  std::atomic<int> calls_{0};
  std::unique_ptr<const RecordedLaunches> recorded_;
  std::atomic<const RecordedLaunches*> launches_{nullptr};
};

}  // namespace untorch::cuda
