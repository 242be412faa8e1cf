// untorch._core: Program, Method and Graph over the C interface. Thin: what a call costs is decided here, what a call
// means (trees of arguments, names, files) lies in the Python package.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <memory>
#include <vector>

#include "convert.h"
#include "stream.h"
#include "tensor.h"
#include "untorch/untorch.h"

namespace nb = nanobind;
using namespace untorch::python;

namespace {

constexpr std::size_t kFew = 8;

// Runs `body(views, num_inputs, outputs, aliases, num_outputs)` on flat arrays, without the interpreter lock, and makes
// Python objects of the outputs. as_numpy: True, False, or None: numpy when every input is numpy.
template <class Body>
nb::list run_on_arrays(const Taker& taker, const nb::object& inputs, std::size_t num_outputs,
                       const nb::object& as_numpy, Body&& body) {
  release_done();
  const std::size_t num_inputs = nb::len(inputs);
  std::array<Operand, kFew> few;
  std::unique_ptr<Operand[]> many(num_inputs > kFew ? new Operand[num_inputs] : nullptr);
  Operand* operands = many ? many.get() : few.data();
  std::array<untorch_view, kFew> few_views;
  std::vector<untorch_view> many_views(num_inputs > kFew ? num_inputs : 0);
  untorch_view* views = num_inputs > kFew ? many_views.data() : few_views.data();
  bool numpy = true, borrows_gpu = false;
  std::size_t i = 0;
  for (nb::handle input : inputs) {
    if (i == num_inputs) throw nb::value_error("the list of inputs changed while it was read");
    if (!operands[i].set(input.ptr(), taker, i)) throw_python();
    views[i] = operands[i].view();
    numpy = numpy && operands[i].is_numpy();
    borrows_gpu = borrows_gpu || operands[i].must_stay();
    ++i;
  }
  if (i != num_inputs) throw nb::value_error("the list of inputs changed while it was read");
  if (!as_numpy.is_none()) numpy = nb::cast<bool>(as_numpy);
  Producer producer;
  if (taker.device_type != 0) producer = current_producer(taker.device_index);

  std::array<untorch_tensor*, kFew> few_outputs{};
  std::array<std::int32_t, kFew> few_aliases{};
  std::vector<untorch_tensor*> many_outputs(num_outputs > kFew ? num_outputs : 0, nullptr);
  std::vector<std::int32_t> many_aliases(many_outputs.size(), -1);
  untorch_tensor** outputs = many_outputs.empty() ? few_outputs.data() : many_outputs.data();
  std::int32_t* aliases = many_aliases.empty() ? few_aliases.data() : many_aliases.data();
  untorch_status status;
  {
    nb::gil_scoped_release release;
    status = body(views, num_inputs, outputs, aliases, num_outputs);
  }

  nb::list results;
  bool failed = status != UNTORCH_OK;
  if (failed) raise_status(status);
  for (std::size_t o = 0; o < num_outputs && status == UNTORCH_OK; ++o) {
    if (failed) {
      untorch_tensor_free(outputs[o]);
      continue;
    }
    if (outputs[o] == nullptr) {
      results.append(nb::none());
      continue;
    }
    const Operand* alias = aliases[o] >= 0 ? &operands[aliases[o]] : nullptr;
    const bool writable = alias != nullptr ? alias->writable() : untorch_tensor_is_writable(outputs[o]) != 0;
    untorch_view view;
    untorch_tensor_view(outputs[o], &view);
    if (numpy && view.device_type != 0) {
      PyObject* array = copy_to_numpy(outputs[o]);
      failed = array == nullptr;
      if (!failed) results.append(nb::steal(array));
    } else if (numpy) {
      PyObject* array = to_numpy(outputs[o], alias != nullptr ? alias->owner() : nullptr, writable);
      failed = array == nullptr;
      if (!failed) results.append(nb::steal(array));
    } else {
      Producer mine = view.device_type != 0 ? producer : Producer{};
      Tensor* tensor = alias != nullptr ? new Tensor(outputs[o], nb::borrow(alias->owner()), !writable, std::move(mine))
                                        : new Tensor(outputs[o], std::move(mine));
      results.append(nb::cast(tensor, nb::rv_policy::take_ownership));
    }
  }
  // On a stream of the library's own, nothing else keeps the producer from using the memory again while the GPU reads
  // it. A caller who set the stream also orders what comes after.
  if (borrows_gpu && !caller_has_stream()) {
    std::vector<PyObject*> owners;
    for (std::size_t n = 0; n < num_inputs; ++n) {
      if (operands[n].must_stay()) owners.push_back(operands[n].take_owner());
    }
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    keep_until_done(taker.device_index, producer.stream, std::move(owners));
    PyErr_Restore(type, value, traceback);
  }
  if (failed) throw_python();
  return results;
}

struct ProgramHandle {
  explicit ProgramHandle(untorch_program* handle) : program(handle) {}
  ~ProgramHandle() { untorch_program_free(program); }
  ProgramHandle(const ProgramHandle&) = delete;
  ProgramHandle& operator=(const ProgramHandle&) = delete;
  untorch_program* program;
};

struct SessionHandle {
  SessionHandle(std::shared_ptr<ProgramHandle> owner, untorch_session* handle)
      : program(std::move(owner)), session(handle) {}
  ~SessionHandle() { untorch_session_free(session); }
  SessionHandle(const SessionHandle&) = delete;
  SessionHandle& operator=(const SessionHandle&) = delete;
  std::shared_ptr<ProgramHandle> program;
  untorch_session* session;
};

// One method as a callable. The usual call, arrays by position and a flat result, is served here; any other goes
// through the functions that the Python side bound.
class Method {
 public:
  // `owner` keeps the method: its program or its session.
  Method(std::shared_ptr<void> owner, untorch_method* method)
      : owner_(std::move(owner)), method_(method), name_(untorch_method_name(method)) {}

