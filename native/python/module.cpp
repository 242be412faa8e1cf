// untorch._core: Program, Method and Tensor over the C interface. Thin: what a call costs is decided here, what a call
// means (trees of arguments, names, files) lies in the Python package.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <memory>
#include <vector>

#include "convert.h"
#include "untorch/untorch.h"

namespace nb = nanobind;
using namespace untorch::python;

namespace {

constexpr std::size_t kFew = 8;

[[noreturn]] void throw_python() { throw nb::python_error(); }

void check(untorch_status status) {
  if (status == UNTORCH_OK) return;
  raise_status(status);
  throw_python();
}

nb::object steal_or_throw(PyObject* object) {
  if (object == nullptr) throw_python();
  return nb::steal(object);
}

// A tensor handle of the library: an output, or an operand of a proxy kernel (then borrowed for the kernel's time).
class Tensor {
 public:
  Tensor(untorch_tensor* handle, bool owned) : handle_(handle), owned_(owned) {}
  // An output that is an input's memory: keeps the input.
  Tensor(untorch_tensor* handle, nb::object owner, bool read_only)
      : handle_(handle), owned_(true), read_only_(read_only), owner_(std::move(owner)) {}
  ~Tensor() { forget(); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  void forget() {
    if (owned_ && handle_ != nullptr) untorch_tensor_free(handle_);
    handle_ = nullptr;
  }

  untorch_tensor* handle() const {
    if (handle_ == nullptr) {
      untorch_set_error(UNTORCH_CLOSED, "this tensor belonged to a call of a kernel that has returned");
      raise_status(UNTORCH_CLOSED);
      throw_python();
    }
    return handle_;
  }

  bool read_only() const { return read_only_ || untorch_tensor_is_writable(handle()) == 0; }

  untorch_view view() const {
    untorch_view view;
    untorch_tensor_view(handle(), &view);
    return view;
  }

  nb::tuple dims(bool strides) const {
    const untorch_view v = view();
    nb::list out;
    for (int d = 0; d < v.ndim; ++d) out.append(strides ? v.strides[d] : v.sizes[d]);
    return nb::tuple(out);
  }

  nb::object numpy() const {
    if (view().device_type != 0) {
      untorch_set_error(UNTORCH_INVALID_ARGUMENT, "the tensor is not in the CPU's memory: use DLPack");
      raise_status(UNTORCH_INVALID_ARGUMENT);
      throw_python();
    }
    return steal_or_throw(numpy_array());
  }

  nb::object dlpack(const nb::object& stream, const nb::object& max_version, const nb::object& dl_device,
                    const nb::object& copy) const {
    if (!stream.is_none()) {
      PyErr_SetString(PyExc_BufferError, "a CPU tensor has no stream: pass stream=None");
      throw_python();
    }
    if (!copy.is_none() && nb::cast<bool>(copy)) {
      PyErr_SetString(PyExc_BufferError, "copy=True is not supported: copy what you get");
      throw_python();
    }
    if (!dl_device.is_none() && nb::cast<int>(nb::object(dl_device[0])) != 1) {
      PyErr_SetString(PyExc_BufferError, "the tensor is on the CPU: dl_device must be (1, 0)");
      throw_python();
    }
    const bool versioned = !max_version.is_none() && nb::cast<int>(nb::object(max_version[0])) >= 1;
    return steal_or_throw(to_dlpack(handle(), owner_.ptr(), versioned, read_only()));
  }

  // Sets the tensor to a copy of an array: how a proxy kernel gives its result.
  void assign(nb::handle array) {
    Operand operand;
    if (!operand.set(array.ptr(), "proxy", 0)) throw_python();
    check(untorch_tensor_assign(handle(), &operand.view()));
  }

 private:
  PyObject* numpy_array() const {
    // The array keeps a second handle on the storage, or the owner of memory that the storage only borrows: it may
    // outlive this object.
    untorch_view v = view();
    if (v.data == nullptr && v.ndim == 0 && dtype_name(v.dtype) == nullptr) return Py_NewRef(Py_None);
    return to_numpy(second_handle(), owner_.ptr(), !read_only());
  }
  untorch_tensor* second_handle() const;

  untorch_tensor* handle_;
  bool owned_;
  bool read_only_ = false;
  nb::object owner_;
};

extern "C" int32_t aoti_torch_new_tensor_handle(void* original, void** handle);

untorch_tensor* Tensor::second_handle() const {
  void* out = nullptr;
  if (aoti_torch_new_tensor_handle(handle(), &out) != 0) {
    raise_status(UNTORCH_INTERNAL);
    throw_python();
  }
  return static_cast<untorch_tensor*>(out);
}

struct ProgramHandle {
  explicit ProgramHandle(untorch_program* handle) : program(handle) {}
  ~ProgramHandle() { untorch_program_free(program); }
  ProgramHandle(const ProgramHandle&) = delete;
  ProgramHandle& operator=(const ProgramHandle&) = delete;
  untorch_program* program;
};

// One method as a callable. The usual call, arrays by position and a flat result, is served here; any other goes
// through the functions that the Python side bound.
class Method {
 public:
  Method(std::shared_ptr<ProgramHandle> program, untorch_method* method)
      : program_(std::move(program)), method_(method), name_(untorch_method_name(method)) {}

