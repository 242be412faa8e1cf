// Philox positions of the process's generator, and of captures.
#include "cuda/random_state.h"

#include <mutex>

#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

thread_local RandomCapture* active = nullptr;

RandomBase reserve(kernels::Generator& generator, int device, std::uint64_t count) {
  const std::lock_guard lock(generator.mutex());
  return {generator.initial_seed(), generator.reserve_philox(static_cast<std::size_t>(device), count)};
}

}  // namespace

RandomCapture::RandomCapture(int device, DevicePtr cell) : device_(device), cell_(cell) {
  check(active == nullptr, "random numbers: this thread captures a graph already");
  active = this;
}

RandomCapture::~RandomCapture() { active = nullptr; }

PhiloxState reserve_random(kernels::Generator* generator, int device, Stream stream, std::uint64_t count,
                           const char* op) {
  const std::uint64_t rounded = (count + 3) / 4 * 4;
  if (!is_capturing(stream)) {
    const RandomBase base = reserve(generator == nullptr ? kernels::default_generator() : *generator, device, rounded);
    return {base.seed, base.offset, nullptr};
  }
  if (active == nullptr || active->device_ != device) {
    throw_error(ErrorKind::kUnsupported, op,
                ": the stream is being captured into a graph by the caller, and every replay would repeat the same "
                "random numbers; let untorch capture the graph (method.graph)");
  }
  if (generator != nullptr && generator != &kernels::default_generator()) {
    throw_error(ErrorKind::kUnsupported, op,
                ": a generator of the caller's cannot be used while a graph is captured; leave it out");
  }
  const std::uint64_t relative = active->offset_;
  active->offset_ += rounded;
  return {0, relative, reinterpret_cast<const std::uint64_t*>(active->cell_)};
}

RandomBase reserve_replay(int device, std::uint64_t total) {
  return reserve(kernels::default_generator(), device, total);
}

}  // namespace untorch::cuda