  const std::string& name() const { return name_; }

  void open() {
    untorch_status status;
    {
      nb::gil_scoped_release release;
      status = untorch_method_open(method_);
    }
    check(status);
    check(untorch_method_arity(method_, &num_inputs_, &num_outputs_));
    check(untorch_method_device(method_, &device_type_, &device_index_));
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
    return call_flat(args, kwargs, general_, [&](const nb::args& arrays) { return run(arrays, nb::none()); });
  }

  // The usual call by `run`, any other by `general`.
  template <class Run>
  nb::object call_flat(const nb::args& args, const nb::kwargs& kwargs, const nb::object& general, Run&& run) const {
    const std::size_t count = args.size();
    if (flat_inputs_ && flat_outputs_ >= 0 && count == num_inputs_ && kwargs.size() == 0) {
      bool arrays = true;
      for (std::size_t i = 0; i < count && arrays; ++i)
        arrays = is_array(PyTuple_GET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i)));
      if (arrays) {
        nb::list results = run(args);
        if (flat_outputs_ == 0) return results[0];
        if (flat_outputs_ == 1) return nb::tuple(results);
        return results;
      }
    }
    if (!general.is_valid()) {
      PyErr_SetString(PyExc_RuntimeError, "the method was not bound");
      throw_python();
    }
    return general(args, kwargs);
  }

  // Runs on flat arrays; see run_on_arrays.
  nb::list run(const nb::object& inputs, const nb::object& as_numpy) {
    return run_on_arrays(taker(), inputs, num_outputs_, as_numpy,
                         [&](auto... arguments) { return untorch_method_run(method_, arguments...); });
  }

  Taker taker() const { return {name_.c_str(), device_type_, device_index_}; }
  std::size_t num_outputs() const { return num_outputs_; }
  std::string device() const {
    std::int32_t type = 0, index = -1;
    check(untorch_method_device(method_, &type, &index));
    return type == 0 ? "cpu" : "cuda:" + std::to_string(index);
  }

  std::string gpu_architecture() const { return untorch_method_gpu_architecture(method_); }

  // A CUDA graph of the call on these arrays.
  untorch_graph* capture(const nb::object& inputs) {
    const std::size_t count = nb::len(inputs);
    std::unique_ptr<Operand[]> operands(new Operand[count]);
    std::vector<untorch_view> views(count);
    for (std::size_t i = 0; i < count; ++i) {
      if (!operands[i].set(nb::object(inputs[i]).ptr(), taker(), i)) throw_python();
      views[i] = operands[i].view();
    }
    untorch_graph* graph = nullptr;
    untorch_status status;
    {
      nb::gil_scoped_release release;
      status = untorch_graph_capture(method_, views.data(), count, &graph);
    }
    check(status);
    return graph;
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

  std::shared_ptr<void> owner_;
  untorch_method* method_;
  std::string name_;
  std::size_t num_inputs_ = 0, num_outputs_ = 0;
  std::int32_t device_type_ = 0, device_index_ = -1;
  bool flat_inputs_ = false;
  int flat_outputs_ = -1;
  nb::object general_, proxy_;
};

