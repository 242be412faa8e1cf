// Device-side errors: the pinned words that kernels write, and the texts of the faults.
#include "cuda/device_error.h"

#include <array>
#include <atomic>
#include <mutex>

#include "cuda/device.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

using kernels::cuda::DeviceFault;
using kernels::cuda::FaultWord;

constexpr std::size_t kMaxDevices = 64;

std::array<std::atomic<FaultWord*>, kMaxDevices>& words() {
  static std::array<std::atomic<FaultWord*>, kMaxDevices> made{};
  return made;
}

std::string text_of(DeviceFault fault, std::int64_t value) {
  const std::string number = std::to_string(value);
  switch (fault) {
    case DeviceFault::kIndex:
      return "index: index " + number + " is out of bounds";
    case DeviceFault::kIndexPut:
      return "index_put: index " + number + " is out of bounds";
    case DeviceFault::kIndexReduce:
      return "index_reduce: index " + number + " is out of bounds";
    case DeviceFault::kScatter:
      return "scatter: index " + number + " is out of bounds";
    case DeviceFault::kScatterReduce:
      return "scatter_reduce: index " + number + " is out of bounds";
    case DeviceFault::kMaskedScatter:
      return "masked_scatter: the mask sets " + number + " elements, but 'source' has fewer";
    case DeviceFault::kEmbeddingBagIndex:
      return "_embedding_bag: index " + number + " is outside of the table's rows";
    case DeviceFault::kEmbeddingBagOffset:
      return "_embedding_bag: argument 'offsets' holds " + number + ", which decreases or lies beyond the indices";
    case DeviceFault::kBernoulli:
      return "bernoulli_: 'p' holds a value outside of 0 to 1";
    case DeviceFault::kMaxUnpool:
      return "max_unpool: index " + number + " is outside of output_size";
    case DeviceFault::kLuPivot:
      return "lu_unpack: argument 'LU_pivots' holds " + number + ", which is no row; pass the pivots of lu_factor";
    case DeviceFault::kNvfp4Expert:
    case DeviceFault::kInt4Expert:
      return std::string(fault == DeviceFault::kInt4Expert ? "int4_moe" : "nvfp4_moe") +
             ": argument 'topk_ids' holds " + number +
             ", which is no expert; pass their numbers from 0 on, or -1 for none";
    case DeviceFault::kRoiImage:
      return "torchvision::roi_align: argument 'rois' names image " + number + ", which the input does not have";
    case DeviceFault::kMultinomial:
      return "aten::multinomial: argument 'self' holds a weight that is negative, infinite or NaN";
    case DeviceFault::kMultinomialSum:
      return "aten::multinomial: row " + number + " of argument 'self' has fewer weights above 0 than are drawn";
    case DeviceFault::kNone:
      break;
  }
  return "a kernel reported an unknown fault (" + std::to_string(static_cast<int>(fault)) + ")";
}

}  // namespace

FaultWord* DeviceErrors::word(int device) {
  untorch::check(device >= 0 && static_cast<std::size_t>(device) < kMaxDevices, "device ", device,
                 " is out of range, expected less than ", kMaxDevices);
  std::atomic<FaultWord*>& slot = words()[static_cast<std::size_t>(device)];
  if (FaultWord* const found = slot.load(std::memory_order_acquire); found != nullptr) return found;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (FaultWord* const found = slot.load(std::memory_order_relaxed); found != nullptr) return found;
  const DeviceGuard guard(device);
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  // Unified addressing: the device reaches the word by the same address.
  check_driver(driver().mem_host_alloc(&memory, sizeof(FaultWord), kHostAllocPortable | kHostAllocDeviceMap),
               "allocating the device's error word");
  auto* const made = static_cast<FaultWord*>(memory);
  *made = 0;
  slot.store(made, std::memory_order_release);
  return made;
}

std::optional<std::string> DeviceErrors::take(int device) noexcept {
  if (device < 0 || static_cast<std::size_t>(device) >= kMaxDevices) return std::nullopt;
  FaultWord* const memory = words()[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
  if (memory == nullptr) return std::nullopt;
  const std::atomic_ref<FaultWord> word(*memory);
  if (word.load(std::memory_order_relaxed) == 0) return std::nullopt;
  const FaultWord value = word.exchange(0);
  if (value == 0) return std::nullopt;  // another thread took it
  const int spare = 64 - kernels::cuda::kFaultValueBits;
  return text_of(static_cast<DeviceFault>(value >> kernels::cuda::kFaultValueBits),
                 static_cast<std::int64_t>(value << spare) >> spare);
}

void DeviceErrors::check(int device) {
  if (const auto text = take(device)) [[unlikely]]
    throw_error(ErrorKind::kInvalidArgument, *text, " (found by an earlier kernel on cuda:", device, ")");
}

}  // namespace untorch::cuda