  const std::string& name() const { return name_; }

  void open() {
    untorch_status status;
    {
      nb::gil_scoped_release release;
      status = untorch_method_open(method_);
    }
    check(status);
    check(untorch_method_arity(method_, &num_inputs_, &num_outputs_));
  }

  nb::tuple arity() const { return nb::make_tuple(num_inputs_, num_outputs_); }

  nb::tuple call_spec() const {
    const char *in = nullptr, *out = nullptr;
    check(untorch_method_call_spec(method_, &in, &out));
    return nb::make_tuple(in, out);
  }

  nb::object extern_nodes() const {
    const char* text = nullptr;
    std::size_t length = 0;
    check(untorch_method_extern_nodes(method_, &text, &length));
    if (text == nullptr) return nb::none();
    return nb::str(text, length);
  }

  // general(args, kwargs) serves the calls that are not flat. flat_inputs: num_inputs arrays by position and nothing
  // else. outputs: 0 one array, 1 a tuple, 2 a list, -1 anything else.
  void bind(nb::object general, bool flat_inputs, int outputs) {
    general_ = std::move(general);
    flat_inputs_ = flat_inputs;
    flat_outputs_ = outputs;
  }

  void set_proxy(nb::object handler) {
    proxy_ = std::move(handler);
    untorch_method_set_proxy(method_, &Method::run_proxy, this);
  }

  nb::object call(const nb::args& args, const nb::kwargs& kwargs) {
    const std::size_t count = args.size();
    if (flat_inputs_ && flat_outputs_ >= 0 && count == num_inputs_ && kwargs.size() == 0) {
      bool arrays = true;
      for (std::size_t i = 0; i < count && arrays; ++i)
        arrays = is_array(PyTuple_GET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i)));
      if (arrays) {
        nb::list results = run(args, nb::none());
        if (flat_outputs_ == 0) return results[0];
        if (flat_outputs_ == 1) return nb::tuple(results);
        return results;
      }
    }
    if (!general_.is_valid()) {
      PyErr_SetString(PyExc_RuntimeError, "the method was not bound");
      throw_python();
    }
    return general_(args, kwargs);
  }

