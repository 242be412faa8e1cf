// Recording compares three captures: a word that differs must be an operand's address plus a constant in all of them.
#include "cuda/recorded_launches.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "cuda/graph_nodes.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

// How far the operands' addresses are moved in the second and third capture. No difference of two is one of them, so
// that the distance between operands is not taken for one's address.
constexpr std::size_t kCaptures = 3;
constexpr DevicePtr kStep = DevicePtr{1} << 16;
constexpr std::array<std::array<DevicePtr, OperandAddresses::kMost>, kCaptures> kMoves{
    {{}, {1, 3, 9, 27, 81, 243, 729, 2187, 6561, 19683, 59049}, {59049, 19683, 6561, 2187, 729, 243, 81, 27, 9, 3, 1}}};

// A graph that was captured, and what its nodes do.
class Capture {
 public:
  Capture(Stream stream, std::span<const DevicePtr> addresses, const RecordedLaunches::Enqueue& enqueue) {
    const Driver& api = driver();
    if (api.capture_begin(stream, kCaptureModeRelaxed) != kSuccess) return;
    bool enqueued = false;
    try {
      enqueued = enqueue(addresses, stream);
    } catch (...) {
      (void)api.capture_end(stream, &graph_);
      release();
      throw;
    }
    complete_ = api.capture_end(stream, &graph_) == kSuccess && graph_ != nullptr && enqueued;
    if (complete_) nodes_ = address_nodes(graph_, complete_);
    complete_ = complete_ && is_chain(graph_, nodes_);
  }
  ~Capture() { release(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  bool complete() const noexcept { return complete_; }
  const std::vector<AddressNode>& nodes() const noexcept { return nodes_; }

 private:
  void release() noexcept {
    if (graph_ != nullptr) (void)driver().graph_destroy(graph_);
  }

  Graph graph_ = nullptr;
  bool complete_ = false;
  std::vector<AddressNode> nodes_;
};

// Of a node: kernels' parameters in one buffer, as a launch passes them.
std::vector<std::byte> arguments_of(const AddressNode& node) {
  if (node.kind == AddressNode::kMemset) return node.values[0];
  std::vector<std::byte> all;
  for (std::size_t i = 0; i < node.values.size(); ++i) {
    all.resize(std::max(all.size(), node.offsets[i] + node.values[i].size()));
    std::ranges::copy(node.values[i], all.begin() + static_cast<std::ptrdiff_t>(node.offsets[i]));
  }
  return all;
}

bool is_kernel(const AddressNode& node) {
  return node.kind == AddressNode::kKernel || node.kind == AddressNode::kBuffer;
}

// Whether the kernels are the same, launched alike.
bool alike(const AddressNode& a, const AddressNode& b) {
  const auto shape = [](const KernelNodeParams& p) {
    return std::array{p.grid_x, p.grid_y, p.grid_z, p.block_x, p.block_y, p.block_z, p.shared_bytes};
  };
  return a.kind == b.kind && (!is_kernel(a) || (a.function == b.function && shape(a.params) == shape(b.params)));
}

DevicePtr word_at(const std::vector<std::byte>& from, std::size_t byte) {
  DevicePtr word = 0;
  std::memcpy(&word, from.data() + byte, std::min(sizeof word, from.size() - byte));
  return word;
}

// Whether the driver knows memory there.
bool is_address(DevicePtr word) {
  constexpr DevicePtr kLeast = DevicePtr{1} << 20;
  unsigned type = 0;
  return word >= kLeast && driver().pointer_attribute(&type, kPointerMemoryType, word) == kSuccess;
}

// The operand that the words of all captures are an address in. A word that moves with it and is far from it is a part
// of an address.
std::optional<std::size_t> operand_of(const std::array<DevicePtr, kCaptures>& words,
                                      std::span<const DevicePtr> addresses) {
  constexpr DevicePtr kFar = DevicePtr{1} << 32;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    bool moved = words[0] - addresses[i] < kFar || addresses[i] - words[0] < kFar;
    for (std::size_t k = 1; k < kCaptures; ++k) moved = moved && words[k] - words[0] == kMoves[k][i] * kStep;
    if (moved) return i;
  }
  return std::nullopt;
}

// What a launch has besides its shape and is not left to the driver; false where that cannot be repeated.
bool read_attributes(const AddressNode& node, std::vector<LaunchAttribute>& out) {
  const Driver& api = driver();
  LaunchAttribute window{kAccessPolicyWindow, {}};
  constexpr std::size_t kWindowBytes = 2;  // of its words, behind the pointer: size_t num_bytes
  if (api.graph_kernel_attribute(node.handle, window.id, &window.value) == kSuccess &&
      (window.value.words[kWindowBytes] != 0 || window.value.words[kWindowBytes + 1] != 0)) {
    return false;
  }
  for (const int id : {kCooperative, kClusterDimension, kClusterSchedulingPolicy}) {
    LaunchAttribute attribute{id, {}};
    if (api.graph_kernel_attribute(node.handle, id, &attribute.value) != kSuccess) continue;
    if (attribute.value.words[0] != 0) out.push_back(attribute);  // 0 stands for the default of each
  }
  return true;
}

// The limit of dynamic shared memory is an attribute of the function: the library may have lowered it for a launch of
// its own.
void allow_shared_bytes(const Driver& api, Function function, unsigned bytes) {
  constexpr unsigned kAlwaysAllowed = 48 << 10;
  if (bytes <= kAlwaysAllowed) return;
  int limit = 0;
  check_driver(api.function_attribute(&limit, kMaxDynamicSharedBytes, function), "asking for a kernel's limit");
  if (limit >= static_cast<int>(bytes)) return;
  check_driver(api.function_set_attribute(function, kMaxDynamicSharedBytes, static_cast<int>(bytes)),
               "raising a kernel's limit");
}

// A stream that nothing runs on, for one thread at a time. Never destroyed: libraries keep the last one that they saw.
class RecordingStream {
 public:
  explicit RecordingStream(int device) : lock_(mutex()) {
    static auto& streams = *new std::map<int, Stream>;
    Stream& made = streams[device];
    if (made == nullptr) check_driver(driver().stream_create(&made, kStreamNonBlocking), "creating a stream");
    stream_ = made;
  }
  Stream get() const noexcept { return stream_; }

