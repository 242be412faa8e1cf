// The shared storage's owner is a table entry; the storages given out count on it.
#include "model/device_weights.h"

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "cuda/memory_pool.h"
#include "model/external_weights.h"

namespace untorch {
namespace {

using Key = std::tuple<std::string, std::size_t, std::size_t, int>;  // file, offset and bytes in it, device

struct Table {
  std::mutex mutex;  // held while weights travel: a second program that wants them waits for them
  std::map<Key, std::weak_ptr<StorageRef>> weights;
};
Table& table() {
  static auto& made = *new Table;
  return made;
}

// A storage over shared memory that keeps the owner alive.
StorageRef share(const std::shared_ptr<StorageRef>& owner) {
  using Keep = std::shared_ptr<StorageRef>;
  auto keep = std::make_unique<Keep>(owner);
  Storage* const shared = owner->get();
  StorageRef storage(new Storage(
      shared->data(), shared->nbytes(), shared->device(),
      [](void*, void* context) noexcept { delete static_cast<Keep*>(context); }, keep.get(), true));
  (void)keep.release();
  return storage;
}

}  // namespace

std::vector<StorageRef> device_weights(const Archive& archive, const Manifest& manifest,
                                       std::span<const std::size_t> indices, int device, cuda::UploadRing& ring) {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.weights, [](const auto& item) { return item.second.expired(); });
  std::vector<StorageRef> out;
  std::vector<cuda::UploadPart> parts;
  std::vector<std::pair<Key, std::shared_ptr<StorageRef>>> made;
  for (const std::size_t index : indices) {
    const WeightBytes weight = weight_bytes(archive, manifest.weights[index]);
    const auto bytes = weight.bytes;
    Key key{weight.file->identity(), weight.offset(), bytes.size(), device};
    std::shared_ptr<StorageRef> owner = all.weights[key].lock();
    if (!owner) {
      owner = std::make_shared<StorageRef>(cuda::allocate_unpooled(bytes.size(), device));
      parts.push_back({reinterpret_cast<cuda::DevicePtr>((*owner)->data()), bytes.data(), bytes.size()});
      all.weights[key] = owner;
      made.emplace_back(std::move(key), owner);
    }
    out.push_back(share(owner));
  }
  try {
    ring.upload(parts, device);
    for (const std::size_t index : indices) weight_bytes(archive, manifest.weights[index]).file->check_whole();
  } catch (...) {
    for (const auto& [key, owner] : made) all.weights.erase(key);
    throw;
  }
  return out;
}

StorageRef private_device_weight(const Archive& archive, const Manifest& manifest, std::size_t index, int device) {
  const auto [file, bytes] = weight_bytes(archive, manifest.weights[index]);
  StorageRef storage = cuda::allocate_unpooled(bytes.size(), device);
  cuda::upload(reinterpret_cast<cuda::DevicePtr>(storage->data()), bytes.data(), bytes.size(), device);
  file->check_whole();
  return storage;
}

}  // namespace untorch
