// The part of PyTorch's stable C interface that is no operator: lists, strings, values, generators, threads, tags,
// and the operator registry, which untorch does not have (torch/csrc/stable/c/shim.h, aoti_torch/c/shim.h).
#include <omp.h>

#include <exception>
#include <mutex>
#include <variant>
#include <vector>

#include "shims/generator.h"
#include "shims/shim.h"

using namespace untorch;
using namespace untorch::shims;

using StableIValue = std::uint64_t;
using StableList = std::vector<StableIValue>;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
struct StringOpaque;
using StringHandle = StringOpaque*;
struct C10IValueOpaque;
using C10IValueHandle = C10IValueOpaque*;
struct IValueMapOpaque;
using IValueMapHandle = IValueMapOpaque*;
struct AtenRecordFunctionOpaque;
using AtenRecordFunctionHandle = AtenRecordFunctionOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;

namespace {

// What the profiler's arguments become; nothing reads them back.
using IValue = std::variant<std::int64_t, std::string, std::vector<std::string>, Tensor>;

template <class Opaque, class T>
void give_object(Opaque** slot, T&& object, const char* op) {
  check(slot != nullptr, op, ": output pointer is null");
  *slot = reinterpret_cast<Opaque*>(new std::decay_t<T>(std::forward<T>(object)));
}

StableList& list_of(StableListHandle handle, const char* op) {
  check(handle != nullptr, op, ": the list is null");
  return *reinterpret_cast<StableList*>(handle);
}

const std::string& string_of(StringHandle handle, const char* op) {
  check(handle != nullptr, op, ": the string is null");
  return *reinterpret_cast<std::string*>(handle);
}

std::size_t checked_index(const StableList& list, std::size_t index, const char* op) {
  check(index < list.size(), op, ": index ", index, " is out of range for a list of ", list.size());
  return index;
}

[[noreturn]] void refuse_registry(const char* op, const char* what) {
  throw_error(ErrorKind::kUnsupported, op, ": '", what == nullptr ? "?" : what,
              "' would be registered with torch.library; untorch has no operator registry: register a kernel with "
              "untorch.register_kernel instead");
}

[[noreturn]] void refuse_dispatch(const char* name, const char* overload) {
  const bool has_overload = overload != nullptr && *overload != '\0';
  throw_error(ErrorKind::kUnsupported, "call_dispatcher: operator '", name == nullptr ? "?" : name,
              has_overload ? "." : "", has_overload ? overload : "",
              "' is called through PyTorch's dispatcher, which untorch does not have; use an operator with a C shim or "
              "register a kernel with untorch.register_kernel");
}

}  // namespace

UNTORCH_SHIM torch_new_list_reserve_size(std::size_t size, StableListHandle* ret) {
  return guarded("new_list", [&] {
    StableList list;
    list.reserve(size);
    give_object(ret, std::move(list), "new_list");
  });
}
UNTORCH_SHIM torch_list_size(StableListHandle list, std::size_t* size) {
  return guarded("list_size", [&] { *size = list_of(list, "list_size").size(); });
}
UNTORCH_SHIM torch_list_get_item(StableListHandle handle, std::size_t index, StableIValue* element) {
  return guarded("list_get_item", [&] {
    const StableList& list = list_of(handle, "list_get_item");
    *element = list[checked_index(list, index, "list_get_item")];
  });
}
UNTORCH_SHIM torch_list_set_item(StableListHandle handle, std::size_t index, StableIValue element) {
  return guarded("list_set_item", [&] {
    StableList& list = list_of(handle, "list_set_item");
    list[checked_index(list, index, "list_set_item")] = element;
  });
}
UNTORCH_SHIM torch_list_push_back(StableListHandle list, StableIValue element) {
  return guarded("list_push_back", [&] { list_of(list, "list_push_back").push_back(element); });
}
UNTORCH_SHIM torch_delete_list(StableListHandle list) {
  delete reinterpret_cast<StableList*>(list);
  return 0;
}

UNTORCH_SHIM torch_new_string_handle(const char* data, std::size_t length, StringHandle* handle) {
  return guarded("new_string", [&] {
    check(data != nullptr || length == 0, "new_string: 'data' is null");
    give_object(handle, length == 0 ? std::string() : std::string(data, length), "new_string");
  });
}
UNTORCH_SHIM torch_delete_string(StringHandle handle) {
  delete reinterpret_cast<std::string*>(handle);
  return 0;
}
UNTORCH_SHIM torch_string_length(StringHandle handle, std::size_t* length) {
  return guarded("string_length", [&] { *length = string_of(handle, "string_length").size(); });
}
UNTORCH_SHIM torch_string_c_str(StringHandle handle, const char** data) {
  return guarded("string_c_str", [&] { *data = string_of(handle, "string_c_str").c_str(); });
}

