// Loading, and the checks that stand between a caller's mistake and generated code that trusts its inputs.
#include "model/program.h"

#include <omp.h>

#include <algorithm>
#include <array>

#include "cuda/device.h"
#include "cuda/device_error.h"
#include "cuda/memory_pool.h"
#include "cuda/transfer.h"
#include "model/machine.h"

namespace untorch {
namespace {

constexpr int kMaxParallel = 1024;

// Complex numbers are pairs.
std::size_t alignment_of(DType dtype) noexcept { return element_size(dtype) / (is_complex(dtype) ? 2 : 1); }

std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  if (b == -1) return a == INT64_MIN ? INT64_MAX : -a;  // the one quotient that does not fit
  const std::int64_t q = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? q - 1 : q;
}

// The value of an expression; nothing when it divides by zero or overflows.
bool evaluate(const DimSpec& dim, const std::vector<std::int64_t>& symbols, std::int64_t& result) {
  std::vector<std::int64_t> stack;
  for (const auto& token : dim.tokens) {
    using Token = DimSpec::Token;
    if (token.op == Token::kNumber) {
      stack.push_back(token.number);
      continue;
    }
    if (token.op == Token::kSymbolValue) {
      const std::int64_t value = symbols[static_cast<std::size_t>(token.number)];
      if (value < 0) return false;  // a symbol that no input binds
      stack.push_back(value);
      continue;
    }
    const std::int64_t b = stack.back();
    stack.pop_back();
    std::int64_t& a = stack.back();
    switch (token.op) {
      case Token::kAdd:
        if (__builtin_add_overflow(a, b, &a)) return false;
        break;
      case Token::kSub:
        if (__builtin_sub_overflow(a, b, &a)) return false;
        break;
      case Token::kMul:
        if (__builtin_mul_overflow(a, b, &a)) return false;
        break;
      case Token::kFloorDiv:
        if (b == 0) return false;
        a = floor_div(a, b);
        break;
      case Token::kMod:
        if (b == 0) return false;
        a = b == -1 ? 0 : a % b;
        if (a != 0 && (a < 0) != (b < 0)) a += b;
        break;
      case Token::kMin:
        a = std::min(a, b);
        break;
      case Token::kMax:
        a = std::max(a, b);
        break;
      default:
        return false;
    }
  }
  result = stack.back();
  return true;
}

bool has_states(const MethodSpec& spec) {
  return std::any_of(spec.constants.begin(), spec.constants.end(), [](const ConstantSpec& c) { return c.mutated; });
}

std::string describe(const TensorSpec& spec) {
  std::string out = dtype_name(spec.dtype) + "[";
  for (std::size_t d = 0; d < spec.shape.size(); ++d) {
    const DimSpec& dim = spec.shape[d];
    out += d == 0 ? "" : ", ";
    out += dim.kind == DimSpec::kFixed ? std::to_string(dim.value) : dim.text.empty() ? "?" : dim.text;
  }
  return out + "]";
}

}  // namespace

std::shared_ptr<ModelLibrary> MethodLibrary::open() {
  const std::lock_guard lock(mutex_);
  if (!library_) {
    library_ = std::make_shared<ModelLibrary>(archive_->read_checked(spec_.library),
                                              archive_->file()->path() + ": " + spec_.library, !spec_.has_specs);
  }
  return library_;
}

void MethodLibrary::release() noexcept {
  const std::lock_guard lock(mutex_);
  library_.reset();
}

Method::Method(std::shared_ptr<const Archive> archive, std::shared_ptr<const Manifest> manifest, const MethodSpec& spec,
               const LoadOptions& options, Device device, std::shared_ptr<States> states,
               std::shared_ptr<cuda::UploadRing> ring)
    : archive_(std::move(archive)),
      manifest_(std::move(manifest)),
      spec_(spec),
      options_(options),
      device_(device),
      library_(std::make_shared<MethodLibrary>(archive_, spec)),
      states_(has_states(spec) ? std::move(states) : nullptr),
      owner_("program"),
      ring_(std::move(ring)) {}

