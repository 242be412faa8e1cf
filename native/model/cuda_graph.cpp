// The call is captured twice, with different memory for the inputs and for everything in between. Words that differ in
// the kernels' parameters are then addresses of inputs, which a replay may be pointed away from, or of memory that the
// graph owns. If one is neither, an input's address is hidden somewhere, and every input is copied into place instead.
// Inputs that the method writes into have the caller's memory in both captures, and in every replay.
#include "model/cuda_graph.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/profile.h"
#include "cuda/device.h"
#include "cuda/random_state.h"
#include "cuda/transfer.h"
#include "tensor/copy.h"
#include "tensor/device.h"

namespace untorch {
namespace {

constexpr std::size_t kAlignment = 16;  // what kernels compiled for the static memory may rely on

// A stream for one capture.
class CaptureStream {
 public:
  CaptureStream() {
    cuda::check_driver(cuda::driver().stream_create(&stream_, cuda::kStreamNonBlocking), "creating a stream");
  }
  ~CaptureStream() { (void)cuda::driver().stream_destroy(stream_); }
  CaptureStream(const CaptureStream&) = delete;
  CaptureStream& operator=(const CaptureStream&) = delete;
  cuda::Stream get() const noexcept { return stream_; }

 private:
  cuda::Stream stream_ = nullptr;
};

cuda::DevicePtr address(const Tensor& t) { return reinterpret_cast<cuda::DevicePtr>(t.raw()); }

std::size_t reach(const Tensor& t) {
  return static_cast<std::size_t>(storage_extent(t.sizes(), t.strides())) * element_size(t.dtype());
}

bool is_defined(const TensorPtr& t) { return t != nullptr && t->defined(); }
bool is_on_device(const Tensor& t) { return t.device().type == DeviceType::kCUDA; }

}  // namespace

CudaGraph::Memory::~Memory() {
  if (last != nullptr) (void)cuda::driver().event_destroy(last);
}

CudaGraph::CudaGraph(Method& method, std::span<const untorch_view> inputs, CudaGraph* shares, Outputs outputs)
    : method_(method),
      container_(method.container()),
      device_(method.device().index),
      copies_(outputs == Outputs::kCopies) {
  if (method.device().type != DeviceType::kCUDA) {
    throw_error(ErrorKind::kUnsupported, "method '", method.spec().name,
                "' runs on the CPU: CUDA graphs are for methods compiled for CUDA");
  }
  method.check_inputs(inputs, *container_);
  check_written(inputs);
  const cuda::DeviceGuard guard(device_);
  if (shares == nullptr) {
    memory_ = std::make_shared<Memory>();
    memory_->arena = memory_->inputs = cuda::make_private_arena(device_);
    cuda::take_larger_blocks(*memory_->arena, false);
  } else {
    check(shares->device_ == device_, "graph of method '", method_.spec().name, "' on ", device_name(method_.device()),
          ": it cannot share the memory of a graph on cuda:", shares->device_);
    memory_ = shares->memory_;
  }
  std::unique_lock<std::mutex> first;  // in the order of run(), which reads what becomes lent
  if (shares != nullptr) first = std::unique_lock(shares->mutex_);
  const std::lock_guard lock(memory_->mutex);
  try {
    if (shares != nullptr && !memory_->shared) {
      memory_->inputs = cuda::make_private_arena(device_, false);  // the second capture of the next graph wants that
      cuda::take_larger_blocks(*memory_->inputs, false);
      cuda::take_larger_blocks(*memory_->arena, true);
      shares->lend_outputs();
      memory_->shared = true;
    }
    captured_ = capture(inputs, memory_->arena, *memory_->inputs);
    log_ = cuda::allocation_log(*captured_.arena);
    const std::shared_ptr<cuda::Arena> elsewhere = cuda::make_private_arena(device_);
    cuda::take_larger_blocks(*elsewhere, true);  // it serves the second capture of the next graph, too
    Captured other = capture(inputs, elsewhere, *elsewhere);
    other_log_ = cuda::allocation_log(*other.arena);
    find_inputs(other);
    (void)cuda::driver().graph_destroy(other.graph);
    other = {};
    cuda::recycle_private_arena(device_, elsewhere);
    cuda::check_driver(cuda::driver().graph_instantiate(&exec_, captured_.graph, 0), "instantiating the graph");
    if (memory_->shared) lend_outputs();
  } catch (...) {
    release();
    throw;
  }
  for (const TensorPtr& input : captured_.inputs) bound_.push_back(is_on_device(*input) ? address(*input) : 0);
}

CudaGraph::~CudaGraph() {
  release();
  // Outputs that somebody still holds keep their blocks; the rest goes back now.
  captured_ = {};
  memory_.reset();
  try {
    cuda::release_gone_graphs(device_);
  } catch (...) {  // the driver is going down with the process
  }
}

void CudaGraph::release() noexcept {
  if (exec_ != nullptr) (void)cuda::driver().graph_exec_destroy(exec_);
  if (read_ != nullptr) (void)cuda::driver().event_destroy(read_);
  read_ = nullptr;
  if (captured_.graph != nullptr) (void)cuda::driver().graph_destroy(captured_.graph);
  exec_ = nullptr;
  captured_.graph = nullptr;
}

std::size_t CudaGraph::num_bindable() const noexcept {
  return static_cast<std::size_t>(std::count(bindable_.begin(), bindable_.end(), true));
}

void CudaGraph::lend_outputs() {
  for (TensorPtr& output : captured_.outputs) {
    if (!is_defined(output) || !is_on_device(*output) || !is_made_here(*output)) continue;
    const StorageRef held = output->storage();
    auto keeper = std::make_unique<std::shared_ptr<cuda::Arena>>(captured_.arena);
    const StorageRef lent(new Storage(
        held->data(), held->nbytes(), held->device(),
        [](void*, void* context) noexcept { delete static_cast<std::shared_ptr<cuda::Arena>*>(context); },
        keeper.get()));
    (void)keeper.release();
    output =
        std::make_unique<Tensor>(lent, output->storage_offset(), output->dtype(), output->sizes(), output->strides());
  }
}

bool CudaGraph::is_made_here(const Tensor& output) const {
  const auto start = reinterpret_cast<cuda::DevicePtr>(output.storage()->data());
  return std::ranges::any_of(log_, [&](const cuda::AllocationRecord& block) { return block.base == start; });
}

CudaGraph::Captured CudaGraph::capture(std::span<const untorch_view> inputs, std::shared_ptr<cuda::Arena> arena,
                                       cuda::Arena& input_arena) {
  const cuda::Driver& api = cuda::driver();
  Captured made;
  made.arena = std::move(arena);
  const CaptureStream stream;
  const cuda::StreamScope stream_scope(device_, stream.get());
  const Device device{DeviceType::kCUDA, device_};
  std::vector<TensorPtr> arguments;
  std::optional<cuda::ArenaScope> arena_scope(std::in_place, device_, input_arena);
  std::vector<std::size_t> bytes(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!writes(i) && !method_.input_on_cpu(i)) bytes[i] = reach(*borrow_view(inputs[i], method_.input_spec(i)));
  }
  made.packed = PackedInputs(bytes, device_);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const untorch_view& view = inputs[i];
    if (writes(i)) {
      made.inputs.push_back(borrow_view(view, method_.input_spec(i)));
    } else if (method_.input_on_cpu(i)) {
      // Read while the call is captured, so its value becomes part of the graph.
      const TensorPtr given = borrow_view(view);
      TensorPtr kept = Tensor::empty_strided(sizes_of(view), strides_of(view), dtype_of(view));
      copy_cpu(*kept, *given);
      made.inputs.push_back(std::move(kept));
    } else {
      // The caller's strides: the model was compiled for them, and a replay may read the caller's memory.
      const TensorPtr given = borrow_view(view, method_.input_spec(i));
      made.inputs.push_back(
          made.packed.has(i)
              ? std::make_unique<Tensor>(made.packed.storage(i), 0, dtype_of(view), sizes_of(view), given->strides())
              : Tensor::empty_strided(sizes_of(view), given->strides(), dtype_of(view), device));
    }
    arguments.push_back(std::make_unique<Tensor>(*made.inputs.back()));
  }
  arena_scope.reset();
  arena_scope.emplace(device_, *made.arena);
  cuda::start_log(*made.arena);
  made.random_cell = cuda::allocate(16, device_, *made.arena);
  cuda::RandomCapture random(device_, reinterpret_cast<cuda::DevicePtr>(made.random_cell->data()));
  made.outputs.resize(container_->num_outputs());
  cuda::check_driver(api.capture_begin(stream.get(), cuda::kCaptureModeRelaxed), "beginning a capture");
  try {
    container_->run(arguments, made.outputs, method_.proxy(), stream.get());
  } catch (...) {
    cuda::Graph broken = nullptr;
    if (api.capture_end(stream.get(), &broken) == cuda::kSuccess && broken != nullptr) (void)api.graph_destroy(broken);
    throw;
  }
  const cuda::Result code = api.capture_end(stream.get(), &made.graph);
  if (code != cuda::kSuccess) {
    throw_error(ErrorKind::kUnsupported, "method '", method_.spec().name,
                "' cannot be captured into a graph: ", cuda::error_text(code),
                " (it waits for a result in between, or uses another stream)");
  }
  made.random_count = random.total_offset();
  return made;
}