// A captured call; keeps its method, and through it the program.
class Graph {
 public:
  Graph(const nb::object& method, const nb::object& inputs)
      : method_(method), graph_(nb::cast<Method&>(method).capture(inputs), untorch_graph_free) {}

  nb::list run(const nb::object& inputs, const nb::object& as_numpy) {
    const std::shared_ptr<untorch_graph> graph = graph_;  // another thread may close it meanwhile
    if (graph == nullptr) {
      untorch_set_error(UNTORCH_CLOSED, "the graph was closed");
      check(UNTORCH_CLOSED);
    }
    const Method& method = nb::cast<Method&>(method_);
    return run_on_arrays(method.taker(), inputs, method.num_outputs(), as_numpy,
                         [&](auto... arguments) { return untorch_graph_run(graph.get(), arguments...); });
  }

  // general(args, kwargs) serves the calls that are not flat.
  void bind(nb::object general) { general_ = std::move(general); }
  nb::object call(const nb::args& args, const nb::kwargs& kwargs) {
    return nb::cast<Method&>(method_).call_flat(args, kwargs, general_,
                                                [&](const nb::args& arrays) { return run(arrays, nb::none()); });
  }

  void close() { graph_.reset(); }
  bool closed() const { return graph_ == nullptr; }

 private:
  nb::object method_, general_;
  std::shared_ptr<untorch_graph> graph_;
};

class Session {
 public:
  Session(const std::shared_ptr<ProgramHandle>& program, untorch_session* session)
      : handle_(std::make_shared<SessionHandle>(program, session)) {}

  nb::list methods() const {
    nb::list out;
    const std::size_t count = untorch_program_num_methods(handle_->program->program);
    for (std::size_t i = 0; i < count; ++i) {
      out.append(
          nb::cast(new Method(handle_, untorch_session_method(handle_->session, i)), nb::rv_policy::take_ownership));
    }
    return out;
  }
  void reset() const {
    untorch_status status;
    {
      nb::gil_scoped_release release;
      status = untorch_session_reset(nullptr, handle_->session);
    }
    check(status);
  }
  Session* fork() const {
    untorch_session* made = nullptr;
    untorch_status status;
    {
      nb::gil_scoped_release release;
      status = untorch_session_fork(handle_->program->program, handle_->session, &made);
    }
    check(status);
    return new Session(handle_->program, made);
  }
  std::size_t nbytes() const { return untorch_session_nbytes(handle_->session); }
  void close() const { untorch_session_close(handle_->session); }

 private:
  std::shared_ptr<SessionHandle> handle_;
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

  std::string memory() const {
    const char* json = nullptr;
    check(untorch_program_memory(handle_->program, &json));
    return json;
  }

  Session* session() const {
    untorch_session* made = nullptr;
    check(untorch_program_session(handle_->program, &made));
    return new Session(handle_, made);
  }
  void reset() const {
    untorch_status status;
    {
      nb::gil_scoped_release release;
      status = untorch_session_reset(handle_->program, nullptr);
    }
    check(status);
  }

  bool is_stock() const { return untorch_program_is_stock(handle_->program) != 0; }
  void close() const { untorch_program_close(handle_->program); }

 private:
  std::shared_ptr<ProgramHandle> handle_;
};

}  // namespace