  // Runs on flat arrays. as_numpy: True, False, or None: numpy when every input is numpy.
  nb::list run(const nb::object& inputs, const nb::object& as_numpy) {
    const std::size_t num_inputs = nb::len(inputs);
    std::array<Operand, kFew> few;
    std::unique_ptr<Operand[]> many(num_inputs > kFew ? new Operand[num_inputs] : nullptr);
    Operand* operands = many ? many.get() : few.data();
    std::array<untorch_view, kFew> few_views;
    std::vector<untorch_view> many_views(num_inputs > kFew ? num_inputs : 0);
    untorch_view* views = num_inputs > kFew ? many_views.data() : few_views.data();
    bool numpy = true;
    std::size_t i = 0;
    for (nb::handle input : inputs) {
      if (i == num_inputs) throw nb::value_error("the list of inputs changed while it was read");
      if (!operands[i].set(input.ptr(), name_.c_str(), i)) throw_python();
      views[i] = operands[i].view();
      numpy = numpy && operands[i].is_numpy();
      ++i;
    }
    if (i != num_inputs) throw nb::value_error("the list of inputs changed while it was read");
    if (!as_numpy.is_none()) numpy = nb::cast<bool>(as_numpy);

    std::array<untorch_tensor*, kFew> few_outputs{};
    std::array<std::int32_t, kFew> few_aliases{};
    std::vector<untorch_tensor*> many_outputs(num_outputs_ > kFew ? num_outputs_ : 0, nullptr);
    std::vector<std::int32_t> many_aliases(many_outputs.size(), -1);
    untorch_tensor** outputs = many_outputs.empty() ? few_outputs.data() : many_outputs.data();
    std::int32_t* aliases = many_aliases.empty() ? few_aliases.data() : many_aliases.data();
    untorch_status status;
    {
      nb::gil_scoped_release release;
      status = untorch_method_run(method_, views, num_inputs, outputs, aliases, num_outputs_);
    }
    check(status);

    nb::list results;
    bool failed = false;
    for (std::size_t o = 0; o < num_outputs_; ++o) {
      if (failed) {
        untorch_tensor_free(outputs[o]);
        continue;
      }
      if (outputs[o] == nullptr) {
        results.append(nb::none());
        continue;
      }
      const Operand* alias = aliases[o] >= 0 ? &operands[aliases[o]] : nullptr;
      if (numpy) {
        const bool writable = alias != nullptr ? alias->writable() : untorch_tensor_is_writable(outputs[o]) != 0;
        PyObject* array = to_numpy(outputs[o], alias != nullptr ? alias->owner() : nullptr, writable);
        failed = array == nullptr;
        if (!failed) results.append(nb::steal(array));
      } else if (alias != nullptr) {
        results.append(nb::cast(new Tensor(outputs[o], nb::borrow(alias->owner()), !alias->writable()),
                                nb::rv_policy::take_ownership));
      } else {
        results.append(nb::cast(new Tensor(outputs[o], true), nb::rv_policy::take_ownership));
      }
    }
    if (failed) throw_python();
    return results;
  }

 private:
  static int32_t run_proxy(void* context, int32_t node, int32_t num_ints, const int64_t* ints, int32_t num_tensors,
                           untorch_tensor** tensors) {
    nb::gil_scoped_acquire acquire;
    auto* self = static_cast<Method*>(context);
    std::vector<nb::object> wrappers;
    int32_t code = 0;
    try {
      nb::list int_list, tensor_list;
      for (int32_t i = 0; i < num_ints; ++i) int_list.append(ints[i]);
      for (int32_t i = 0; i < num_tensors; ++i) {
        if (tensors[i] == nullptr) {
          tensor_list.append(nb::none());
          continue;
        }
        wrappers.push_back(nb::cast(new Tensor(tensors[i], false), nb::rv_policy::take_ownership));
        tensor_list.append(wrappers.back());
      }
      self->proxy_(node, int_list, tensor_list);
    } catch (nb::python_error& e) {
      e.restore();
      store_python_error();
      code = 1;
    } catch (const std::exception& e) {
      untorch_set_error(UNTORCH_INTERNAL, e.what());
      code = 1;
    }
    for (const nb::object& wrapper : wrappers) nb::cast<Tensor&>(wrapper).forget();
    return code;
  }

  std::shared_ptr<ProgramHandle> program_;
  untorch_method* method_;
  std::string name_;
  std::size_t num_inputs_ = 0, num_outputs_ = 0;
  bool flat_inputs_ = false;
  int flat_outputs_ = -1;
  nb::object general_, proxy_;
};

