// Initial values come from the mapped file each time: a copy on the device would double what a cache takes. Zeros,
// which most caches begin with, are seen once and set from then on.
#include "model/mutable_buffers.h"

#include <cstring>

#include "cuda/device.h"
#include "cuda/memory_pool.h"
#include "cuda/transfer.h"
#include "model/device_weights.h"
#include "model/external_weights.h"

namespace untorch {
namespace {

WeightBytes initial(const Archive& archive, const Manifest& manifest, const StateSpec& state) {
  return weight_bytes(archive, manifest.weights[state.weight]);
}

bool all_zero(std::span<const std::byte> bytes) {
  // Each byte is compared with the next one: memcmp reads many at a time.
  return bytes.empty() ||
         (bytes.front() == std::byte{0} && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

cuda::DevicePtr address(const StorageRef& storage) { return reinterpret_cast<cuda::DevicePtr>(storage->data()); }

}  // namespace

MutableBuffers::MutableBuffers(std::shared_ptr<const Archive> archive, std::shared_ptr<const Manifest> manifest,
                               int device_index)
    : archive_(std::move(archive)),
      manifest_(std::move(manifest)),
      device_index_(device_index),
      initial_(std::make_shared<InitialValues>(manifest_->states.size())),
      buffers_(manifest_->states.size()) {
  for (std::size_t i = 0; i < buffers_.size(); ++i) buffers_[i].on_cpu = manifest_->states[i].on_cpu;
}

MutableBuffers::MutableBuffers(const MutableBuffers& other, std::shared_ptr<InitialValues> initial)
    : MutableBuffers(other.archive_, other.manifest_, other.device_index_) {
  initial_ = std::move(initial);
}

MutableBuffers::~MutableBuffers() {
  if (last_ != nullptr) (void)cuda::driver().event_destroy(last_);
}

StorageRef MutableBuffers::make(std::size_t index, bool filled) const {
  const StateSpec& state = manifest_->states[index];
  const auto [file, bytes] = initial(*archive_, *manifest_, state);
  if (!state.on_cpu) {
    return filled ? private_device_weight(*archive_, *manifest_, state.weight, device_index_)
                  : cuda::allocate_unpooled(bytes.size(), device_index_);
  }
  StorageRef storage = StorageRef::allocate(bytes.size());
  if (filled && !bytes.empty()) std::memcpy(storage->data(), bytes.data(), bytes.size());
  file->check_whole();
  return storage;
}

bool MutableBuffers::is_zero(std::size_t index, std::span<const std::byte> bytes) const {
  std::atomic<Initial>& known = (*initial_)[index];
  if (known == Initial::kUnknown) known = all_zero(bytes) ? Initial::kZero : Initial::kOther;
  return known == Initial::kZero;
}

StorageRef MutableBuffers::storage(std::size_t index) {
  const std::lock_guard lock(buffers_mutex_);
  Buffer& buffer = buffers_.at(index);
  if (!buffer.storage) buffer.storage = make(index, true);
  return buffer.storage;
}

std::size_t MutableBuffers::nbytes() const {
  const std::lock_guard lock(buffers_mutex_);
  std::size_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.storage ? buffer.storage->nbytes() : 0;
  return total;
}

void MutableBuffers::reset() {
  const Device device{device_index_ >= 0 ? DeviceType::kCUDA : DeviceType::kCPU, device_index_};
  const bool on_cuda = device.type == DeviceType::kCUDA;
  std::unique_ptr<cuda::DeviceGuard> guard;
  if (on_cuda) guard = std::make_unique<cuda::DeviceGuard>(device_index_);
  const cuda::Stream stream = on_cuda ? cuda::call_stream(device_index_) : nullptr;
  const RunLock run_lock(this, device, stream, true);
  const std::lock_guard lock(buffers_mutex_);
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const StorageRef& storage = buffers_[i].storage;
    if (!storage) continue;
    const auto [file, bytes] = initial(*archive_, *manifest_, manifest_->states[i]);
    if (bytes.empty()) continue;
    const bool zero = is_zero(i, bytes);
    if (buffers_[i].on_cpu && zero) {
      std::memset(storage->data(), 0, bytes.size());
    } else if (buffers_[i].on_cpu) {
      std::memcpy(storage->data(), bytes.data(), bytes.size());
    } else if (zero) {
      cuda::check_driver(cuda::driver().memset_d8_async(address(storage), 0, bytes.size(), stream), "resetting");
    } else {
      cuda::check_driver(cuda::driver().memcpy_h2d_async(address(storage), bytes.data(), bytes.size(), stream),
                         "resetting");
    }
    file->check_whole();
  }
}

std::shared_ptr<MutableBuffers> MutableBuffers::fork() {
  std::shared_ptr<MutableBuffers> copy = fresh();
  const Device device{device_index_ >= 0 ? DeviceType::kCUDA : DeviceType::kCPU, device_index_};
  const bool on_cuda = device.type == DeviceType::kCUDA;
  std::unique_ptr<cuda::DeviceGuard> guard;
  if (on_cuda) guard = std::make_unique<cuda::DeviceGuard>(device_index_);
  const cuda::Stream stream = on_cuda ? cuda::call_stream(device_index_) : nullptr;
  const RunLock from_lock(this, device, stream), to_lock(copy.get(), device, stream);
  const std::lock_guard lock(buffers_mutex_);
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const StorageRef& from = buffers_[i].storage;
    if (!from) continue;  // still as in the file, for both
    StorageRef to = make(i, false);
    if (from->nbytes() != 0 && buffers_[i].on_cpu) {
      std::memcpy(to->data(), from->data(), from->nbytes());
    } else if (from->nbytes() != 0) {
      cuda::check_driver(cuda::driver().memcpy_async(address(to), address(from), from->nbytes(), stream), "forking");
    }
    copy->buffers_[i].storage = std::move(to);
  }
  return copy;
}

std::shared_ptr<MutableBuffers> MutableBuffers::fresh() const {
  return std::shared_ptr<MutableBuffers>(new MutableBuffers(*this, initial_));
}

CallSlots& MutableBuffers::slots_unless_here() {
  check(!in_use_here(),
        "a Python kernel uses the buffers that its own call writes: it may not call a method of the same session (or "
        "of the program, if that made the call), nor reset() or fork() it: use another session");
  return runs_;
}

void MutableBuffers::wait(cuda::Stream stream) {
  if (has_run_ && !cuda::is_capturing(stream)) {
    cuda::check_driver(cuda::driver().stream_wait_event(stream, last_, 0), "waiting for the last run");
  }
}

void MutableBuffers::note(cuda::Stream stream) {
  if (cuda::is_capturing(stream)) return;
  const cuda::Driver& api = cuda::driver();
  if (last_ == nullptr) cuda::check_driver(api.event_create(&last_, cuda::kEventDisableTiming), "running");
  cuda::check_driver(api.event_record(last_, stream), "running");
  has_run_ = true;
}

MutableBuffers::RunLock::RunLock(MutableBuffers* buffers, Device device, cuda::Stream stream, bool writes_all)
    : buffers_(buffers),
      on_cuda_(device.type == DeviceType::kCUDA),
      stream_(stream),
      hold_(buffers == nullptr ? nullptr : &buffers->slots_unless_here()) {
  if (buffers_ == nullptr) return;
  if (writes_all) {
    buffers_->runs_.mend();
  } else if (buffers_->runs_.torn()) {
    throw_error(ErrorKind::kModel,
                "the process was forked while another thread called a method that writes these buffers, and in the "
                "child their values are undefined: call reset(), or make a session after the fork");
  }
  if (on_cuda_) buffers_->wait(stream_);
}

MutableBuffers::RunLock::~RunLock() {
  if (buffers_ == nullptr || !on_cuda_) return;
  try {
    buffers_->note(stream_);
  } catch (...) {  // the stream is gone: there is nothing to wait for
  }
}

}  // namespace untorch
