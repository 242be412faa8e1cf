// untorch.h, the part for CUDA: streams, events, transfers, graphs, and what is known of devices and their memory.
#include "cuda/blas.h"
#include "cuda/device.h"
#include "cuda/device_error.h"
#include "cuda/kernel_registry.h"
#include "cuda/library_search.h"
#include "cuda/memory_pool.h"
#include "cuda/stream.h"
#include "cuda/tf32.h"
#include "cuda/transfer.h"
#include "model/capi.h"
#include "model/capi_handles.h"
#include "model/cuda_graph.h"
#include "model/dequantized_weights.h"
#include "tensor/device.h"
#include "tensor/host_memory.h"

using untorch::check;
using namespace untorch::capi;

struct untorch_graph {
  untorch::CudaGraph graph;
};
struct untorch_event {
  untorch::cuda::Event event = nullptr;
  std::int32_t device = 0;
};

namespace {

// Bytes from which an array that the caller makes is memory of its own: the pool's size classes would waste an eighth.
constexpr std::int64_t kUnpooled = std::int64_t{64} << 20;

// Events that are free to be recorded again: making one costs more than a launch. An event belongs to its device.
class EventPool {
 public:
  untorch::cuda::Event take(std::int32_t device) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<untorch::cuda::Event>& idle = of(device);
      if (!idle.empty()) {
        const untorch::cuda::Event event = idle.back();
        idle.pop_back();
        return event;
      }
    }
    untorch::cuda::Event event = nullptr;
    untorch::cuda::check_driver(untorch::cuda::driver().event_create(&event, untorch::cuda::kEventDisableTiming),
                                "creating an event");
    return event;
  }
  void give_back(std::int32_t device, untorch::cuda::Event event) noexcept {
    constexpr std::size_t kMost = 256;
    try {
      const std::lock_guard lock(mutex_);
      std::vector<untorch::cuda::Event>& idle = of(device);
      if (idle.size() < kMost) {
        idle.push_back(event);
        return;
      }
    } catch (const std::bad_alloc&) {  // then it goes
    }
    (void)untorch::cuda::driver().event_destroy(event);
  }

 private:
  std::vector<untorch::cuda::Event>& of(std::int32_t device) {
    const auto index = static_cast<std::size_t>(device);
    if (index >= idle_.size()) idle_.resize(index + 1);
    return idle_[index];
  }
  std::mutex mutex_;
  std::vector<std::vector<untorch::cuda::Event>> idle_;
};
EventPool& event_pool() {
  static auto& made = *new EventPool;  // events may be freed while the process ends
  return made;
}

untorch_event* record_event(std::int32_t device, untorch::cuda::Stream stream) {
  const untorch::cuda::DeviceGuard guard(device);
  const untorch::cuda::RelaxedCapture relaxed;
  auto point = std::make_unique<untorch_event>();
  point->device = device;
  point->event = event_pool().take(device);
  if (const auto code = untorch::cuda::driver().event_record(point->event, stream); code != 0) {
    (void)untorch::cuda::driver().event_destroy(point->event);
    untorch::cuda::check_driver(code, "recording an event");
  }
  return point.release();
}

