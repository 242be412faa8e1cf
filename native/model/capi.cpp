// untorch.h over Program and Method: no exception crosses.
#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/interrupt.h"
#include "kernels/cpu/common/isa.h"
#include "model/capi.h"
#include "model/capi_handles.h"
#include "model/cpu_features.h"
#include "model/extern_nodes.h"
#include "shims/proxy_op.h"
#include "tensor/copy.h"
#include "threads/settings.h"
#include "threads/team.h"

#ifndef UNTORCH_VERSION
#define UNTORCH_VERSION "0.0.0"
#endif

using untorch::check;
using untorch::ErrorKind;
using namespace untorch::capi;

namespace {

// The header's codes are those that tensors have.
template <class Code, class Own>
constexpr bool same(Code code, Own own) {
  return static_cast<std::int32_t>(code) == static_cast<std::int32_t>(own);
}
using untorch::DeviceType;
using untorch::DType;
static_assert(same(UNTORCH_UINT8, DType::kUInt8) && same(UNTORCH_INT8, DType::kInt8) &&
              same(UNTORCH_INT16, DType::kInt16) && same(UNTORCH_INT32, DType::kInt32) &&
              same(UNTORCH_INT64, DType::kInt64) && same(UNTORCH_FLOAT16, DType::kFloat16) &&
              same(UNTORCH_FLOAT32, DType::kFloat32) && same(UNTORCH_FLOAT64, DType::kFloat64) &&
              same(UNTORCH_COMPLEX32, DType::kComplex32) && same(UNTORCH_COMPLEX64, DType::kComplex64) &&
              same(UNTORCH_COMPLEX128, DType::kComplex128) && same(UNTORCH_BOOL, DType::kBool) &&
              same(UNTORCH_BFLOAT16, DType::kBFloat16) && same(UNTORCH_FLOAT8_E5M2, DType::kFloat8E5M2) &&
              same(UNTORCH_FLOAT8_E4M3FN, DType::kFloat8E4M3FN) &&
              same(UNTORCH_FLOAT8_E5M2FNUZ, DType::kFloat8E5M2FNUZ) &&
              same(UNTORCH_FLOAT8_E4M3FNUZ, DType::kFloat8E4M3FNUZ) && same(UNTORCH_UINT16, DType::kUInt16) &&
              same(UNTORCH_UINT32, DType::kUInt32) && same(UNTORCH_UINT64, DType::kUInt64) &&
              same(UNTORCH_FLOAT8_E8M0FNU, DType::kFloat8E8M0FNU) &&
              same(UNTORCH_FLOAT4_E2M1FN_X2, DType::kFloat4E2M1FNx2));
static_assert(same(UNTORCH_CPU, DeviceType::kCPU) && same(UNTORCH_CUDA, DeviceType::kCUDA));

// The values in new memory on the same device.
untorch::TensorPtr copy_with(const untorch::Tensor& from, DType dtype, untorch::DimSpan strides) {
  untorch::TensorPtr copy = untorch::Tensor::empty_strided(from.sizes(), strides, dtype, from.device());
  untorch::copy(*copy, from);
  return copy;
}

// The caller's options in this library's struct. Fields that struct_size does not cover whole are 0; bytes that this
// library does not know have to be.
untorch_load_options read_options(const untorch_load_options& given) {
  // Where each version of the struct ends.
  constexpr std::size_t kVersions[] = {offsetof(untorch_load_options, dequantize_weights),
                                       offsetof(untorch_load_options, verify),
                                       offsetof(untorch_load_options, tf32),
                                       offsetof(untorch_load_options, spin_us),
                                       offsetof(untorch_load_options, weights),
                                       offsetof(untorch_load_options, cuda_graphs),
                                       sizeof(untorch_load_options)};
  constexpr std::size_t kFirst = kVersions[0], kKnown = sizeof(untorch_load_options), kMost = 4096;
  const std::size_t size = given.struct_size;
  check(size >= kFirst && size <= kMost, "untorch_load_options: struct_size is ", size, ", expected from ", kFirst,
        " to ", kMost, ": set it to sizeof(untorch_load_options)");
  const auto* bytes = reinterpret_cast<const unsigned char*>(&given);
  for (std::size_t i = kKnown; i < size; ++i) {
    if (bytes[i] == 0) continue;
    untorch::throw_error(ErrorKind::kUnsupported, "untorch_load_options: byte ", i, " of ", size,
                         " is set, and this library (" UNTORCH_VERSION ") knows the first ", kKnown,
                         ": leave newer options at 0, or link with the library of the header's version");
  }
  std::size_t covered = kFirst;
  for (const std::size_t end : kVersions) covered = end <= size ? end : covered;
  untorch_load_options options{};
  std::memcpy(&options, &given, covered);
  return options;
}

bool read_flag(const char* name, std::int32_t value) {
  check(value == 0 || value == 1, "untorch_load_options: ", name, " must be 0 or 1, got ", value);
  return value == 1;
}

struct Options {
  untorch::LoadOptions load;
  bool copy = false;
};

Options options_of(const untorch_load_options* given) {
  Options options;
  if (given == nullptr) return options;
  const untorch_load_options known = read_options(*given);
  if (known.device != nullptr) options.load.device = known.device;
  options.load.num_runners = known.num_runners;
  options.load.num_threads = known.num_threads;
  options.load.dequantize_weights = read_flag("dequantize_weights", known.dequantize_weights);
  options.load.verify = read_flag("verify", known.verify);
  options.copy = read_flag("copy", known.copy);
  options.load.copy = options.copy;
  if (known.weights != nullptr) options.load.weights = known.weights;
  options.load.cuda_graphs = known.cuda_graphs;
  check(known.tf32 >= UNTORCH_TF32_AS_EXPORTED && known.tf32 <= UNTORCH_TF32_ALWAYS,
        "untorch_load_options: tf32 must be an untorch_tf32, got ", known.tf32);
  check(known.spin_us >= -1 && known.spin_us <= untorch::threads::kMaxSpinMicroseconds,
        "untorch_load_options: spin_us must be from -1 to ", untorch::threads::kMaxSpinMicroseconds, ", got ",
        known.spin_us);
  if (known.spin_us != 0) options.load.spin_us = std::max(known.spin_us, 0);
  if (known.tf32 != UNTORCH_TF32_AS_EXPORTED) options.load.tf32 = known.tf32 == UNTORCH_TF32_ALWAYS;
  return options;
}

untorch_program* open_program(std::shared_ptr<const untorch::Archive> archive, untorch::Manifest manifest,
                              const untorch::LoadOptions& options) {
  auto handle = std::make_unique<untorch_program>();
  handle->program = std::make_unique<untorch::Program>(std::move(archive), std::move(manifest), options);
  for (const auto& method : handle->program->methods()) {
    handle->methods.push_back(std::make_unique<untorch_method>(method.get()));
  }
  return handle.release();
}

untorch_program* open_program(std::shared_ptr<const untorch::MappedFile> file, const untorch::LoadOptions& options) {
  auto archive = std::make_shared<untorch::Archive>(std::move(file));
  untorch::Manifest manifest = untorch::read_manifest(*archive);
  return open_program(std::move(archive), std::move(manifest), options);
}

}  // namespace