Method::Method(Method& shared, std::shared_ptr<States> states)
    : archive_(shared.archive_),
      manifest_(shared.manifest_),
      spec_(shared.spec_),
      options_(shared.options_),
      device_(shared.device_),
      library_(shared.library_),
      states_(shared.states_ ? std::move(states) : nullptr),
      shared_(states_ ? nullptr : &shared),
      owner_("session"),
      ring_(std::make_shared<cuda::UploadRing>()) {}

std::shared_ptr<Container> Method::container() {
  const std::lock_guard lock(mutex_);
  if (closed_) throw_error(ErrorKind::kClosed, "method '", spec_.name, "': the ", owner_, " is closed");
  if (shared_ != nullptr) return shared_->container();
  if (!container_) {
    container_ = std::make_shared<Container>(archive_, *manifest_, spec_, library_->open(), states_, device_,
                                             options_.num_runners, *ring_);
    ring_.reset();
  }
  return container_;
}

std::string_view Method::extern_nodes() const {
  return spec_.extern_nodes ? archive_->text(*spec_.extern_nodes) : std::string_view();
}

void Method::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  container_.reset();
  ring_.reset();
}

void Method::check_inputs(std::span<const TensorView> inputs, const Container& container) const {
  const std::string& method = spec_.name;
  if (inputs.size() != container.num_inputs()) {
    throw_error(ErrorKind::kInvalidArgument, "method '", method, "': expected ", container.num_inputs(),
                " tensors, got ", inputs.size());
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const TensorView& input = inputs[i];
    const std::string number = spec_.has_specs ? "" : std::to_string(i);
    const std::string& name = spec_.has_specs ? spec_.inputs[i].name : number;
    if (!is_known(input.dtype)) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': unknown dtype code ",
                  static_cast<int>(input.dtype));
    }
    if (std::any_of(input.sizes.begin(), input.sizes.end(), [](std::int64_t s) { return s < 0; })) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': has negative sizes ",
                  to_string(input.sizes));
    }
    const bool has_elements =
        std::all_of(input.sizes.begin(), input.sizes.end(), [](std::int64_t s) { return s != 0; });
    if (has_elements &&
        (input.data == nullptr || reinterpret_cast<std::uintptr_t>(input.data) % alignment_of(input.dtype) != 0)) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': its memory is ",
                  input.data == nullptr ? "null" : "not aligned to its dtype: pass a copy");
    }
    // A CUDA method takes CPU memory too: it is copied.
    if (input.device.type != DeviceType::kCPU &&
        (input_on_cpu(i) || input.device.type != device_.type || input.device.index != device_.index)) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': is on ",
                  device_name(input.device), ", expected ", input_on_cpu(i) ? "cpu" : device_name(device_));
    }
    if (std::any_of(input.strides.begin(), input.strides.end(), [](std::int64_t s) { return s < 0; })) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", name, "': has negative strides ",
                  to_string(input.strides), ": pass a contiguous copy (numpy.ascontiguousarray)");
    }
  }
  if (!spec_.has_specs) return;  // a stock package: the library checks itself

  std::vector<std::int64_t> symbols(spec_.symbols.size(), -1);
  std::vector<std::size_t> bound_by(spec_.symbols.size(), 0);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const TensorView& input = inputs[i];
    const TensorSpec& expected = spec_.inputs[i];
    const auto fail = [&](const auto&... parts) {
      throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", expected.name, "': expected ",
                  describe(expected), ", got ", dtype_name(input.dtype), to_string(input.sizes), parts...);
    };
    if (expected.mutated && input.read_only)
      fail(", read-only: the model writes into this input, pass memory that may be written");
    if (input.dtype != expected.dtype) fail(": convert it to ", dtype_name(expected.dtype));
    if (input.sizes.size() != expected.shape.size())
      fail(" (", input.sizes.size(), "-D instead of ", expected.shape.size(), "-D)");
    bool empty = false;
    for (std::size_t d = 0; d < input.sizes.size(); ++d) {
      const DimSpec& dim = expected.shape[d];
      const std::int64_t size = input.sizes[d];
      empty = empty || size == 0;
      if (dim.kind == DimSpec::kFixed && size != dim.value) fail(": dimension ", d, " must be ", dim.value);
      if (dim.kind != DimSpec::kSymbol) continue;
      if (size < dim.min || size > dim.max) {
        if (dim.max == INT64_MAX) fail(": dimension ", d, " (", dim.text, ") must be at least ", dim.min);
        fail(": dimension ", d, " (", dim.text, ") must be from ", dim.min, " to ", dim.max);
      }
      std::int64_t& value = symbols[dim.symbol];
      if (value >= 0 && value != size) {
        fail(": dimension ", d, " must be ", value, ", as ", dim.text, " is in input '",
             spec_.inputs[bound_by[dim.symbol]].name, "'");
      }
      value = size;
      bound_by[dim.symbol] = i;
    }
    if (empty) continue;
    std::int64_t running = 1;
    for (std::size_t d = input.sizes.size(); d-- > 0;) {
      const std::int64_t want = expected.contiguous ? running
                                : expected.strides  ? (*expected.strides)[d]
                                                    : input.strides[d];
      if (input.sizes[d] != 1 && input.strides[d] != want) {
        if (expected.contiguous) {
          fail(" with strides ", to_string(input.strides),
               ": it must be contiguous (numpy.ascontiguousarray makes it so)");
        }
        fail(" with strides ", to_string(input.strides), ": expected strides ", to_string(*expected.strides));
      }
      running *= input.sizes[d];
    }
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    for (std::size_t d = 0; d < inputs[i].sizes.size(); ++d) {
      const DimSpec& dim = spec_.inputs[i].shape[d];
      std::int64_t value = 0;
      if (dim.kind == DimSpec::kExpression && evaluate(dim, symbols, value) && inputs[i].sizes[d] != value) {
        throw_error(ErrorKind::kInvalidArgument, "method '", method, "', input '", spec_.inputs[i].name, "': expected ",
                    describe(spec_.inputs[i]), ", got ", dtype_name(inputs[i].dtype), to_string(inputs[i].sizes),
                    ": dimension ", d, " must be ", dim.text, " = ", value);
      }
    }
  }
}

