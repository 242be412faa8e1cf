// Loading, and calls.
#include "model/program.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>

#include "cuda/device.h"
#include "cuda/device_error.h"
#include "cuda/lost_device.h"
#include "cuda/memory_pool.h"
#include "cuda/transfer.h"
#include "model/external_weights.h"
#include "model/json.h"
#include "model/machine.h"
#include "tensor/host_memory.h"
#include "threads/call.h"
#include "threads/settings.h"

namespace untorch {
namespace {

constexpr int kMaxParallel = 1024;

bool changes_buffers(const MethodSpec& spec) {
  return std::any_of(spec.constants.begin(), spec.constants.end(), [](const ConstantSpec& c) { return c.mutated; });
}

void check_dequantizable(const std::string& path, const Manifest& manifest, bool has_cuda) {
  check(has_cuda, "dequantize_weights: expected a file with methods for a GPU, ", path, " has none");
  const bool has_some = std::ranges::any_of(manifest.methods, [](const MethodSpec& spec) {
    return device_kind(spec.device) == "cuda" && !spec.packed_linears.empty();
  });
  check(has_some, "dequantize_weights: expected a file with int4 or NVFP4 linear layers on a GPU, ", path,
        " has none: export it with quantize='int4' or 'nvfp4', by this version of untorch or a newer one");
}

bool environment_asks_to_verify() {
  const char* const text = std::getenv("UNTORCH_VERIFY");
  const std::string_view value = text != nullptr ? text : "";
  check(value.empty() || value == "0" || value == "1", "UNTORCH_VERIFY: expected 0 or 1, got ", value);
  return value == "1";
}

}  // namespace

std::shared_ptr<ModelLibrary> MethodLibrary::open() {
  const std::lock_guard lock(mutex_);
  if (!library_) {
    // Of the copy that is opened, not of the file: what was checked must be what runs.
    MemoryFile copy(archive_->read(spec_.library), archive_->file()->path() + ": " + spec_.library);
    archive_->file()->check_whole();
    archive_->check(spec_.library, copy.bytes());
    library_ = std::make_shared<ModelLibrary>(std::move(copy), !spec_.has_specs && spec_.inputs.empty());
  }
  return library_;
}

void MethodLibrary::release() noexcept {
  const fork::Uncut uncut;
  const std::lock_guard lock(mutex_);
  library_.reset();
}

Method::Method(std::shared_ptr<const Archive> archive, std::shared_ptr<const Manifest> manifest, const MethodSpec& spec,
               const LoadOptions& options, Device device, std::shared_ptr<MutableBuffers> buffers,
               std::shared_ptr<cuda::UploadRing> ring)
    : archive_(std::move(archive)),
      manifest_(std::move(manifest)),
      spec_(spec),
      options_(options),
      device_(device),
      library_(std::make_shared<MethodLibrary>(archive_, spec)),
      buffers_(changes_buffers(spec) ? std::move(buffers) : nullptr),
      owner_("program"),
      graphs_(options.cuda_graphs == 0 ? nullptr : std::make_unique<GraphCache>(*this, options.cuda_graphs)),
      ring_(std::move(ring)) {}

Method::Method(Method& shared, std::shared_ptr<MutableBuffers> buffers)
    : archive_(shared.archive_),
      manifest_(shared.manifest_),
      spec_(shared.spec_),
      options_(shared.options_),
      device_(shared.device_),
      library_(shared.library_),
      buffers_(shared.buffers_ ? std::move(buffers) : nullptr),
      shared_(buffers_ ? nullptr : &shared),
      owner_("session"),
      graphs_(shared_ != nullptr || options_.cuda_graphs == 0
                  ? nullptr
                  : std::make_unique<GraphCache>(*this, options_.cuda_graphs)),
      ring_(std::make_shared<cuda::UploadRing>()) {}

std::shared_ptr<Container> Method::container() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw_error(ErrorKind::kClosed, "method '", spec_.name, "': the ", owner_, " is closed");
    if (shared_ != nullptr) return shared_->container();
    if (container_ && !container_->torn()) [[likely]]
      return container_;
  }
  const fork::Uncut uncut;  // before the mutex: nobody holds it while he waits for a fork
  const std::lock_guard lock(mutex_);
  if (closed_) throw_error(ErrorKind::kClosed, "method '", spec_.name, "': the ", owner_, " is closed");
  open_container();
  return container_;
}