NB_MODULE(_core, m) {
  bind_tensor(m);

  nb::class_<Method>(m, "Method", nb::dynamic_attr())
      .def_prop_ro("name", &Method::name)
      .def("open", &Method::open)
      .def("arity", &Method::arity)
      .def("call_spec", &Method::call_spec)
      .def("extern_nodes", &Method::extern_nodes)
      .def("bind", &Method::bind)
      .def("set_proxy", &Method::set_proxy)
      .def("run", &Method::run, nb::arg("inputs"), nb::arg("as_numpy").none() = nb::none())
      .def_prop_ro("device", &Method::device)
      .def_prop_ro("gpu_architecture", &Method::gpu_architecture)
      .def("__call__", &Method::call);

  nb::class_<Graph>(m, "Graph")
      .def(nb::init<const nb::object&, const nb::object&>(), nb::arg("method"), nb::arg("inputs"))
      .def("run", &Graph::run, nb::arg("inputs"), nb::arg("as_numpy").none() = nb::none())
      .def("bind", &Graph::bind, nb::arg("general"))
      .def("__call__", &Graph::call)
      .def("close", &Graph::close)
      .def_prop_ro("closed", &Graph::closed);

  nb::class_<Session>(m, "Session")
      .def("methods", &Session::methods)
      .def("reset", &Session::reset)
      .def("fork", &Session::fork, nb::rv_policy::take_ownership)
      .def("nbytes", &Session::nbytes)
      .def("close", &Session::close);

  nb::class_<Program>(m, "Program")
      .def(nb::init<const nb::bytes&, const nb::object&, std::size_t, int>(), nb::arg("path"), nb::arg("device").none(),
           nb::arg("num_runners"), nb::arg("num_threads"))
      .def("methods", &Program::methods)
      .def("entry", &Program::entry)
      .def("memory", &Program::memory)
      .def("session", &Program::session, nb::rv_policy::take_ownership)
      .def("reset", &Program::reset)
      .def_prop_ro("is_stock", &Program::is_stock)
      .def("close", &Program::close);

  m.def("exchange_stream", &exchange_stream, nb::arg("handle").none(), nb::arg("owner").none());
  m.def("call_stream", [](int device) { return stream_number(current_producer(device).stream); }, nb::arg("device"));
  m.def(
      "synchronize",
      [](int device, std::uintptr_t stream) {
        untorch_status status;
        {
          nb::gil_scoped_release release;
          status = untorch_stream_synchronize(device, stream == 1 ? nullptr : reinterpret_cast<void*>(stream));
        }
        check(status);
        release_done();
      },
      nb::arg("device"), nb::arg("stream"));
  m.def(
      "release_memory",
      [](int device) {
        untorch_status status;
        {
          nb::gil_scoped_release release;
          status = untorch_cuda_release_memory(device);
        }
        check(status);
      },
      nb::arg("device"));
  m.def(
      "to_device",
      [](nb::handle array, int device) {
        Operand operand;
        if (!operand.set(array.ptr(), {"to_device", 0, -1}, 0)) throw_python();
        const Producer producer = current_producer(device);
        untorch_tensor* tensor = nullptr;
        untorch_status status;
        {
          nb::gil_scoped_release release;
          status = untorch_tensor_to_device(&operand.view(), device, &tensor);
        }
        check(status);
        return nb::cast(new Tensor(tensor, producer), nb::rv_policy::take_ownership);
      },
      nb::arg("array"), nb::arg("device"));
  m.def("cuda_devices", [] { return std::string(untorch_cuda_devices()); });
  // What a method on a device sees of an array; for tests.
  m.def(
      "view_of",
      [](nb::handle array, int device_type, int device_index) {
        Operand operand;
        if (!operand.set(array.ptr(), {"view_of", device_type, device_index}, 0)) throw_python();
        const untorch_view& v = operand.view();
        nb::list sizes, strides;
        for (int d = 0; d < v.ndim; ++d) {
          sizes.append(v.sizes[d]);
          strides.append(v.strides[d]);
        }
        return nb::make_tuple(reinterpret_cast<std::uintptr_t>(v.data), dtype_name(v.dtype), v.device_type,
                              v.device_index, nb::tuple(sizes), nb::tuple(strides), v.read_only != 0);
      },
      nb::arg("array"), nb::arg("device_type"), nb::arg("device_index"));
  m.def("version", [] { return std::string(untorch_version()); });
  m.def("live_tensors", &untorch_live_tensors);
  m.def("manual_seed", &untorch_manual_seed, nb::arg("seed"));
  m.def("initial_seed", &untorch_initial_seed);
  m.def("cpu_features", [] { return std::string(untorch_cpu_features()); });
  m.def("cpu_architecture", [] { return std::string(untorch_cpu_architecture()); });
  m.def("cpu_level", [] { return std::string(untorch_cpu_level()); });
  m.def("has_symbol", [](const std::string& name) { return untorch_has_symbol(name.c_str()) != 0; }, nb::arg("name"));
}