TensorPtr borrow_view(const TensorView& view, const TensorSpec* spec) {
  const auto extent = static_cast<std::size_t>(storage_extent(view.sizes, view.strides));
  auto tensor = std::make_unique<Tensor>(StorageRef::borrow(view.data, extent * element_size(view.dtype), view.device),
                                         0, view.dtype, view.sizes, view.strides);
  if (spec == nullptr || (!spec->contiguous && !spec->strides)) return tensor;
  Dims& strides = tensor->mutable_strides();
  std::int64_t running = 1;
  for (std::size_t d = view.sizes.size(); d-- > 0;) {
    if (view.sizes[d] == 1) strides[d] = spec->contiguous ? running : (*spec->strides)[d];
    running *= view.sizes[d];
  }
  return tensor;
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

void Method::run(std::span<const TensorView> inputs, std::span<TensorPtr> outputs, std::span<std::int32_t> aliases) {
  const std::shared_ptr<Container> container = this->container();
  check_inputs(inputs, *container);
  check(outputs.size() == container->num_outputs() && aliases.size() == outputs.size(), "method '", spec_.name,
        "': expected room for ", container->num_outputs(), " outputs");

  constexpr std::size_t kFew = 8;
  std::array<TensorPtr, kFew> few;
  std::array<StorageRef, kFew> few_storages;
  std::vector<TensorPtr> many;
  std::vector<StorageRef> many_storages;
  std::span<TensorPtr> tensors(few.data(), std::min(inputs.size(), kFew));
  std::span<StorageRef> storages(few_storages.data(), tensors.size());
  if (inputs.size() > kFew) {
    many.resize(inputs.size());
    many_storages.resize(inputs.size());
    tensors = many;
    storages = many_storages;
  }
  if (device_.type == DeviceType::kCUDA) {
    run_cuda(*container, inputs, tensors, storages, outputs);
  } else {
    run_cpu(*container, inputs, tensors, storages, outputs);
  }

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

void Method::run_cpu(Container& container, std::span<const TensorView> inputs, std::span<TensorPtr> tensors,
                     std::span<StorageRef> storages, std::span<TensorPtr> outputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    tensors[i] = borrow_view(inputs[i], input_spec(i));
    storages[i] = tensors[i]->storage();
  }
  if (options_.num_threads > 0) {
    // OpenMP's setting belongs to the calling thread; it gets back what it had.
    struct Threads {
      int before = omp_get_max_threads();
      explicit Threads(int n) { omp_set_num_threads(n); }
      ~Threads() { omp_set_num_threads(before); }
    } threads(options_.num_threads);
    container.run(tensors, outputs, &proxy_);
  } else {
    container.run(tensors, outputs, &proxy_);
  }
}

void Method::run_cuda(Container& container, std::span<const TensorView> inputs, std::span<TensorPtr> tensors,
                      std::span<StorageRef> storages, std::span<TensorPtr> outputs) {
  const cuda::DeviceGuard guard(device_.index);
  cuda::DeviceErrors::check(device_.index);  // of earlier calls
  const cuda::Stream stream = cuda::call_stream(device_.index);
  const cuda::StreamScope scope(device_.index, stream);
  const cuda::ArenaScope arena(device_.index, cuda::arena_for(device_.index, stream));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    tensors[i] = borrow_view(inputs[i], input_spec(i));
    if (inputs[i].device.type == DeviceType::kCPU && !input_on_cpu(i)) {
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
  container.run(tensors, outputs, &proxy_, stream);
}

Program::Program(const std::string& path, const LoadOptions& options) {
  // OpenMP ends the process when it cannot start as many threads as it was told to.
  check(options.num_runners >= 1 && options.num_runners <= kMaxParallel, "num_runners must be from 1 to ", kMaxParallel,
        ", got ", options.num_runners);
  check(options.num_threads >= 0 && options.num_threads <= kMaxParallel, "num_threads must be from 0 to ", kMaxParallel,
        ", got ", options.num_threads);
  archive_ = std::make_shared<const Archive>(MappedFile::open(path));
  Manifest manifest = read_manifest(*archive_);
  const bool has_cuda =
      std::ranges::any_of(manifest.methods, [](const MethodSpec& spec) { return device_kind(spec.device) == "cuda"; });
  std::vector<Device> devices;
  for (MethodSpec& spec : manifest.methods) {
    devices.push_back(fit_to_machine(path, spec, options.device, has_cuda));
    device_index_ = std::max(device_index_, devices.back().index);
  }
  manifest_ = std::make_shared<const Manifest>(std::move(manifest));
  states_ = std::make_shared<States>(archive_, manifest_, device_index_);
  const auto ring = std::make_shared<cuda::UploadRing>();
  for (std::size_t i = 0; i < devices.size(); ++i) {
    methods_.push_back(
        std::make_unique<Method>(archive_, manifest_, manifest_->methods[i], options, devices[i], states_, ring));
  }
}

std::unique_ptr<Session> Program::session() {
  return std::make_unique<Session>(methods_, std::make_shared<States>(archive_, manifest_, device_index_));
}

Session::Session(std::span<const std::unique_ptr<Method>> methods, std::shared_ptr<States> states)
    : states_(std::move(states)) {
  for (const auto& method : methods) methods_.push_back(std::make_unique<Method>(*method, states_));
}

void Session::close() noexcept {
  for (const auto& method : methods_) method->close();
}

void Program::close() noexcept {
  for (const auto& method : methods_) {
    method->close();
    method->release_library();
  }
}

}  // namespace untorch
