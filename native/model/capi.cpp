// untorch.h over Program and Method: no exception crosses.
#include <dlfcn.h>

#include <array>
#include <new>

#include "cuda/blas.h"
#include "cuda/device.h"
#include "cuda/device_error.h"
#include "cuda/kernel_registry.h"
#include "cuda/library_search.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"
#include "cuda/transfer.h"
#include "kernels/cpu/isa.h"
#include "model/cpu_features.h"
#include "model/cuda_graph.h"
#include "model/program.h"
#include "tensor/device.h"
#include "untorch/untorch.h"

#ifndef UNTORCH_VERSION
#define UNTORCH_VERSION "0.0.0"
#endif

using untorch::check;
using untorch::Error;
using untorch::ErrorKind;

// The opaque handles are these.
struct untorch_program {
  std::unique_ptr<untorch::Program> program;
  std::vector<std::unique_ptr<untorch_method>> methods;
};
struct untorch_method {
  untorch::Method* method;
};
struct untorch_graph {
  untorch::CudaGraph graph;
};
struct untorch_event {
  untorch::cuda::Event event;
};

namespace {

template <class Body>
untorch_status guarded(Body&& body) noexcept {
  try {
    body();
    return UNTORCH_OK;
  } catch (const Error& e) {
    untorch::set_last_error(e.kind(), e.what());
  } catch (const std::bad_alloc&) {
    untorch::set_last_error(ErrorKind::kOutOfMemory, "out of memory");
  } catch (const std::exception& e) {
    untorch::set_last_error(ErrorKind::kInternal, e.what());
  } catch (...) {
    untorch::set_last_error(ErrorKind::kInternal, "unknown failure");
  }
  return static_cast<untorch_status>(untorch::last_error_kind());
}

untorch::Tensor* unwrap(untorch_tensor* tensor) { return reinterpret_cast<untorch::Tensor*>(tensor); }
const untorch::Tensor* unwrap(const untorch_tensor* tensor) { return reinterpret_cast<const untorch::Tensor*>(tensor); }
untorch_tensor* wrap(untorch::Tensor* tensor) { return reinterpret_cast<untorch_tensor*>(tensor); }

untorch::TensorView to_view(const untorch_view& view) {
  check(view.ndim >= 0 && (view.ndim == 0 || (view.sizes != nullptr && view.strides != nullptr)), "a view has ",
        view.ndim, " dimensions but no sizes or strides");
  const auto ndim = static_cast<std::size_t>(view.ndim);
  return {view.data,
          static_cast<untorch::DType>(view.dtype),
          {static_cast<untorch::DeviceType>(view.device_type), view.device_index},
          {view.sizes, ndim},
          {view.strides, ndim},
          view.read_only != 0};
}

// Views in, tensors out: small calls allocate nothing for either list.
template <class Body>
void with_tensors(const untorch_view* inputs, size_t num_inputs, untorch_tensor** outputs, size_t num_outputs,
                  Body&& body) {
  constexpr std::size_t kFew = 8;
  std::array<untorch::TensorView, kFew> few_views;
  std::array<untorch::TensorPtr, kFew> few_outputs;
  std::vector<untorch::TensorView> many_views;
  std::vector<untorch::TensorPtr> many_outputs;
  std::span<untorch::TensorView> views(few_views.data(), std::min(num_inputs, kFew));
  std::span<untorch::TensorPtr> results(few_outputs.data(), std::min(num_outputs, kFew));
  if (num_inputs > kFew) views = many_views = std::vector<untorch::TensorView>(num_inputs);
  if (num_outputs > kFew) {
    many_outputs.resize(num_outputs);
    results = many_outputs;
  }
  for (std::size_t i = 0; i < num_inputs; ++i) views[i] = to_view(inputs[i]);
  body(views, results);
  for (std::size_t i = 0; i < num_outputs; ++i) outputs[i] = wrap(results[i].release());
}

// A JSON string.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace

extern "C" {

const char* untorch_version(void) { return UNTORCH_VERSION; }
const char* untorch_last_error(void) { return untorch::last_error().c_str(); }

untorch_status untorch_program_open(const char* path, const untorch_load_options* options, untorch_program** out) {
  return guarded([&] {
    check(path != nullptr && out != nullptr, "untorch_program_open: path and out must not be null");
    untorch::LoadOptions load;
    if (options != nullptr) {
      check(options->struct_size == sizeof(untorch_load_options), "untorch_load_options: struct_size is ",
            options->struct_size, ", expected ", sizeof(untorch_load_options));
      if (options->device != nullptr) load.device = options->device;
      load.num_runners = options->num_runners;
      load.num_threads = options->num_threads;
    }
    auto handle = std::make_unique<untorch_program>();
    handle->program = std::make_unique<untorch::Program>(path, load);
    for (const auto& method : handle->program->methods()) {
      handle->methods.push_back(std::make_unique<untorch_method>(untorch_method{method.get()}));
    }
    *out = handle.release();
  });
}

void untorch_program_close(untorch_program* program) {
  if (program != nullptr) program->program->close();
}

void untorch_program_free(untorch_program* program) {
  untorch_program_close(program);
  delete program;
}

size_t untorch_program_num_methods(const untorch_program* program) { return program->methods.size(); }

untorch_method* untorch_program_method(const untorch_program* program, size_t index) {
  return index < program->methods.size() ? program->methods[index].get() : nullptr;
}

untorch_method* untorch_program_find(const untorch_program* program, const char* name) {
  for (const auto& method : program->methods) {
    if (method->method->spec().name == name) return method.get();
  }
  return nullptr;
}

untorch_status untorch_program_entry(const untorch_program* program, const char* name, const void** data,
                                     size_t* length) {
  return guarded([&] {
    const auto bytes = program->program->archive().read(name);
    *data = bytes.data();
    *length = bytes.size();
  });
}

int32_t untorch_program_is_stock(const untorch_program* program) { return program->program->manifest().stock ? 1 : 0; }

const char* untorch_method_name(const untorch_method* method) { return method->method->spec().name.c_str(); }

untorch_status untorch_method_open(untorch_method* method) {
  return guarded([&] { (void)method->method->container(); });
}

untorch_status untorch_method_arity(untorch_method* method, size_t* num_inputs, size_t* num_outputs) {
  return guarded([&] {
    const auto container = method->method->container();
    *num_inputs = container->num_inputs();
    *num_outputs = container->num_outputs();
  });
}

untorch_status untorch_method_call_spec(untorch_method* method, const char** in_spec, const char** out_spec) {
  return guarded([&] {
    const auto container = method->method->container();
    *in_spec = container->in_spec().c_str();
    *out_spec = container->out_spec().c_str();
  });
}

untorch_status untorch_method_extern_nodes(untorch_method* method, const char** text, size_t* length) {
  return guarded([&] {
    const std::string_view nodes = method->method->extern_nodes();
    *text = nodes.empty() ? nullptr : nodes.data();
    *length = nodes.size();
  });
}

void untorch_method_set_proxy(untorch_method* method, untorch_proxy_callback callback, void* context) {
  method->method->set_proxy(callback, context);
}

void untorch_set_error(untorch_status status, const char* message) {
  untorch::set_last_error(static_cast<ErrorKind>(status), message != nullptr ? message : "");
}

untorch_status untorch_method_run(untorch_method* method, const untorch_view* inputs, size_t num_inputs,
                                  untorch_tensor** outputs, int32_t* aliases, size_t num_outputs) {
  return guarded([&] {
    with_tensors(inputs, num_inputs, outputs, num_outputs,
                 [&](auto views, auto results) { method->method->run(views, results, {aliases, num_outputs}); });
  });
}

untorch_status untorch_call_stream(int32_t device_index, void** stream) {
  return guarded([&] { *stream = untorch::cuda::call_stream(device_index); });
}

untorch_status untorch_stream_wait(int32_t device_index, void* consumer, void* producer) {
  return guarded([&] {
    if (consumer == producer) return;
    const untorch::cuda::DeviceGuard guard(device_index);
    untorch::cuda::order_after(static_cast<untorch::cuda::Stream>(consumer),
                               static_cast<untorch::cuda::Stream>(producer));
  });
}

untorch_status untorch_stream_synchronize(int32_t device_index, void* stream) {
  return guarded([&] {
    const untorch::cuda::DeviceGuard guard(device_index);
    untorch::cuda::check_driver(untorch::cuda::driver().stream_synchronize(static_cast<untorch::cuda::Stream>(stream)),
                                "synchronising a stream");
    untorch::cuda::DeviceErrors::check(device_index);
  });
}

untorch_status untorch_tensor_to_host(const untorch_tensor* tensor, untorch_tensor** out) {
  return guarded([&] {
    const untorch::Tensor& t = *unwrap(tensor);
    check(t.defined(), "untorch_tensor_to_host: the tensor is undefined");
    untorch::TensorPtr copy = t.device().type == untorch::DeviceType::kCUDA ? untorch::cuda::to_host(t)
                                                                            : std::make_unique<untorch::Tensor>(t);
    *out = wrap(copy.release());
  });
}

untorch_status untorch_method_device(untorch_method* method, int32_t* device_type, int32_t* device_index) {
  return guarded([&] {
    const untorch::Device device = method->method->device();
    *device_type = static_cast<int32_t>(device.type);
    *device_index = device.index;
  });
}

const char* untorch_cuda_devices(void) {
  thread_local std::string text;
  std::string reason;
  try {
    if (untorch::cuda::try_driver(&reason) == nullptr) {
      text = "{\"error\": " + quoted(reason) + "}";
      return text.c_str();
    }
    std::string list;
    for (int i = 0; i < untorch::cuda::device_count(); ++i) {
      const untorch::cuda::DeviceProperties& p = untorch::cuda::device_properties(i);
      list += std::string(i == 0 ? "" : ", ") + "{\"index\": " + std::to_string(i) + ", \"name\": " + quoted(p.name) +
              ", \"architecture\": " + quoted(p.architecture()) +
              ", \"multiprocessors\": " + std::to_string(p.multiprocessors) +
              ", \"total_memory\": " + std::to_string(p.total_memory) +
              ", \"l2_bytes\": " + std::to_string(p.l2_bytes) + "}";
    }
    int version = 0;
    (void)untorch::cuda::driver().driver_version(&version);
    text = "{\"driver\": " + std::to_string(version) +
           ", \"kernels\": " + (untorch::cuda::has_kernels() ? "true" : "false") + ", \"devices\": [" + list + "]}";
  } catch (const std::exception& e) {
    text = "{\"error\": " + quoted(e.what()) + "}";
  }
  return text.c_str();
}

untorch_status untorch_program_memory(untorch_program* program, const char** json) {
  return guarded([&] {
    thread_local std::string text;
    const untorch::Manifest& manifest = program->program->manifest();
    std::uint64_t weights = 0;
    for (const untorch::WeightSpec& weight : manifest.weights) weights += weight.nbytes;
    int device = -1;
    for (const auto& method : program->program->methods()) device = std::max(device, method->device().index);
    text = "{\"mapped\": " + std::to_string(program->program->archive().file()->bytes().size()) +
           ", \"weights\": " + std::to_string(weights);
    if (device >= 0) {
      const untorch::cuda::MemoryUse use = untorch::cuda::memory_use(device);
      std::size_t free_bytes = 0, total = 0;
      const untorch::cuda::DeviceGuard guard(device);
      untorch::cuda::check_driver(untorch::cuda::driver().mem_info(&free_bytes, &total), "asking for the free memory");
      text += ", \"device\": \"cuda:" + std::to_string(device) + "\", \"tensors\": " + std::to_string(use.in_use) +
              ", \"reserved\": " + std::to_string(use.reserved) + ", \"free\": " + std::to_string(free_bytes) +
              ", \"total\": " + std::to_string(total);
    }
    text += "}";
    *json = text.c_str();
  });
}

untorch_status untorch_cuda_release_memory(int32_t device_index) {
  return guarded([&] { untorch::cuda::release_unused(device_index); });
}

untorch_status untorch_graph_capture(untorch_method* method, const untorch_view* inputs, size_t num_inputs,
                                     untorch_graph** out) {
  return guarded([&] {
    check(out != nullptr, "untorch_graph_capture: out is null");
    std::vector<untorch::TensorView> views;
    for (std::size_t i = 0; i < num_inputs; ++i) views.push_back(to_view(inputs[i]));
    *out = new untorch_graph{{*method->method, views}};
  });
}

untorch_status untorch_graph_run(untorch_graph* graph, const untorch_view* inputs, size_t num_inputs,
                                 untorch_tensor** outputs, int32_t* aliases, size_t num_outputs) {
  return guarded([&] {
    with_tensors(inputs, num_inputs, outputs, num_outputs,
                 [&](auto views, auto results) { graph->graph.run(views, results, {aliases, num_outputs}); });
  });
}

void untorch_graph_free(untorch_graph* graph) { delete graph; }

void untorch_tensor_view(const untorch_tensor* tensor, untorch_view* out) {
  const untorch::Tensor& t = *unwrap(tensor);
  *out = {t.defined() ? t.raw() : nullptr,
          static_cast<int32_t>(t.dtype()),
          static_cast<int32_t>(t.device().type),
          t.device().index,
          static_cast<int32_t>(t.dim()),
          t.sizes().data(),
          t.strides().data(),
          t.defined() && t.storage()->read_only() ? 1 : 0};
}

int32_t untorch_tensor_is_writable(const untorch_tensor* tensor) {
  const untorch::Tensor& t = *unwrap(tensor);
  return t.defined() && !t.storage()->read_only() ? 1 : 0;
}

untorch_status untorch_tensor_assign(untorch_tensor* tensor, const untorch_view* value) {
  return guarded([&] {
    const untorch::TensorView view = to_view(*value);
    check(untorch::is_known(view.dtype), "unknown dtype code ", value->dtype);
    const auto extent = static_cast<std::size_t>(untorch::storage_extent(view.sizes, view.strides));
    const untorch::Tensor source(untorch::StorageRef::borrow(view.data, extent * untorch::element_size(view.dtype)), 0,
                                 view.dtype, view.sizes, view.strides);
    // Generated code relies on the strides that PyTorch gives a result, so those of `value` are kept.
    untorch::TensorPtr copy = untorch::Tensor::empty_strided(view.sizes, view.strides, view.dtype);
    untorch::copy_cpu(*copy, source);
    *unwrap(tensor) = *copy;
  });
}

void untorch_tensor_free(untorch_tensor* tensor) { delete unwrap(tensor); }
int64_t untorch_live_tensors(void) { return untorch::Tensor::live(); }

const char* untorch_cpu_features(void) {
  static const std::string features = [] {
    std::string text;
    for (const std::string& name : untorch::cpu_features()) text += (text.empty() ? "" : " ") + name;
    return text;
  }();
  return features.c_str();
}

const char* untorch_cpu_architecture(void) { return untorch::cpu_architecture(); }

const char* untorch_cpu_level(void) { return untorch::kernels::isa_name(untorch::kernels::cpu_isa()); }

int32_t untorch_has_symbol(const char* name) { return untorch::exports_symbol(name) ? 1 : 0; }

untorch_status untorch_add_library_path(const char* folder) {
  return guarded([&] {
    check(folder != nullptr && folder[0] == '/', "untorch_add_library_path: folder must be an absolute path");
    untorch::cuda::add_search_path(folder);
  });
}

void untorch_allow_tf32(int32_t allowed) { untorch::cuda::allow_tf32(allowed != 0); }

const char* untorch_gpu_libraries(void) {
  thread_local std::string text;
  try {
    text.clear();
    for (const auto& library : untorch::cuda::opened_libraries()) {
      text += library.title + "\t" + library.name + "\t" + library.path + "\t" + library.found + "\n";
    }
  } catch (const std::bad_alloc&) {
    return "";
  }
  return text.c_str();
}

untorch_status untorch_event_record(int32_t device_index, void* stream, untorch_event** out) {
  return guarded([&] {
    check(out != nullptr, "untorch_event_record: out is null");
    const untorch::cuda::DeviceGuard guard(device_index);
    const untorch::cuda::Driver& api = untorch::cuda::driver();
    auto point = std::make_unique<untorch_event>();
    untorch::cuda::check_driver(api.event_create(&point->event, untorch::cuda::kEventDisableTiming),
                                "creating an event");
    if (const auto code = api.event_record(point->event, static_cast<untorch::cuda::Stream>(stream)); code != 0) {
      (void)api.event_destroy(point->event);
      untorch::cuda::check_driver(code, "recording an event");
    }
    *out = point.release();
  });
}

int32_t untorch_event_done(const untorch_event* event) {
  return untorch::cuda::driver().event_query(event->event) != untorch::cuda::kErrorNotReady ? 1 : 0;
}

void untorch_event_free(untorch_event* event) {
  if (event == nullptr) return;
  (void)untorch::cuda::driver().event_destroy(event->event);
  delete event;
}

untorch_status untorch_pointer_device(const void* address, int32_t* device_type, int32_t* device_index) {
  return guarded([&] {
    constexpr int kMemoryType = 2, kIsManaged = 8, kDeviceOrdinal = 9;
    constexpr unsigned kDeviceMemory = 2;
    const untorch::cuda::Driver& api = untorch::cuda::driver();
    const auto pointer = reinterpret_cast<untorch::cuda::DevicePtr>(address);
    unsigned type = 0, managed = 0;
    int device = -1;
    *device_type = 0;
    *device_index = -1;
    // Memory that CUDA does not know is the CPU's.
    if (api.pointer_attribute(&type, kMemoryType, pointer) != untorch::cuda::kSuccess) return;
    (void)api.pointer_attribute(&managed, kIsManaged, pointer);
    if (type != kDeviceMemory && managed == 0) return;
    untorch::cuda::check_driver(api.pointer_attribute(&device, kDeviceOrdinal, pointer), "asking whose memory it is");
    *device_type = 1;
    *device_index = device;
  });
}

untorch_status untorch_tensor_to_device(const untorch_view* source, int32_t device_index, untorch_tensor** out) {
  return guarded([&] {
    check(source != nullptr && out != nullptr, "untorch_tensor_to_device: an argument is null");
    check(source->device_type == 0, "untorch_tensor_to_device: the source is not on the CPU");
    const untorch::TensorView view = to_view(*source);
    check(untorch::is_known(view.dtype), "unknown dtype code ", source->dtype);
    const auto extent = static_cast<std::size_t>(untorch::storage_extent(view.sizes, view.strides));
    const untorch::Tensor from(untorch::StorageRef::borrow(view.data, extent * untorch::element_size(view.dtype)), 0,
                               view.dtype, view.sizes, view.strides);
    const untorch::cuda::DeviceGuard guard(device_index);
    *out = wrap(untorch::cuda::to_device(from, device_index).release());
  });
}

untorch_status untorch_tensor_copy(const untorch_view* destination, const untorch_tensor* source) {
  return guarded([&] {
    check(destination != nullptr && source != nullptr, "untorch_tensor_copy: an argument is null");
    const untorch::TensorView view = to_view(*destination);
    const untorch::Tensor& from = *unwrap(source);
    check(from.defined(), "untorch_tensor_copy: the source is undefined");
    check(destination->read_only == 0, "untorch_tensor_copy: the destination is read-only");
    check(view.dtype == from.dtype(), "untorch_tensor_copy: the destination is ", untorch::dtype_name(view.dtype),
          ", the source ", untorch::dtype_name(from.dtype()));
    check(std::equal(view.sizes.begin(), view.sizes.end(), from.sizes().begin(), from.sizes().end()),
          "untorch_tensor_copy: the destination's shape is not the source's");
    const auto extent = static_cast<std::size_t>(untorch::storage_extent(view.sizes, view.strides));
    const untorch::Tensor to(
        untorch::StorageRef::borrow(view.data, extent * untorch::element_size(view.dtype), view.device), 0, view.dtype,
        view.sizes, view.strides);
    untorch::copy(to, from);
  });
}

}  // extern "C"