void Method::open_container() {
  if (container_ && !container_->torn()) return;
  // Calls that other threads of the parent had begun never end: their container is left as it is, and not destroyed.
  if (container_) (void)new std::shared_ptr<Container>(std::move(container_));
  if (!ring_) ring_ = std::make_shared<cuda::UploadRing>();
  const cuda::Tf32 tf32 = options_.tf32 ? cuda::Tf32{*options_.tf32, *options_.tf32} : spec_.tf32;
  container_ = std::make_shared<Container>(archive_, *manifest_, spec_, library_->open(), buffers_, device_,
                                           options_.num_runners, options_.dequantize_weights, tf32, *ring_);
  ring_.reset();
}

std::string_view Method::extern_nodes() const {
  if (!spec_.extern_nodes) return {};
  const std::string_view text = archive_->text(*spec_.extern_nodes);
  // Python parses it; this sees to it that it has no more than a document may have.
  (void)json::parse(text, archive_->file()->path() + ": " + *spec_.extern_nodes, json::Dialect::kNonFiniteNumbers);
  return text;
}

std::string_view Method::source() const {
  const std::size_t dot = spec_.library.rfind('.');
  const std::string name = spec_.library.substr(0, dot) + ".cpp";
  return archive_->contains(name) ? archive_->text(name) : std::string_view();
}

GraphCache::Report Method::graphs() {
  GraphCache* const cache = shared_ != nullptr ? shared_->graphs_.get() : graphs_.get();
  if (cache == nullptr) return {0, "the program was loaded without cuda_graphs"};
  return cache->report();
}

void Method::close() noexcept {
  const fork::Uncut uncut;
  if (graphs_ != nullptr) graphs_->clear();
  const std::lock_guard lock(mutex_);
  closed_ = true;
  container_.reset();
  ring_.reset();
}

TensorPtr keep_container(TensorPtr tensor, std::shared_ptr<Container> container) {
  const Storage* storage = tensor->storage().get();
  using Keep = std::shared_ptr<Container>;
  auto keep = std::make_unique<Keep>(std::move(container));
  StorageRef kept(new Storage(
      storage->data(), storage->nbytes(), storage->device(),
      [](void*, void* context) noexcept { delete static_cast<Keep*>(context); }, keep.get(), true));
  (void)keep.release();
  return std::make_unique<Tensor>(std::move(kept), tensor->storage_offset(), tensor->dtype(), tensor->sizes(),
                                  tensor->strides());
}

void Method::run(std::span<const untorch_view> inputs, std::span<TensorPtr> outputs, std::span<std::int32_t> aliases) {
  const std::shared_ptr<Container> container = this->container();
  check_inputs(inputs, *container);
  check(outputs.size() == container->num_outputs() && aliases.size() == outputs.size(), "method '", spec_.name,
        "': expected room for ", container->num_outputs(), " outputs");
  GraphCache* const graphs = shared_ != nullptr ? shared_->graphs_.get() : graphs_.get();
  const auto check_files = [&] {
    archive_->file()->check_whole();
    for (const ExternalFile& external : manifest_->external_files) external.file->check_whole();
  };
  if (graphs != nullptr && graphs->run(inputs, outputs, aliases)) {
    check_files();
    return;
  }

  SmallVector<StorageRef, 8> storages(inputs.size());
  if (device_.type == DeviceType::kCUDA) {
    run_cuda(*container, inputs, {storages.data(), storages.size()}, outputs);
  } else {
    run_cpu(*container, inputs, {storages.data(), storages.size()}, outputs);
  }
  check_files();

  for (std::size_t i = 0; i < outputs.size(); ++i) {
    aliases[i] = -1;
    if (!outputs[i] || !outputs[i]->defined()) {
      outputs[i].reset();
      continue;
    }
    const Storage* storage = outputs[i]->storage().get();
    for (std::size_t j = 0; j < storages.size() && aliases[i] < 0; ++j) {
      if (storages[j].get() == storage && storage->borrowed()) aliases[i] = static_cast<std::int32_t>(j);
    }
    // A view of a weight inside the model library lives as long as the container does.
    if (aliases[i] < 0 && storage->borrowed()) outputs[i] = keep_container(std::move(outputs[i]), container);
  }
}

void Method::run_cpu(Container& container, std::span<const untorch_view> inputs, std::span<StorageRef> storages,
                     std::span<TensorPtr> outputs) {
  SmallVector<TensorPtr, 8> tensors(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    tensors[i] = borrow_view(inputs[i], input_spec(i));
    storages[i] = tensors[i]->storage();
  }
  // Both settings belong to the calling thread; it gets back what it had.
  struct Spin {
    int before = threads::this_thread.spin_us;
    explicit Spin(int us) { threads::this_thread.spin_us = us; }
    ~Spin() { threads::this_thread.spin_us = before; }
  } spin(options_.spin_us);
  if (options_.num_threads > 0) {
    struct Threads {
      int before = omp_get_max_threads();
      explicit Threads(int n) { omp_set_num_threads(n); }
      ~Threads() { omp_set_num_threads(before); }
    } threads(options_.num_threads);
    container.run({tensors.data(), tensors.size()}, outputs, proxy_);
  } else {
    container.run({tensors.data(), tensors.size()}, outputs, proxy_);
  }
}