class Program {
 public:
  // The path as bytes: file names need not be UTF-8.
  Program(const nb::bytes& path, const nb::object& device, std::size_t num_runners, int num_threads) {
    std::string device_name;
    untorch_load_options options{sizeof(untorch_load_options), nullptr, num_runners, num_threads};
    if (!device.is_none()) {
      device_name = nb::cast<std::string>(device);
      options.device = device_name.c_str();
    }
    untorch_program* program = nullptr;
    untorch_status status;
    {
      nb::gil_scoped_release release;
      status = untorch_program_open(path.c_str(), &options, &program);
    }
    check(status);
    handle_ = std::make_shared<ProgramHandle>(program);
  }

  nb::list methods() const {
    nb::list out;
    const std::size_t count = untorch_program_num_methods(handle_->program);
    for (std::size_t i = 0; i < count; ++i) {
      out.append(
          nb::cast(new Method(handle_, untorch_program_method(handle_->program, i)), nb::rv_policy::take_ownership));
    }
    return out;
  }

  nb::bytes entry(const std::string& name) const {
    const void* data = nullptr;
    std::size_t length = 0;
    check(untorch_program_entry(handle_->program, name.c_str(), &data, &length));
    return nb::bytes(data, length);
  }

  bool is_stock() const { return untorch_program_is_stock(handle_->program) != 0; }
  void close() const { untorch_program_close(handle_->program); }

 private:
  std::shared_ptr<ProgramHandle> handle_;
};

}  // namespace

NB_MODULE(_core, m) {
  if (!initialize_numpy()) throw_python();

  nb::class_<Tensor>(m, "Tensor", "An output array in the library's memory; exchange it through DLPack or numpy().")
      .def_prop_ro("shape", [](const Tensor& t) { return t.dims(false); })
      .def_prop_ro(
          "strides", [](const Tensor& t) { return t.dims(true); }, "In elements.")
      .def_prop_ro("dtype",
                   [](const Tensor& t) {
                     const char* name = dtype_name(t.view().dtype);
                     return std::string(name != nullptr ? name : "unknown");
                   })
      .def_prop_ro("defined", [](const Tensor& t) { return t.view().data != nullptr; })
      .def("numpy", &Tensor::numpy, "The same memory as a numpy array.")
      .def("assign", &Tensor::assign, nb::arg("array"))
      .def("__dlpack__", &Tensor::dlpack, nb::kw_only(), nb::arg("stream").none() = nb::none(),
           nb::arg("max_version").none() = nb::none(), nb::arg("dl_device").none() = nb::none(),
           nb::arg("copy").none() = nb::none())
      .def("__dlpack_device__", [](const Tensor& t) {
        const untorch_view v = t.view();
        return nb::make_tuple(v.device_type == 0 ? 1 : 2, v.device_index < 0 ? 0 : v.device_index);
      });

  nb::class_<Method>(m, "Method", nb::dynamic_attr())
      .def_prop_ro("name", &Method::name)
      .def("open", &Method::open)
      .def("arity", &Method::arity)
      .def("call_spec", &Method::call_spec)
      .def("extern_nodes", &Method::extern_nodes)
      .def("bind", &Method::bind)
      .def("set_proxy", &Method::set_proxy)
      .def("run", &Method::run, nb::arg("inputs"), nb::arg("as_numpy").none() = nb::none())
      .def("__call__", &Method::call);

  nb::class_<Program>(m, "Program")
      .def(nb::init<const nb::bytes&, const nb::object&, std::size_t, int>(), nb::arg("path"), nb::arg("device").none(),
           nb::arg("num_runners"), nb::arg("num_threads"))
      .def("methods", &Program::methods)
      .def("entry", &Program::entry)
      .def_prop_ro("is_stock", &Program::is_stock)
      .def("close", &Program::close);

  m.def("version", [] { return std::string(untorch_version()); });
  m.def("live_tensors", &untorch_live_tensors);
  m.def("manual_seed", &untorch_manual_seed, nb::arg("seed"));
  m.def("initial_seed", &untorch_initial_seed);
  m.def("cpu_features", [] { return std::string(untorch_cpu_features()); });
  m.def("cpu_architecture", [] { return std::string(untorch_cpu_architecture()); });
  m.def("cpu_level", [] { return std::string(untorch_cpu_level()); });
  m.def("has_symbol", [](const std::string& name) { return untorch_has_symbol(name.c_str()) != 0; }, nb::arg("name"));
}