bool CudaGraph::explained(cuda::DevicePtr mine, cuda::DevicePtr theirs, const Captured& other, Patch& patch) const {
  for (std::size_t i = 0; i < captured_.inputs.size(); ++i) {
    if (!is_on_device(*captured_.inputs[i]) || writes(i)) continue;
    const cuda::DevicePtr start = address(*captured_.inputs[i]);
    // Strictly within: right behind an input lies something else, most likely the graph's own.
    if (mine < start || mine >= start + reach(*captured_.inputs[i])) continue;
    if (theirs != address(*other.inputs[i]) + (mine - start)) continue;
    patch.input = i;
    patch.distance = mine - start;
    return true;
  }
  patch.input = captured_.inputs.size();
  for (std::size_t i = 0; i < log_.size(); ++i) {
    if (mine >= log_[i].base && mine <= log_[i].base + log_[i].bytes &&
        theirs == other_log_[i].base + (mine - log_[i].base)) {
      return true;
    }
  }
  return false;
}

bool CudaGraph::compare(std::size_t index, const cuda::AddressNode& mine, const cuda::AddressNode& theirs,
                        const Captured& other) {
  if (mine.kind != theirs.kind || mine.values.size() != theirs.values.size()) return false;
  for (std::size_t p = 0; p < mine.values.size(); ++p) {
    const auto &a = mine.values[p], &b = theirs.values[p];
    if (a.size() != b.size()) return false;
    for (std::size_t byte = 0; byte < a.size(); byte += 8) {
      const std::size_t width = std::min<std::size_t>(8, a.size() - byte);
      if (std::memcmp(a.data() + byte, b.data() + byte, width) == 0) continue;
      if (width < 8) return false;
      cuda::DevicePtr first = 0, second = 0;
      std::memcpy(&first, a.data() + byte, 8);
      std::memcpy(&second, b.data() + byte, 8);
      Patch patch{index, p, byte, 0, 0};
      if (!explained(first, second, other, patch)) return false;
      if (patch.input < captured_.inputs.size()) patches_.push_back(patch);
    }
  }
  return true;
}

