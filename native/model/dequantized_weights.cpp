// One dequantized copy of a packed weight a file and device, shared by all programs of the process.
#include "model/dequantized_weights.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "cuda/device.h"
#include "cuda/stream.h"
#include "shims/dequantize.h"
#include "tensor/dequantized_weight.h"

namespace untorch {
namespace {

using Key = std::tuple<std::string, int, std::vector<std::size_t>, DType>;  // file, device, its entries, dtype

struct Table {
  std::mutex mutex;  // held while matrices are made: a second program that wants them waits for them
  std::map<Key, std::weak_ptr<const DequantizedWeight>> made;
};
Table& table() {
  static auto& all = *new Table;
  return all;
}

TensorPtr dequantize(const PackedWeight& weight, const char* what) {
  const PackedLinear& spec = *weight.spec;
  const std::vector<const Tensor*>& t = weight.tensors;
  return spec.kind == PackedLinear::kInt4
             ? shims::dequantize_int4(what, *t[0], *t[1], spec.group_size, spec.activations)
             : shims::dequantize_nvfp4(what, *t[0], *t[1], *t[2], spec.activations);
}

}  // namespace

void dequantize_weights(const Archive& archive, std::span<const PackedWeight> packed, int device, const char* what) {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.made, [](const auto& item) { return item.second.expired(); });
  const cuda::DeviceGuard guard(device);
  const cuda::Stream stream = cuda::thread_stream(device);
  const cuda::StreamScope scope(device, stream);
  std::vector<std::pair<Storage*, std::shared_ptr<const DequantizedWeight>>> found;
  std::vector<std::pair<Key, std::shared_ptr<const DequantizedWeight>>> fresh;
  for (const PackedWeight& weight : packed) {
    Key key{archive.file()->identity(), device, weight.weights, weight.spec->activations};
    std::shared_ptr<const DequantizedWeight> one = all.made[key].lock();
    if (!one) {
      const std::vector<const Tensor*>& t = weight.tensors;
      one = std::make_shared<const DequantizedWeight>(
          DequantizedWeight{*dequantize(weight, what), {t[1]->raw(), t.size() > 2 ? t[2]->raw() : nullptr}});
      all.made[key] = one;
      fresh.emplace_back(std::move(key), one);
    }
    found.emplace_back(weight.tensors[0]->storage().get(), std::move(one));
  }
  try {
    cuda::check_driver(cuda::driver().stream_synchronize(stream), "dequantizing weights");
  } catch (...) {
    for (const auto& [key, one] : fresh) all.made.erase(key);
    throw;
  }
  // If layers share packed bytes and have different scales, only the first one's weight is dequantized.
  for (auto& [storage, one] : found) {
    if (storage->dequantized() == nullptr) storage->set_dequantized(std::move(one));
  }
}

std::uint64_t dequantized_bytes(const Archive& archive, int device) {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  std::uint64_t total = 0;
  for (const auto& [key, made] : all.made) {
    if (std::get<0>(key) != archive.file()->identity() || std::get<1>(key) != device) continue;
    if (const auto one = made.lock()) total += one->matrix.storage()->nbytes();
  }
  return total;
}

}  // namespace untorch