void Method::run_cuda(Container& container, std::span<const untorch_view> inputs, std::span<StorageRef> storages,
                      std::span<TensorPtr> outputs) {
  cuda::check_not_lost(device_.index);
  const cuda::DeviceGuard guard(device_.index);
  cuda::DeviceErrors::check(device_.index);  // of earlier calls
  const cuda::Stream stream = cuda::call_stream(device_.index);
  const cuda::StreamScope scope(device_.index, stream);
  const cuda::ArenaScope arena(device_.index, cuda::arena_for(device_.index, stream));
  SmallVector<TensorPtr, 8> tensors(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    tensors[i] = borrow_view(inputs[i], input_spec(i));
    if (device_of(inputs[i]).type == DeviceType::kCPU && !input_on_cpu(i)) {
      if (cuda::is_capturing(stream)) {
        throw_error(ErrorKind::kInvalidArgument, "method '", spec_.name, "', input ", i,
                    ": is in the CPU's memory, and the stream is being captured into a graph, which would read that "
                    "memory again at every replay: pass an array on ",
                    device_name(device_));
      }
      tensors[i] = cuda::to_device(*tensors[i], device_.index);
    }
    storages[i] = tensors[i]->storage();
  }
  container.run({tensors.data(), tensors.size()}, outputs, proxy_, stream);
}

Program::Program(std::shared_ptr<const Archive> archive, Manifest manifest, const LoadOptions& options)
    : archive_(std::move(archive)) {
  const fork::Uncut uncut;
  check(options.num_runners >= 1 && options.num_runners <= kMaxParallel, "num_runners must be from 1 to ", kMaxParallel,
        ", got ", options.num_runners);
  check(options.num_threads >= 0 && options.num_threads <= kMaxParallel, "num_threads must be from 0 to ", kMaxParallel,
        ", got ", options.num_threads);
  check(options.spin_us >= -1 && options.spin_us <= threads::kMaxSpinMicroseconds, "spin_us must be from -1 to ",
        threads::kMaxSpinMicroseconds, ", got ", options.spin_us);
  check(options.cuda_graphs <= kMaxParallel, "cuda_graphs must be from 0 to ", kMaxParallel, ", got ",
        options.cuda_graphs);
  const std::string& path = archive_->file()->path();
  open_external_weights(*archive_, manifest, options.weights, options.copy);
  const bool verify = options.verify || environment_asks_to_verify();
  if (verify) archive_->verify(0);
  if (verify || options.verify_external) verify_external_weights(*archive_, manifest, options.verify_external);
  const bool has_cuda =
      std::ranges::any_of(manifest.methods, [](const MethodSpec& spec) { return device_kind(spec.device) == "cuda"; });
  std::vector<Device> devices;
  for (MethodSpec& spec : manifest.methods) {
    devices.push_back(fit_to_machine(path, spec, options.device, has_cuda));
    device_index_ = std::max(device_index_, devices.back().index);
  }
  if (options.dequantize_weights) check_dequantizable(path, manifest, has_cuda);
  manifest_ = std::make_shared<const Manifest>(std::move(manifest));
  buffers_ = std::make_shared<MutableBuffers>(archive_, manifest_, device_index_);
  const auto ring = std::make_shared<cuda::UploadRing>();
  for (std::size_t i = 0; i < devices.size(); ++i) {
    methods_.push_back(
        std::make_unique<Method>(archive_, manifest_, manifest_->methods[i], options, devices[i], buffers_, ring));
  }
}

std::unique_ptr<Session> Program::session() { return std::make_unique<Session>(methods_, buffers_->fresh()); }

Session::Session(std::span<const std::unique_ptr<Method>> methods, std::shared_ptr<MutableBuffers> buffers)
    : buffers_(std::move(buffers)) {
  for (const auto& method : methods) methods_.push_back(std::make_unique<Method>(*method, buffers_));
}

void Session::close() noexcept {
  for (const auto& method : methods_) method->close();
}

void Program::close() noexcept {
  for (const auto& method : methods_) {
    method->close();
    method->release_library();
  }
  trim_host_memory();  // what its calls left
}

}  // namespace untorch