void CudaGraph::find_inputs(const Captured& other) {
  bool clear = true;
  for (cuda::AddressNode& node : cuda::address_nodes(captured_.graph, clear)) nodes_.push_back({std::move(node), {}});
  const std::vector<cuda::AddressNode> theirs = cuda::address_nodes(other.graph, clear);
  clear = clear && nodes_.size() == theirs.size() && log_.size() == other_log_.size();
  for (std::size_t i = 0; clear && i < nodes_.size(); ++i) clear = compare(i, nodes_[i], theirs[i], other);
  if (!clear) patches_.clear();
  bindable_.assign(captured_.inputs.size(), false);
  for (std::size_t i = 0; i < bindable_.size(); ++i) {
    bindable_[i] = clear && is_on_device(*captured_.inputs[i]) && !writes(i);
  }
  // Only the nodes that read an input are kept, with pointers to their values.
  for (Node& node : nodes_) {
    for (auto& value : node.values) node.pointers.push_back(value.data());
  }
}

bool CudaGraph::writes(std::size_t input) const noexcept {
  const TensorSpec* const spec = method_.input_spec(input);
  return spec != nullptr && spec->mutated;
}

void CudaGraph::check_written(std::span<const untorch_view> inputs) const {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!writes(i) || device_of(inputs[i]).type == DeviceType::kCUDA) continue;
    const std::string& name = method_.input_spec(i)->name;
    throw_error(ErrorKind::kInvalidArgument, "graph of method '", method_.spec().name, "', input '", name,
                "': the model writes into it, and it is on the CPU: ",
                method_.input_on_cpu(i) ? "call the method without a graph"
                                        : "pass memory on " + device_name(method_.device()) + " (untorch.zeros)");
  }
}