// A JSON string.
std::string json_string(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace

extern "C" {

untorch_status untorch_call_stream(int32_t device_index, void** stream) {
  return guarded([&] { *stream = untorch::cuda::call_stream(device_index); });
}

int32_t untorch_stream_is_capturing(int32_t device_index, void* stream) {
  try {
    const untorch::cuda::DeviceGuard guard(device_index);
    return untorch::cuda::is_capturing(static_cast<untorch::cuda::Stream>(stream)) ? 1 : 0;
  } catch (const std::exception&) {
    return 0;
  }
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

untorch_status untorch_tensor_to_host_async(const untorch_tensor* tensor, untorch_tensor** out, untorch_event** event) {
  return guarded([&] {
    const untorch::Tensor& t = *unwrap(tensor);
    check(t.defined(), "untorch_tensor_to_host_async: the tensor is undefined");
    if (t.device().type != untorch::DeviceType::kCUDA) {
      *out = wrap(std::make_unique<untorch::Tensor>(t).release());
      *event = nullptr;
      return;
    }
    untorch::TensorPtr copy = untorch::cuda::to_host_async(t);
    *event = record_event(t.device().index, untorch::cuda::current_stream(t.device().index));
    *out = wrap(copy.release());
  });
}

const char* untorch_cuda_devices(void) {
  thread_local std::string text;
  std::string reason;
  try {
    if (untorch::cuda::try_driver(&reason) == nullptr) {
      text = "{\"error\": " + json_string(reason) + "}";
      return text.c_str();
    }
    std::string list;
    for (int i = 0; i < untorch::cuda::device_count(); ++i) {
      const untorch::cuda::DeviceProperties& p = untorch::cuda::device_properties(i);
      list += std::string(i == 0 ? "" : ", ") + "{\"index\": " + std::to_string(i) +
              ", \"name\": " + json_string(p.name) + ", \"architecture\": " + json_string(p.architecture()) +
              ", \"multiprocessors\": " + std::to_string(p.num_sms) +
              ", \"total_memory\": " + std::to_string(p.total_memory) +
              ", \"l2_bytes\": " + std::to_string(p.l2_bytes) + "}";
    }
    int version = 0;
    (void)untorch::cuda::driver().driver_version(&version);
    text = "{\"driver\": " + std::to_string(version) +
           ", \"kernels\": " + (untorch::cuda::has_kernels() ? "true" : "false") + ", \"devices\": [" + list + "]}";
  } catch (const std::exception& e) {
    text = "{\"error\": " + json_string(e.what()) + "}";
  }
  return text.c_str();
}

untorch_status untorch_program_memory(untorch_program* program, const char** json) {
  return guarded([&] {
    thread_local std::string text;
    const untorch::Manifest& manifest = program->program->manifest();
    std::uint64_t weights = 0;
    for (const untorch::WeightSpec& weight : manifest.weights) weights += weight.nbytes;
    std::uint64_t mapped = program->program->archive().file()->bytes().size();
    for (const untorch::ExternalFile& external : manifest.external_files) mapped += external.file->bytes().size();
    int device = -1;
    for (const auto& method : program->program->methods()) device = std::max(device, method->device().index);
    text = "{\"mapped\": " + std::to_string(mapped) + ", \"weights\": " + std::to_string(weights) +
           ", \"state\": " + std::to_string(program->program->buffers().nbytes());
    if (device >= 0) {
      const untorch::cuda::MemoryUse use = untorch::cuda::memory_use(device);
      std::size_t free_bytes = 0, total = 0;
      const untorch::cuda::DeviceGuard guard(device);
      untorch::cuda::check_driver(untorch::cuda::driver().mem_info(&free_bytes, &total), "asking for the free memory");
      const std::uint64_t dequantized = untorch::dequantized_bytes(program->program->archive(), device);
      text += ", \"device\": \"cuda:" + std::to_string(device) + "\", \"dequantized\": " + std::to_string(dequantized) +
              ", \"tensors\": " + std::to_string(use.in_use) + ", \"reserved\": " + std::to_string(use.reserved) +
              ", \"free\": " + std::to_string(free_bytes) + ", \"total\": " + std::to_string(total);
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
    *out = new untorch_graph{{*method->method, {inputs, num_inputs}}};
  });
}

untorch_status untorch_graph_capture_shared(untorch_method* method, const untorch_view* inputs, size_t num_inputs,
                                            untorch_graph* shares, untorch_graph** out) {
  return guarded([&] {
    check(out != nullptr, "untorch_graph_capture_shared: out is null");
    check(shares != nullptr, "untorch_graph_capture_shared: shares is null");
    *out = new untorch_graph{{*method->method, {inputs, num_inputs}, &shares->graph}};
  });
}

untorch_status untorch_graph_run(untorch_graph* graph, const untorch_view* inputs, size_t num_inputs,
                                 untorch_tensor** outputs, int32_t* aliases, size_t num_outputs) {
  return guarded([&] {
    with_outputs(outputs, num_outputs, [&](std::span<untorch::TensorPtr> results) {
      graph->graph.run({inputs, num_inputs}, results, {aliases, num_outputs});
    });
  });
}

untorch_status untorch_method_graphs(untorch_method* method, size_t* count, const char** refusal) {
  return guarded([&] {
    check(count != nullptr && refusal != nullptr, "untorch_method_graphs: count or refusal is null");
    thread_local std::string text;
    untorch::GraphCache::Report report = method->method->graphs();
    text = std::move(report.refusal);
    *count = report.graphs;
    *refusal = text.c_str();
  });
}

int32_t untorch_graph_writes(const untorch_graph* graph, size_t input) { return graph->graph.writes(input) ? 1 : 0; }

void untorch_graph_free(untorch_graph* graph) { delete graph; }

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

untorch_status untorch_device_enter(int32_t device_index, void** before) {
  return guarded([&] {
    check(before != nullptr, "untorch_device_enter: before is null");
    untorch::cuda::Context current = nullptr;
    untorch::cuda::check_driver(untorch::cuda::driver().context_current(&current), "asking for the current context");
    *before = current;
    untorch::cuda::set_device(device_index);
  });
}

void untorch_device_leave(void* before) {
  // A thread that had no context keeps the device's: it is what the thread would make next.
  if (before != nullptr) {
    (void)untorch::cuda::driver().context_set_current(static_cast<untorch::cuda::Context>(before));
  }
}

untorch_status untorch_event_record(int32_t device_index, void* stream, untorch_event** out) {
  return guarded([&] {
    check(out != nullptr, "untorch_event_record: out is null");
    *out = record_event(device_index, static_cast<untorch::cuda::Stream>(stream));
  });
}

untorch_status untorch_event_synchronize(const untorch_event* event) {
  return guarded([&] {
    const untorch::cuda::DeviceGuard guard(event->device);
    untorch::cuda::check_driver(untorch::cuda::driver().event_synchronize(event->event), "waiting for an event");
    untorch::cuda::DeviceErrors::check(event->device);
  });
}

int32_t untorch_event_done(const untorch_event* event) {
  // While another thread captures a stream in CUDA's strict mode, a question would end the capture.
  const untorch::cuda::RelaxedCapture relaxed;
  return untorch::cuda::driver().event_query(event->event) != untorch::cuda::kErrorNotReady ? 1 : 0;
}

void untorch_event_free(untorch_event* event) {
  if (event == nullptr) return;
  event_pool().give_back(event->device, event->event);
  delete event;
}

untorch_status untorch_pointer_device(const void* address, int32_t* device_type, int32_t* device_index) {
  return guarded([&] {
    constexpr int kIsManaged = 8, kDeviceOrdinal = 9;
    constexpr unsigned kDeviceMemory = 2;
    const untorch::cuda::Driver& api = untorch::cuda::driver();
    const auto pointer = reinterpret_cast<untorch::cuda::DevicePtr>(address);
    unsigned type = 0, managed = 0;
    int device = -1;
    *device_type = 0;
    *device_index = -1;
    // Memory that CUDA does not know is the CPU's.
    if (api.pointer_attribute(&type, untorch::cuda::kPointerMemoryType, pointer) != untorch::cuda::kSuccess) return;
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
    const untorch::TensorPtr from = borrow_checked(*source);
    const untorch::cuda::DeviceGuard guard(device_index);
    *out = wrap(untorch::cuda::to_device(*from, device_index).release());
  });
}

untorch_status untorch_tensor_create(int32_t dtype, int32_t ndim, const int64_t* sizes, int32_t device_type,
                                     int32_t device_index, int32_t zeros, untorch_tensor** out) {
  return guarded([&] {
    check(out != nullptr && ndim >= 0 && (sizes != nullptr || ndim == 0), "untorch_tensor_create: an argument is null");
    const auto type = static_cast<untorch::DType>(dtype);
    check(untorch::is_known(type), "untorch_tensor_create: unknown dtype code ", dtype);
    check(device_type == UNTORCH_CPU || device_type == UNTORCH_CUDA, "untorch_tensor_create: unknown device type ",
          device_type);
    const untorch::DimSpan shape(sizes, static_cast<std::size_t>(ndim));
    if (device_type == UNTORCH_CPU) {
      *out = wrap((zeros != 0 ? untorch::zeros_on_demand(shape, type) : untorch::Tensor::empty(shape, type)).release());
      return;
    }
    const int count = untorch::cuda::device_count();
    const int index = device_index < 0 ? untorch::cuda::current_device() : device_index;
    check(index < count, "untorch_tensor_create: device: expected cuda:0 to cuda:", count - 1, ", got cuda:", index);
    const untorch::Device device{untorch::DeviceType::kCUDA, index};
    const untorch::cuda::DeviceGuard guard(index);
    const untorch::cuda::Stream stream = untorch::cuda::call_stream(index);
    const untorch::cuda::StreamScope scope(index, stream);
    const untorch::cuda::ArenaScope arena(index, untorch::cuda::arena_for(index, stream));
    untorch::TensorPtr made;
    const std::int64_t numel = untorch::checked_numel(shape);
    if (numel >= kUnpooled / static_cast<std::int64_t>(untorch::element_size(type))) {
      std::size_t nbytes = 0;
      check(!__builtin_mul_overflow(static_cast<std::size_t>(numel), untorch::element_size(type), &nbytes), "shape ",
            untorch::to_string(shape), " needs too much memory");
      made = std::make_unique<untorch::Tensor>(untorch::cuda::allocate_unpooled(nbytes, index), 0, type, shape,
                                               untorch::contiguous_strides(shape));
    } else {
      made = untorch::Tensor::empty(shape, type, device);
    }
    if (zeros != 0) {
      untorch::device_table(device.type).zero(made->raw(), made->storage()->nbytes(), made->device());
    }
    *out = wrap(made.release());
  });
}

untorch_status untorch_tensor_copy(const untorch_view* destination, const untorch_tensor* source) {
  return guarded([&] {
    check(destination != nullptr && source != nullptr, "untorch_tensor_copy: an argument is null");
    const untorch::Tensor& from = *unwrap(source);
    check(from.defined(), "untorch_tensor_copy: the source is undefined");
    check(destination->read_only == 0, "untorch_tensor_copy: the destination is read-only");
    const untorch::TensorPtr to = borrow_checked(*destination);
    check(to->dtype() == from.dtype(), "untorch_tensor_copy: the destination is ", untorch::dtype_name(to->dtype()),
          ", the source ", untorch::dtype_name(from.dtype()));
    check(to->sizes() == from.sizes(), "untorch_tensor_copy: the destination's shape is not the source's");
    untorch::copy(*to, from);
  });
}

}  // extern "C"