 private:
  static std::mutex& mutex() {
    static auto& made = *new std::mutex;
    return made;
  }

  std::lock_guard<std::mutex> lock_;
  Stream stream_ = nullptr;
};

// Zeros in one row.
bool can_repeat(const MemsetParams& fill) { return fill.value == 0 && fill.height == 1; }

}  // namespace

std::unique_ptr<const RecordedLaunches> RecordedLaunches::record(int device, std::span<const DevicePtr> addresses,
                                                                 const Enqueue& enqueue) {
  const RecordingStream stream(device);
  std::array<std::optional<Capture>, kCaptures> captures;
  for (std::size_t k = 0; k < kCaptures; ++k) {
    std::vector<DevicePtr> moved(addresses.begin(), addresses.end());
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += kMoves[k][i] * kStep;
    captures[k].emplace(stream.get(), moved, enqueue);
    if (!captures[k]->complete() || captures[k]->nodes().size() != captures[0]->nodes().size()) return nullptr;
  }
  if (captures[0]->nodes().empty()) return nullptr;
  auto made = std::unique_ptr<RecordedLaunches>(new RecordedLaunches);
  for (std::size_t n = 0; n < captures[0]->nodes().size(); ++n) {
    const AddressNode& node = captures[0]->nodes()[n];
    if (node.kind == AddressNode::kMemcpy) return nullptr;
    std::array<std::vector<std::byte>, kCaptures> arguments;
    for (std::size_t k = 0; k < kCaptures; ++k) {
      if (!alike(node, captures[k]->nodes()[n])) return nullptr;
      arguments[k] = arguments_of(captures[k]->nodes()[n]);
      if (arguments[k].size() != arguments[0].size() || arguments[k].size() > kMostBytes) return nullptr;
    }
    Launch launch{node.function, {}, {}, arguments[0], {}};
    for (std::size_t byte = 0; byte < arguments[0].size(); byte += sizeof(DevicePtr)) {
      std::array<DevicePtr, kCaptures> words;
      for (std::size_t k = 0; k < kCaptures; ++k) words[k] = word_at(arguments[k], byte);
      if (words[1] == words[0] && words[2] == words[0]) {
        if (is_address(words[0])) return nullptr;
        continue;
      }
      const auto operand = operand_of(words, addresses);
      if (!operand || byte + sizeof(DevicePtr) > arguments[0].size()) return nullptr;
      launch.places.push_back({byte, *operand, words[0] - addresses[*operand]});
    }
    if (is_kernel(node)) {
      const KernelNodeParams& p = node.params;
      launch.config = {p.grid_x, p.grid_y, p.grid_z, p.block_x, p.block_y, p.block_z, p.shared_bytes, {}, {}, 0};
      if (!read_attributes(node, launch.attributes)) return nullptr;
    } else {
      MemsetParams fill{};
      std::memcpy(&fill, arguments[0].data(), sizeof fill);
      if (!can_repeat(fill)) return nullptr;
    }
    made->launches_.push_back(std::move(launch));
  }
  return made;
}

void RecordedLaunches::launch(std::span<const DevicePtr> addresses, Stream stream) const {
  const Driver& api = driver();
  for (const Launch& launch : launches_) {
    alignas(16) std::array<std::byte, kMostBytes> arguments;
    std::ranges::copy(launch.arguments, arguments.begin());
    for (const Place& place : launch.places) {
      const DevicePtr word = addresses[place.operand] + place.distance;
      std::memcpy(arguments.data() + place.byte, &word, sizeof word);
    }
    if (launch.function == nullptr) {
      MemsetParams fill{};
      std::memcpy(&fill, arguments.data(), sizeof fill);
      check_driver(api.memset_d8_async(fill.to, 0, fill.width * fill.element_bytes, stream), "writing zeros");
      continue;
    }
    std::size_t bytes = launch.arguments.size();
    void* extra[5];
    set_argument_buffer(extra, arguments.data(), &bytes);
    LaunchConfig config = launch.config;
    config.stream = stream;
    config.attributes = launch.attributes.data();
    config.num_attributes = static_cast<unsigned>(launch.attributes.size());
    allow_shared_bytes(api, launch.function, config.shared_bytes);
    check_driver(api.launch_kernel_ex(&config, launch.function, nullptr, extra), "launching a kernel");
  }
}

bool RepeatedCall::is_second(Stream stream) noexcept {
  return calls_.load(std::memory_order_relaxed) < 2 && !is_capturing(stream) && calls_.fetch_add(1) == 1;
}

void RepeatedCall::record(int device, std::span<const DevicePtr> addresses,
                          const RecordedLaunches::Enqueue& enqueue) try {
  const RelaxedCapture relaxed;  // another thread may be capturing
  recorded_ = RecordedLaunches::record(device, addresses, enqueue);
  launches_.store(recorded_.get(), std::memory_order_release);
} catch (const std::exception&) {
}

}  // namespace untorch::cuda