void CudaGraph::check_signature(std::span<const untorch_view> inputs) const {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& captured = *captured_.inputs[i];
    const untorch_view& view = inputs[i];
    const std::string name = method_.input_spec(i) != nullptr ? method_.input_spec(i)->name : std::to_string(i);
    const DimSpan sizes = sizes_of(view);
    if (dtype_of(view) != captured.dtype() || !std::ranges::equal(sizes, captured.sizes())) {
      throw_error(ErrorKind::kInvalidArgument, "graph of method '", method_.spec().name, "', input '", name,
                  "': it was captured for ", dtype_name(captured.dtype()), to_string(captured.sizes()), ", got ",
                  dtype_name(dtype_of(view)), to_string(sizes), ": capture another graph for that");
    }
    if (writes(i)) {
      const TensorPtr given = borrow_view(view, method_.input_spec(i));
      if (given->raw() != captured.raw() || given->strides() != captured.strides()) {
        throw_error(ErrorKind::kInvalidArgument, "graph of method '", method_.spec().name, "', input '", name,
                    "': the model writes into it, so the graph was captured with its memory, and this is other "
                    "memory: pass the array that the graph was captured with, or capture another graph");
      }
      continue;
    }
    if (is_on_device(captured)) continue;
    const TensorPtr given = borrow_view(view);
    const TensorPtr dense = Tensor::empty_strided(captured.sizes(), captured.strides(), captured.dtype());
    copy_cpu(*dense, *given);
    if (std::memcmp(dense->raw(), captured.raw(), reach(captured)) != 0) {
      throw_error(ErrorKind::kInvalidArgument, "graph of method '", method_.spec().name, "', input '", name,
                  "': it lies on the CPU and its value became part of the graph: capture another graph for another "
                  "value");
    }
  }
}