// Extensions built against 2.12 and older free the value with their own delete, so it comes from operator new.
UNTORCH_SHIM torch_new_stable_ivalue(StableIValue** ret) {
  return guarded("new_stable_ivalue", [&] { *ret = new StableIValue(0); });
}
UNTORCH_SHIM torch_delete_stable_ivalue(StableIValue* value) {
  delete value;
  return 0;
}

// A null generator stands for the default one.
UNTORCH_SHIM torch_new_generator_handle(AtenGeneratorHandle self, AtenGeneratorHandle* ret) {
  return guarded("new_generator_handle", [&] {
    check(ret != nullptr, "new_generator_handle: output pointer is null");
    auto keep = [](kernels::Generator*) {};  // the process owns its default generator
    *ret =
        wrap(self == nullptr ? new GeneratorRef(&kernels::default_generator(), keep) : new GeneratorRef(*unwrap(self)));
  });
}
UNTORCH_SHIM torch_delete_generator(AtenGeneratorHandle generator) {
  delete unwrap(generator);
  return 0;
}
UNTORCH_SHIM torch_generator_get_device(AtenGeneratorHandle generator, std::int32_t* type, std::int32_t* index) {
  return guarded("generator_get_device", [&] {
    check(generator != nullptr, "generator_get_device: the generator is null");
    *type = static_cast<std::int32_t>(DeviceType::kCPU);
    *index = -1;
  });
}

