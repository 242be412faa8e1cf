// Talks to the AOTInductor container in the order and with the care that it needs: counts are checked before, weights
// are given once, inputs that a failed call left behind are freed.
#include "model/container.h"

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "base/fork.h"
#include "base/interrupt.h"
#include "base/profile.h"
#include "cuda/device.h"
#include "cuda/lost_device.h"
#include "model/dequantized_weights.h"
#include "model/device_weights.h"
#include "model/external_weights.h"
#include "shims/handles.h"
#include "shims/shim.h"
#include "tensor/copy.h"
#include "threads/call.h"

namespace untorch {
namespace {

// A storage that keeps the mapped file alive as long as somebody looks at the weight.
StorageRef mapped_storage(const std::shared_ptr<const MappedFile>& file, std::span<const std::byte> bytes) {
  using Keep = std::shared_ptr<const MappedFile>;
  auto keep = std::make_unique<Keep>(file);
  StorageRef storage(new Storage(
      const_cast<std::byte*>(bytes.data()), bytes.size(), Device{},
      [](void*, void* context) noexcept { delete static_cast<Keep*>(context); }, keep.get(), true));
  (void)keep.release();
  return storage;
}

using Bound = std::unordered_map<std::string, std::pair<const ConstantSpec*, const Tensor*>>;  // by fqn

// Layers that are tied have one constant between them, under the name of the first.
std::vector<PackedWeight> packed_weights(const MethodSpec& spec, const Bound& bound) {
  std::vector<PackedWeight> found;
  for (const PackedLinear& linear : spec.packed_linears) {
    PackedWeight weight{&linear, {}, {}};
    for (const std::string& fqn : linear.tensors) {
      const auto it = bound.find(fqn);
      if (it == bound.end() || it->second.first->mutated || it->second.first->on_cpu) break;
      weight.weights.push_back(it->second.first->weight);
      weight.tensors.push_back(it->second.second);
    }
    if (weight.tensors.size() == linear.tensors.size()) found.push_back(std::move(weight));
  }
  return found;
}

}  // namespace

Container::Container(const std::shared_ptr<const Archive>& shared_archive, const Manifest& manifest,
                     const MethodSpec& spec, std::shared_ptr<ModelLibrary> library,
                     std::shared_ptr<MutableBuffers> buffers, Device device, std::size_t num_runners, bool dequantize,
                     cuda::Tf32 tf32, cuda::UploadRing& ring)
    : method_(spec.name),
      library_(std::move(library)),
      buffers_(std::move(buffers)),
      runners_(device.type == DeviceType::kCUDA ? 1 : num_runners),
      device_(device),
      tf32_(tf32) {
  const Archive& archive = *shared_archive;
  const std::string& name = library_->name();
  const bool on_cuda = device.type == DeviceType::kCUDA;
  std::unique_ptr<cuda::DeviceGuard> guard;
  if (on_cuda) {
    cuda::check_not_lost(device.index);
    guard = std::make_unique<cuda::DeviceGuard>(device.index);
  }
  const ModelApi& api = library_->api();
  if (!on_cuda) threads::install_fault_handlers();
  if (on_cuda && api.run_single_threaded == nullptr) {
    throw_error(ErrorKind::kUnsupported, name, " has no AOTInductorModelContainerRunSingleThreaded; it is too old");
  }
  if (on_cuda) named_kernels_ = std::make_unique<NamedKernels>(shared_archive, spec);
  if (!spec.cubins.empty()) cubins_ = std::make_unique<CubinFolder>(shared_archive, spec);
  single_ = on_cuda || (num_runners == 1 && api.run_single_threaded != nullptr);
  clear_last_error();
  check_code(api.create(&handle_, on_cuda ? 1 : num_runners, device_name(device).c_str(),
                        cubins_ ? cubins_->folder().c_str() : ""),
             "creating the model");
  try {
    check_code(api.num_inputs(handle_, &num_inputs_), "asking for the number of inputs");
    check_code(api.num_outputs(handle_, &num_outputs_), "asking for the number of outputs");
    const char *in = nullptr, *out = nullptr;
    check_code(api.call_spec(handle_, &in, &out), "asking for the call specification");
    in_spec_ = in != nullptr ? in : "";
    out_spec_ = out != nullptr ? out : "";
    if (spec.has_specs && (spec.inputs.size() != num_inputs_ || spec.num_outputs != num_outputs_)) {
      throw_error(ErrorKind::kInvalidFile, name, " takes ", num_inputs_, " inputs and gives ", num_outputs_,
                  " outputs, the manifest says ", spec.inputs.size(), " and ", spec.num_outputs);
    }
    if (!spec.has_specs && !spec.inputs.empty() && spec.inputs.size() != num_inputs_) {
      throw_error(ErrorKind::kInvalidFile, name, " takes ", num_inputs_, " inputs, the source beside it has ",
                  spec.inputs.size());
    }
    if (library_->interface() && spec.has_specs) {
      check_interface(*library_->interface(), spec, archive.file()->path() + ": method '" + method_ + "'");
    }
    if (spec.extern_nodes) {
      extern_nodes_ =
          parse_extern_nodes(archive.text(*spec.extern_nodes), archive.file()->path() + ": " + *spec.extern_nodes);
    }
    bind_weights(archive, manifest, spec, dequantize, ring);
    if (on_cuda && api.fold_constants != nullptr && has_folded_constants()) {
      // Now, because it waits for the GPU, which a call never does.
      const cuda::Tf32Scope precision(tf32_);
      check_code(api.fold_constants(handle_, false, cuda::thread_stream(device.index), nullptr), "folding constants");
    }
  } catch (...) {
    destroy();
    throw;
  }
}

Container::~Container() {
  const fork::Uncut uncut;
  destroy();
  library_.reset();
}

void Container::destroy() noexcept {
  {
    const shims::HandleTracker tracker(extra_handles_);
    std::optional<cuda::DeviceGuard> guard;  // the model's kernels are unloaded from the device's context
    try {
      if (device_.type == DeviceType::kCUDA) guard.emplace(device_.index);
    } catch (...) {  // the driver is going down with the process
    }
    library_->api().destroy(handle_);
  }
  for (Tensor* handle : extra_handles_) delete handle;
  extra_handles_.clear();
}

bool Container::has_folded_constants() const {
  const ModelApi& api = library_->api();
  if (api.num_constants == nullptr || api.constant_from_folded == nullptr) return false;
  std::size_t count = 0;
  check_code(api.num_constants(handle_, &count), "asking for the number of weights");
  for (std::size_t i = 0; i < count; ++i) {
    bool folded = false;
    check_code(api.constant_from_folded(handle_, i, &folded), "asking for a weight");
    if (folded) return true;
  }
  return false;
}

TensorPtr Container::bind_weight(const Archive& archive, const Manifest& manifest, const ConstantSpec& constant,
                                 const std::vector<StorageRef>& shared) const {
  const auto tensor = [&](StorageRef storage) {
    return std::make_unique<Tensor>(std::move(storage), constant.storage_offset, constant.dtype, constant.shape,
                                    constant.strides);
  };
  if (constant.mutated) return tensor(buffers_->storage(constant.state));
  if (device_.type == DeviceType::kCUDA && !constant.on_cpu) return tensor(shared[constant.weight]);
  const auto [file, bytes] = weight_bytes(archive, manifest.weights[constant.weight]);
  TensorPtr mapped = tensor(mapped_storage(file, bytes));
  const std::size_t alignment = element_size(constant.dtype) < 16 ? element_size(constant.dtype) : 16;
  const bool misaligned = reinterpret_cast<std::uintptr_t>(mapped->raw()) % alignment != 0;
  if (!misaligned) return mapped;
  // The whole weight: the library reads by the size that it was compiled with, not by the manifest's.
  StorageRef copy = StorageRef::allocate(bytes.size());
  std::memcpy(copy->data(), bytes.data(), bytes.size());
  file->check_whole();
  return tensor(std::move(copy));
}

void Container::bind_weights(const Archive& archive, const Manifest& manifest, const MethodSpec& spec, bool dequantize,
                             cuda::UploadRing& ring) {
  const ModelApi& api = library_->api();
  const std::string& path = archive.file()->path();
  if (spec.weights_blob) {
    // Once and before the first run: a second time would leave the model with freed memory.
    const auto blob = archive.read(*spec.weights_blob);
    std::uint64_t expected = 0;
    if (api.blob_size == nullptr || api.load_blob == nullptr) {
      throw_error(ErrorKind::kUnsupported, library_->name(), " cannot take its weights from ", *spec.weights_blob);
    }
    check_code(api.blob_size(handle_, &expected), "asking for the size of the weights");
    if (blob.size() < expected) {
      throw_error(ErrorKind::kInvalidFile, path, ": '", *spec.weights_blob, "' holds ", blob.size(),
                  " bytes of weights, ", spec.library, " needs ", expected);
    }
    check_code(api.load_blob(handle_, reinterpret_cast<const std::uint8_t*>(blob.data())), "loading the weights");
    archive.file()->check_whole();
    return;
  }
  if (!spec.has_specs) {
    // A stock package has the weights in the library. One of ours without its manifest would run without any.
    if (!library_->is_own()) return;
    throw_error(ErrorKind::kInvalidFile, path, " is damaged: ", spec.library,
                " was compiled for untorch, but there is no manifest");
  }

  std::size_t count = 0;
  if (api.num_constants == nullptr || api.constant_name == nullptr || api.constant_dtype == nullptr) {
    throw_error(ErrorKind::kUnsupported, library_->name(), " does not tell its weights; it is too old");
  }
  check_code(api.num_constants(handle_, &count), "asking for the number of weights");
  std::unordered_map<std::string, const ConstantSpec*> by_name;
  for (const ConstantSpec& constant : spec.constants) by_name.emplace(constant.name, &constant);

  // Everything that goes to the device, in one go.
  std::vector<StorageRef> shared;
  if (device_.type == DeviceType::kCUDA) {
    std::vector<std::size_t> wanted;
    for (const ConstantSpec& constant : spec.constants) {
      if (!constant.on_cpu && !constant.mutated) wanted.push_back(constant.weight);
    }
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    std::vector<StorageRef> sent = device_weights(archive, manifest, wanted, device_.index, ring);
    shared.resize(manifest.weights.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) shared[wanted[i]] = std::move(sent[i]);
  }

  std::vector<ModelApi::ConstantEntry> pairs;
  std::unordered_map<std::string, AtenTensorHandle> map;
  Bound bound;
  for (std::size_t i = 0; i < count; ++i) {
    bool folded = false;
    if (api.constant_from_folded != nullptr)
      check_code(api.constant_from_folded(handle_, i, &folded), "asking for a weight");
    if (folded) continue;  // computed by the model itself
    const char* raw_name = nullptr;
    std::int32_t dtype = 0;
    check_code(api.constant_name(handle_, i, &raw_name), "asking for the name of a weight");
    check_code(api.constant_dtype(handle_, i, &dtype), "asking for the dtype of a weight");
    const std::string name = raw_name != nullptr ? raw_name : "";
    const auto it = by_name.find(name);
    if (it == by_name.end()) {
      throw_error(ErrorKind::kInvalidFile, path, ": method '", method_, "' needs the weight '", name,
                  "', which the manifest does not have");
    }
    const ConstantSpec& constant = *it->second;
    // The container's data_size says nothing about one weight: it is the whole storage's size, rounded up to 64. That
    // the manifest's shape and strides fit into the stored bytes was checked when it was read.
    if (static_cast<DType>(dtype) != constant.dtype) {
      throw_error(ErrorKind::kInvalidFile, path, ": method '", method_, "' expects the weight '", name, "' to be ",
                  dtype_name(static_cast<DType>(dtype)), ", the manifest has ", dtype_name(constant.dtype));
    }
    constants_.push_back(bind_weight(archive, manifest, constant, shared));
    const AtenTensorHandle handle = shims::wrap(constants_.back().get());
    pairs.push_back({it->first.c_str(), handle});
    map.emplace(name, handle);
    bound.emplace(constant.fqn, std::make_pair(&constant, constants_.back().get()));
  }
  if (dequantize && device_.type == DeviceType::kCUDA) {
    const std::string what = path + ": method '" + method_ + "'";
    dequantize_weights(archive, packed_weights(spec, bound), device_.index, what.c_str());
  }
  if (pairs.empty()) return;
  const shims::HandleTracker tracker(extra_handles_);
  if (api.set_constants_pairs != nullptr) {
    check_code(api.set_constants_pairs(handle_, pairs.data(), pairs.size(), false, true),
               "giving the model its weights");
  } else if (api.set_constants_map != nullptr) {
    check_code(api.set_constants_map(handle_, &map, false, true), "giving the model its weights");
  } else {
    throw_error(ErrorKind::kUnsupported, library_->name(), " cannot take its weights from outside; it is too old");
  }
}

void Container::run(std::span<TensorPtr> inputs, std::span<TensorPtr> outputs, const ProxyExecutor& proxy,
                    cuda::Stream stream) {
  check(!runners_.is_held_here() && (buffers_ == nullptr || !buffers_->in_use_here()), "method '", method_,
        "': a Python kernel calls the method that runs it, or another that writes the same buffers: the call would "
        "wait for itself. Call another session, or another program");
  const InterruptScope interruptible;
  SmallVector<AtenTensorHandle, 16> handles(inputs.size() + outputs.size());
  AtenTensorHandle* const in = handles.data();
  AtenTensorHandle* const out = in + inputs.size();
  for (std::size_t i = 0; i < inputs.size(); ++i) in[i] = shims::wrap(inputs[i].release());

  std::int32_t code = 0;
  bool failed_inside = false;  // the generated code may not have noticed, and may have gone on to other failures
  {
    const MutableBuffers::RunLock run_lock(buffers_.get(), device_, stream);
    const CallSlots::Hold runner(&runners_);  // the library's own wait for a runner cannot be interrupted
    clear_last_error();
    threads::Call call;
    const cuda::Tf32Scope precision(tf32_);
    const ModelApi& api = library_->api();
    const auto run = single_ ? api.run_single_threaded : api.run;
    ProxyCalls proxies(method_, extern_nodes_, proxy, device_, stream);
    const profile::Range range(profile::Kind::kCall, method_.c_str(), device_.type == DeviceType::kCUDA, stream);
    code = run(handle_, in, inputs.size(), out, outputs.size(), stream, &proxies);
    failed_inside = call.failed() && call.report();
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) outputs[i].reset(shims::unwrap(out[i]));
  if (code != 0 || failed_inside) {
    // A failed input check leaves the handles to the caller; a failed kernel has taken them.
    for (std::size_t i = 0; i < inputs.size(); ++i) delete shims::unwrap(in[i]);
    fail("running", !failed_inside);
  }
}

void Container::check_code(std::int32_t code, const char* what) const {
  if (code != 0) fail(what);
}

void Container::fail(const std::string& what, bool library_knows) const {
  if (device_.type == DeviceType::kCUDA)
    cuda::probe_lost(device_.index, ("method '" + method_ + "' was " + what).c_str());
  // The library's own message says where it failed, the shim's says why; either may be missing.
  std::string where;
  if (library_knows && library_->api().last_error != nullptr) {
    const char* text = nullptr;
    if (library_->api().last_error(&text) == 0 && text != nullptr) where = text;
  }
  const std::string why = last_error();
  while (!where.empty() && (where.back() == '\n' || where.back() == ' ')) where.pop_back();
  ErrorKind kind = why.empty() ? ErrorKind::kModel : last_error_kind();
  if (where.find("input_handles[") != std::string::npos) {
    // The library's own check of what the caller passed.
    if (where.find(">= 2, but got: 1") != std::string::npos) {
      where +=
          " (torch.export took the size to be 2 or more; if it may be 1, export with untorch, or compile with "
          "aot_inductor.check_lowerbound=False, or set AOTI_RUNTIME_CHECK_INPUTS=0 to do without any check)";
    }
    throw Error(ErrorKind::kInvalidArgument, "method '" + method_ + "': the inputs do not fit: " + where);
  }
  std::string message = "method '" + method_ + "' failed while " + what + ": " + (why.empty() ? where : why);
  if (!why.empty() && !where.empty() && where.find(why) == std::string::npos) message += " [" + where + "]";
  if (why.empty() && where.empty()) message += "the model library gave no reason";
  if (kind == ErrorKind::kInternal || kind == ErrorKind::kInvalidArgument) kind = ErrorKind::kModel;
  throw Error(kind, message);
}

}  // namespace untorch