extern "C" {

const char* untorch_version(void) { return UNTORCH_VERSION; }
const char* untorch_last_error(void) { return untorch::last_error().c_str(); }

int32_t untorch_last_system_error(void) { return untorch::last_system_error(); }

untorch_status untorch_program_open(const char* path, const untorch_load_options* options, untorch_program** out) {
  return guarded([&] {
    check(path != nullptr && out != nullptr, "untorch_program_open: path and out must not be null");
    const Options known = options_of(options);
    *out = open_program(untorch::MappedFile::open(path, known.copy), known.load);
  });
}

untorch_status untorch_program_open_memory(const void* data, size_t length, const untorch_load_options* options,
                                           untorch_program** out) {
  return guarded([&] {
    check(data != nullptr && out != nullptr, "untorch_program_open_memory: data and out must not be null");
    const Options known = options_of(options);
    const std::span<const std::byte> bytes(static_cast<const std::byte*>(data), length);
    *out = open_program(untorch::MappedFile::of_memory(bytes, known.copy, nullptr), known.load);
  });
}

untorch_status untorch_program_open_archive(untorch_archive* archive, const untorch_load_options* options,
                                            untorch_program** out) {
  return guarded([&] {
    check(archive != nullptr && out != nullptr, "untorch_program_open_archive: archive and out must not be null");
    untorch::LoadOptions known = options_of(options).load;
    known.verify_external = archive->verify_external;
    *out = open_program(archive->archive, archive->read_manifest(), known);
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
    const untorch::Archive& archive = program->program->archive();
    // Descriptions as the loader read them, whatever happened to the file since.
    const std::string_view entry = name;
    const bool described = entry.ends_with(".json");
    const auto bytes = described ? std::as_bytes(std::span(archive.text(entry))) : archive.read(entry);
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
    std::call_once(method->has_specs, [&] {
      method->in_spec = container->in_spec();
      method->out_spec = container->out_spec();
    });
    *in_spec = method->in_spec.c_str();
    *out_spec = method->out_spec.c_str();
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

const char* untorch_native_operators(int32_t device_type) {
  thread_local std::string text;
  text.clear();
  for (const auto* op = untorch::shims::first_proxy_op(); op != nullptr; op = op->next()) {
    if (op->serves(static_cast<untorch::DeviceType>(device_type))) text.append(op->target()).append("\n");
  }
  return text.c_str();
}

untorch_status untorch_call_native_operator(const char* node, int32_t num_ints, const int64_t* ints,
                                            int32_t num_tensors, untorch_tensor** tensors) {
  return guarded([&] {
    const std::string text = std::string("{\"nodes\": [") + node + "]}";
    const auto nodes = untorch::parse_extern_nodes(text, "node");
    const std::span given(reinterpret_cast<AtenTensorHandle*>(tensors), static_cast<std::size_t>(num_tensors));
    const auto* const op = nodes.at(0).op;
    check(op != nullptr, "untorch_call_native_operator: there is no native kernel for `", nodes.at(0).target, "`");
    untorch::Device device;
    for (std::size_t i = 0; i < std::min(nodes[0].node.num_inputs, given.size()); ++i) {
      const untorch::Tensor* const t = untorch::shims::unwrap(given[i]);
      if (t != nullptr && t->defined() && t->device().type == DeviceType::kCUDA) device = t->device();
    }
    check(op->serves(device.type), "untorch_call_native_operator: `", nodes[0].target, "` has no native kernel on ",
          untorch::device_name(device));
    if (op->run(device.type, nodes[0].node, {ints, static_cast<std::size_t>(num_ints)}, given) != 0) {
      throw untorch::Error(untorch::last_error_kind(), untorch::last_error());
    }
  });
}

untorch_status untorch_use_native_operator(const char* name, int32_t device_type, int32_t use) {
  return guarded([&] {
    const auto device = static_cast<untorch::DeviceType>(device_type);
    untorch::shims::ProxyOp* const op = untorch::shims::find_proxy_op(name);
    untorch::check(op != nullptr && op->serves(device), "untorch_use_native_operator: there is no native kernel for `",
                   name, "` on ", device_type == UNTORCH_CPU ? "the CPU" : "CUDA",
                   ": untorch_native_operators lists them");
    op->enable(device, use != 0);
  });
}

void untorch_set_error(untorch_status status, const char* message) {
  untorch::set_last_error(static_cast<ErrorKind>(status), message != nullptr ? message : "");
}

untorch_status untorch_method_run(untorch_method* method, const untorch_view* inputs, size_t num_inputs,
                                  untorch_tensor** outputs, int32_t* aliases, size_t num_outputs) {
  return guarded([&] {
    with_outputs(outputs, num_outputs, [&](std::span<untorch::TensorPtr> results) {
      method->method->run({inputs, num_inputs}, results, {aliases, num_outputs});
    });
  });
}

untorch_status untorch_method_device(untorch_method* method, int32_t* device_type, int32_t* device_index) {
  return guarded([&] {
    const untorch::Device device = method->method->device();
    *device_type = static_cast<int32_t>(device.type);
    *device_index = device.index;
  });
}

const char* untorch_method_gpu_architecture(const untorch_method* method) {
  return method->method->gpu_architecture().c_str();
}

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
    const untorch::TensorPtr source = borrow_checked(*value);
    // Generated code relies on the strides that PyTorch gives a result, so those of `value` are kept.
    *unwrap(tensor) = *copy_with(*source, source->dtype(), source->strides());
  });
}

untorch_status untorch_tensor_share(const untorch_tensor* tensor, untorch_tensor** out) {
  return guarded([&] { *out = wrap(new untorch::Tensor(*unwrap(tensor))); });
}

int64_t untorch_tensor_use_count(const untorch_tensor* tensor) {
  const untorch::Tensor& t = *unwrap(tensor);
  return !t.defined() || t.storage()->borrowed() ? 0 : t.storage()->use_count();
}

untorch_status untorch_tensor_copy_of(const untorch_tensor* tensor, untorch_tensor* out) {
  return guarded([&] {
    const untorch::Tensor& from = *unwrap(tensor);
    *unwrap(out) = *copy_with(from, from.dtype(), from.strides());
  });
}

untorch_status untorch_tensor_convert(const untorch_tensor* tensor, int32_t dtype, const int64_t* strides,
                                      untorch_tensor* out) {
  return guarded([&] {
    const untorch::Tensor& from = *unwrap(tensor);
    const untorch::Dims kept = from.strides();
    *unwrap(out) = *copy_with(from, static_cast<untorch::DType>(dtype),
                              strides == nullptr ? untorch::DimSpan(kept.data(), kept.size())
                                                 : untorch::DimSpan(strides, from.sizes().size()));
  });
}

untorch_status untorch_tensor_copy_row(untorch_tensor* tensor, int64_t source, int64_t target) {
  return guarded([&] {
    const untorch::Tensor& t = *unwrap(tensor);
    check(t.defined() && t.dim() > 0, "untorch_tensor_copy_row: expected a tensor of one dimension or more");
    for (const int64_t row : {source, target}) {
      check(row >= 0 && row < t.size(0), "untorch_tensor_copy_row: expected rows from 0 to ", t.size(0) - 1, ", got ",
            row);
    }
    if (source == target) return;
    const untorch::DimSpan sizes(t.sizes().data() + 1, t.sizes().size() - 1);
    const untorch::DimSpan strides(t.strides().data() + 1, t.strides().size() - 1);
    const auto row = [&](int64_t i) { return t.view(sizes, strides, t.storage_offset() + i * t.stride(0)); };
    untorch::copy(*row(target), *row(source));
  });
}

untorch_tensor* untorch_tensor_new(void) { return wrap(new (std::nothrow) untorch::Tensor()); }

untorch_status untorch_method_source(untorch_method* method, const char** text, size_t* length) {
  return guarded([&] {
    const std::string_view source = method->method->source();
    *text = source.empty() ? nullptr : source.data();
    *length = source.size();
  });
}

void untorch_set_interrupt_check(int (*check)(void)) { untorch::set_interrupt_check(check); }

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

const char* untorch_cpu_extensions(void) {
  static const std::string extensions = [] {
    std::string text = untorch::kernels::cpu_has_vnni() ? "vnni" : "";
    if (untorch::kernels::cpu_has_fast_bf16()) text += text.empty() ? "bf16" : " bf16";
    if (untorch::kernels::cpu_has_amx()) text += " amx";  // which is not there without VNNI
    return text;
  }();
  return extensions.c_str();
}

int32_t untorch_has_symbol(const char* name) { return untorch::exports_symbol(name) ? 1 : 0; }

const char* untorch_take_warning() {
  if (!untorch::threads::take_creation_failure()) [[likely]]
    return nullptr;
  return "the system refused to start a thread (see the limits on processes and memory): parallel loops run on fewer "
         "threads than asked for";
}

}  // extern "C"