UNTORCH_SHIM torch_parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain_size,
                                void (*func)(std::int64_t begin, std::int64_t end, void* context), void* context) {
  return guarded("parallel_for", [&] {
    check(func != nullptr, "parallel_for: the function is null");
    check(grain_size >= 0, "parallel_for: 'grain_size' is ", grain_size, ", expected 0 or more");
    const std::int64_t total = end - begin;
    if (total <= 0) return;
    const std::int64_t grain = grain_size == 0 ? 1 : grain_size;
    const std::int64_t wanted = std::min<std::int64_t>(omp_get_max_threads(), (total + grain - 1) / grain);
    if (wanted <= 1 || omp_in_parallel() != 0) {
      func(begin, end, context);
      return;
    }
    std::exception_ptr failure;
    std::mutex mutex;
#pragma omp parallel num_threads(static_cast<int>(wanted))
    {
      const std::int64_t threads = omp_get_num_threads(), chunk = (total + threads - 1) / threads;
      const std::int64_t first = begin + omp_get_thread_num() * chunk, last = std::min(end, first + chunk);
      try {
        if (first < last) func(first, last, context);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  });
}
UNTORCH_SHIM torch_get_thread_idx(std::uint32_t* out) {
  return guarded("get_thread_idx", [&] { *out = static_cast<std::uint32_t>(omp_get_thread_num()); });
}
UNTORCH_SHIM torch_get_num_threads(std::uint32_t* out) {
  return guarded("get_num_threads", [&] { *out = static_cast<std::uint32_t>(omp_get_max_threads()); });
}

// The ordinals of torch.Tag: its names in alphabetical order.
#define UNTORCH_TAG(name, ordinal) \
  extern "C" UNTORCH_EXPORT std::int32_t torch_tag_##name() { return ordinal; }
UNTORCH_TAG(core, 0)
UNTORCH_TAG(cudagraph_unsafe, 1)
UNTORCH_TAG(data_dependent_output, 2)
UNTORCH_TAG(dynamic_output_shape, 3)
UNTORCH_TAG(flexible_layout, 4)
UNTORCH_TAG(generated, 5)
UNTORCH_TAG(inplace_view, 7)
UNTORCH_TAG(maybe_aliasing_or_mutating, 8)
UNTORCH_TAG(needs_contiguous_strides, 9)
UNTORCH_TAG(needs_exact_strides, 10)
UNTORCH_TAG(needs_fixed_stride_order, 11)
UNTORCH_TAG(nondeterministic_bitwise, 12)
UNTORCH_TAG(nondeterministic_seeded, 13)
UNTORCH_TAG(out_variant, 15)
UNTORCH_TAG(pointwise, 16)
UNTORCH_TAG(pt2_compliant_tag, 17)
UNTORCH_TAG(reduction, 18)
UNTORCH_TAG(view_copy, 19)

UNTORCH_SHIM aoti_torch_int64_to_ivalue(std::int64_t value, C10IValueHandle* ivalue) {
  return guarded("int64_to_ivalue", [&] { give_object(ivalue, IValue(value), "int64_to_ivalue"); });
}
UNTORCH_SHIM aoti_torch_str_to_ivalue(const char* value, C10IValueHandle* ivalue) {
  return guarded("str_to_ivalue", [&] {
    check(value != nullptr, "str_to_ivalue: the string is null");
    give_object(ivalue, IValue(std::string(value)), "str_to_ivalue");
  });
}
UNTORCH_SHIM aoti_torch_strlist_to_ivalue(const char** value, std::int64_t length, C10IValueHandle* ivalue) {
  return guarded("strlist_to_ivalue", [&] {
    std::vector<std::string> strings;
    for (std::int64_t i = 0; i < length; ++i) {
      check(value[i] != nullptr, "strlist_to_ivalue: string ", i, " is null");
      strings.emplace_back(value[i]);
    }
    give_object(ivalue, IValue(std::move(strings)), "strlist_to_ivalue");
  });
}
UNTORCH_SHIM aoti_torch_tensor_to_ivalue(AtenTensorHandle value, C10IValueHandle* ivalue) {
  return guarded("tensor_to_ivalue",
                 [&] { give_object(ivalue, IValue(required(value, "tensor_to_ivalue", "val")), "tensor_to_ivalue"); });
}
UNTORCH_SHIM aoti_torch_delete_c10_value_object(C10IValueHandle handle) {
  delete reinterpret_cast<IValue*>(handle);
  return 0;
}

// Marks of packages that were compiled for PyTorch's profiler (cpp.enable_kernel_profile): ranges of ours. The guard is
// the ticket plus one, null while nothing is recorded.
UNTORCH_SHIM aoti_record_function_start(const char* name, IValueMapHandle, const C10IValueHandle*, const std::uint64_t,
                                        AtenRecordFunctionHandle* guard) {
  if (guard == nullptr) {
    return guarded("record_function_start", [] { check(false, "record_function_start: output pointer is null"); });
  }
  *guard = nullptr;
  if (profile::is_recording()) [[unlikely]] {
    const std::int64_t ticket = profile::begin(profile::Kind::kKernel, name, name, false, nullptr);
    *guard = reinterpret_cast<AtenRecordFunctionHandle>(ticket + 1);
  }
  return 0;
}
UNTORCH_SHIM aoti_record_function_end(AtenRecordFunctionHandle guard) {
  profile::end(reinterpret_cast<std::int64_t>(guard) - 1);
  return 0;
}

UNTORCH_SHIM aoti_torch_library_init_impl(const char* ns, const char*, const char*, std::uint32_t,
                                          TorchLibraryHandle*) {
  return guarded("library_init_impl", [&] { refuse_registry("library_init_impl", ns); });
}
UNTORCH_SHIM aoti_torch_library_init_def(const char* ns, const char*, std::uint32_t, TorchLibraryHandle*) {
  return guarded("library_init_def", [&] { refuse_registry("library_init_def", ns); });
}
UNTORCH_SHIM aoti_torch_library_init_fragment(const char* ns, const char*, std::uint32_t, TorchLibraryHandle*) {
  return guarded("library_init_fragment", [&] { refuse_registry("library_init_fragment", ns); });
}
UNTORCH_SHIM aoti_torch_library_impl(TorchLibraryHandle, const char* name,
                                     void (*)(StableIValue*, std::uint64_t, std::uint64_t)) {
  return guarded("library_impl", [&] { refuse_registry("library_impl", name); });
}
UNTORCH_SHIM torch_library_impl(TorchLibraryHandle, const char* name,
                                void (*)(StableIValue*, std::uint64_t, std::uint64_t), std::uint64_t) {
  return guarded("library_impl", [&] { refuse_registry("library_impl", name); });
}
UNTORCH_SHIM aoti_torch_library_def(TorchLibraryHandle, const char* schema) {
  return guarded("library_def", [&] { refuse_registry("library_def", schema); });
}
UNTORCH_SHIM torch_library_def_with_tags(TorchLibraryHandle, const char* schema, const std::int32_t*, std::int32_t) {
  return guarded("library_def", [&] { refuse_registry("library_def", schema); });
}
UNTORCH_SHIM torch_library_set_python_module(TorchLibraryHandle, const char* module, const char*) {
  return guarded("library_set_python_module", [&] { refuse_registry("library_set_python_module", module); });
}
UNTORCH_SHIM aoti_torch_delete_library_object(TorchLibraryHandle) { return 0; }  // none was ever made

UNTORCH_SHIM aoti_torch_call_dispatcher(const char* name, const char* overload, StableIValue*) {
  return guarded("call_dispatcher", [&] { refuse_dispatch(name, overload); });
}
UNTORCH_SHIM torch_call_dispatcher(const char* name, const char* overload, StableIValue*, std::uint64_t) {
  return guarded("call_dispatcher", [&] { refuse_dispatch(name, overload); });
}