void CudaGraph::bind(std::size_t input, cuda::DevicePtr start) {
  if (bound_[input] == start) return;
  const cuda::Driver& api = cuda::driver();
  for (std::size_t i = 0; i < patches_.size(); ++i) {
    if (patches_[i].input != input) continue;
    Node& node = nodes_[patches_[i].node];
    // All places of one node, then one update.
    std::size_t last = i;
    for (std::size_t j = i; j < patches_.size() && patches_[j].node == patches_[i].node; ++j) {
      if (patches_[j].input != input) continue;
      const cuda::DevicePtr value = start + patches_[j].distance;
      std::memcpy(node.values[patches_[j].parameter].data() + patches_[j].byte, &value, sizeof value);
      last = j;
    }
    const auto told = [&](cuda::Result code) { cuda::check_driver(code, "pointing the graph at an input"); };
    const auto description = [&]<class Params>(Params params) {
      std::memcpy(&params, node.values[0].data(), sizeof params);
      return params;
    };
    if (node.kind == Node::kMemcpy) {
      const auto copy = description(cuda::Memcpy3D{});
      told(api.graph_exec_memcpy_set_params(exec_, node.handle, &copy, cuda::primary_context(device_)));
    } else if (node.kind == Node::kMemset) {
      const auto fill = description(cuda::MemsetParams{});
      told(api.graph_exec_memset_set_params(exec_, node.handle, &fill, cuda::primary_context(device_)));
    } else {
      cuda::KernelNodeParams params = node.params;
      std::size_t bytes = node.values.empty() ? 0 : node.values[0].size();
      void* extra[5];
      if (node.kind == Node::kBuffer) {
        cuda::set_argument_buffer(extra, node.pointers[0], &bytes);
        params.extra = extra;
      } else {
        params.kernel_params = node.pointers.data();
      }
      told(api.graph_exec_kernel_set_params(exec_, node.handle, &params));
    }
    i = last;
  }
  bound_[input] = start;
}

void CudaGraph::run(std::span<const untorch_view> inputs, std::span<TensorPtr> outputs,
                    std::span<std::int32_t> aliases) {
  method_.check_inputs(inputs, *container_);
  check_written(inputs);
  check_signature(inputs);
  check(outputs.size() == captured_.outputs.size() && aliases.size() == outputs.size(), "graph of method '",
        method_.spec().name, "': expected room for ", captured_.outputs.size(), " outputs");
  const cuda::DeviceGuard guard(device_);
  const cuda::Stream stream = cuda::call_stream(device_);
  const cuda::StreamScope scope(device_, stream);
  const std::lock_guard lock(mutex_);
  std::unique_lock shared_lock(memory_->mutex, std::defer_lock);
  if (memory_->shared || copies_) shared_lock.lock();
  const cuda::Driver& api = cuda::driver();
  for (TensorPtr& output : outputs) output.reset();
  std::vector<bool> in_place(inputs.size(), false);
  bool fills = false;
  // Launches of one graph are in order by themselves, on whatever streams; what comes before one is not.
  const auto before_filling = [&] {
    if (!fills && read_ != nullptr && !cuda::is_capturing(stream)) {
      cuda::check_driver(api.stream_wait_event(stream, read_, 0), "waiting for the last replay");
    }
    fills = true;
  };
  std::vector<PackedInputs::Source> together, apart;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& own = *captured_.inputs[i];
    if (!is_on_device(own)) continue;
    if (writes(i)) {
      in_place[i] = true;
      continue;
    }
    const untorch_view& view = inputs[i];
    TensorPtr source = borrow_view(view, method_.input_spec(i));
    const bool same_strides = source->strides() == own.strides();
    const auto given = reinterpret_cast<cuda::DevicePtr>(view.data);
    in_place[i] = bindable_[i] && device_of(view).type == DeviceType::kCUDA && same_strides && given % kAlignment == 0;
    bind(i, in_place[i] ? given : address(own));
    if (in_place[i]) continue;
    const bool packed = captured_.packed.has(i) && device_of(view).type == DeviceType::kCPU;
    (packed ? together : apart).push_back({i, &own, std::move(source)});
  }
  if (!together.empty() || !apart.empty()) before_filling();
  captured_.packed.send(together);
  for (const PackedInputs::Source& source : apart) {
    if (source.given->device().type == DeviceType::kCPU) {
      cuda::to_device(*source.own, *source.given);
    } else {
      copy(*source.own, *source.given);
    }
  }
  {
    const MutableBuffers::RunLock run_lock(container_->buffers(), method_.device(), stream);
    if (captured_.random_count != 0) {
      before_filling();
      const cuda::RandomBase base = cuda::reserve_replay(device_, captured_.random_count);
      const auto cell = reinterpret_cast<cuda::DevicePtr>(captured_.random_cell->data());
      cuda::check_driver(api.stream_write_value64(stream, cell, base.seed, 0), "seeding the graph");
      cuda::check_driver(api.stream_write_value64(stream, cell + 8, base.offset, 0), "seeding the graph");
    }
    const bool in_order = shared_lock.owns_lock() && !cuda::is_capturing(stream);
    if (in_order && memory_->last != nullptr) {
      cuda::check_driver(api.stream_wait_event(stream, memory_->last, 0), "waiting for the last replay");
    }
    {
      const profile::Range range(profile::Kind::kReplay, method_.spec().name.c_str(), true, stream);
      cuda::check_driver(api.graph_launch(exec_, stream), "launching the graph");
    }
    for (std::size_t o = 0; copies_ && o < outputs.size(); ++o) {
      if (is_defined(captured_.outputs[o]) && is_overwritten(o, in_place)) {
        outputs[o] = copy_of(*captured_.outputs[o], stream);
      }
    }
    if (in_order) {
      cuda::Event& last = memory_->last;
      if (last == nullptr) cuda::check_driver(api.event_create(&last, cuda::kEventDisableTiming), "replaying");
      cuda::check_driver(api.event_record(last, stream), "replaying");
    }
    if (fills && !cuda::is_capturing(stream)) {
      if (read_ == nullptr) cuda::check_driver(api.event_create(&read_, cuda::kEventDisableTiming), "replaying");
      cuda::check_driver(api.event_record(read_, stream), "replaying");
    }
  }
  for (std::size_t o = 0; o < outputs.size(); ++o) {
    aliases[o] = -1;
    if (!is_defined(captured_.outputs[o])) continue;
    const Tensor& output = *captured_.outputs[o];
    aliases[o] = alias_of(o, in_place);
    if (aliases[o] >= 0) {
      const TensorPtr source = borrow_view(inputs[static_cast<std::size_t>(aliases[o])]);
      outputs[o] = std::make_unique<Tensor>(source->storage(), output.storage_offset(), output.dtype(), output.sizes(),
                                            output.strides());
    } else if (!outputs[o]) {
      outputs[o] = std::make_unique<Tensor>(output);
      if (output.storage()->borrowed()) outputs[o] = keep_container(std::move(outputs[o]), container_);
    }
  }
}

std::int32_t CudaGraph::alias_of(std::size_t output, const std::vector<bool>& in_place) const {
  const Storage* const storage = captured_.outputs[output]->storage().get();
  for (std::size_t i = captured_.inputs.size(); i-- > 0;) {
    if (in_place[i] && storage == captured_.inputs[i]->storage().get()) return static_cast<std::int32_t>(i);
  }
  return -1;
}

bool CudaGraph::is_overwritten(std::size_t output, const std::vector<bool>& in_place) const {
  const Tensor& given = *captured_.outputs[output];
  if (!is_on_device(given) || is_made_here(given)) return true;
  const auto is_same = [&](const TensorPtr& input) { return input->storage().get() == given.storage().get(); };
  return std::ranges::any_of(captured_.inputs, is_same) && alias_of(output, in_place) < 0;
}

TensorPtr CudaGraph::copy_of(const Tensor& output, cuda::Stream stream) const {
  if (!is_on_device(output)) {  // as it was when the call was captured
    TensorPtr kept = Tensor::empty_strided(output.sizes(), output.strides(), output.dtype());
    copy_cpu(*kept, output);
    return kept;
  }
  const std::size_t bytes = reach(output);
  const StorageRef copy = cuda::allocate(bytes, device_);
  if (bytes != 0) {
    cuda::check_driver(
        cuda::driver().memcpy_async(reinterpret_cast<cuda::DevicePtr>(copy->data()), address(output), bytes, stream),
        "copying an output of the graph");
  }
  return std::make_unique<Tensor>(copy, 0, output.dtype(), output.sizes(), output.strides());
}

}  // namespace untorch
