// A method of a loaded file, and a call of it that was captured.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>

#include "call.h"
#include "python_api.h"
#include "signature.h"

namespace untorch::python {

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

// Python objects that are to be read as flat inputs: a list, or a tuple.
inline nb::object as_sequence(const nb::object& inputs, const std::string& method) {
  PyObject* const given = inputs.ptr();
  if (PyTuple_Check(given) || PyList_Check(given)) return nb::steal(PySequence_Tuple(given));
  raise_type("method '" + method +
             "': run takes a list of arrays in the file's order, or a dict of arrays by input "
             "name, got " +
             class_name(given));
}

// One method as a callable.
class Method {
 public:
  // `owner` keeps the method: its program or its session.
  Method(std::shared_ptr<void> owner, untorch_method* method)
      : owner_(std::move(owner)), method_(method), name_(untorch_method_name(method)) {}

  const std::string& name() const { return name_; }

  void open() {
    untorch_status status;
    {
      const GilRelease release;
      status = untorch_method_open(method_);
    }
    check(status);
    check(untorch_method_arity(method_, &num_inputs_, &num_outputs_));
    check(untorch_method_device(method_, &device_type_, &device_index_));
  }

  // `opener` gets this method at its first use, and opens and describes it. Until then nothing of the file runs.
  void open_with(nb::object opener) { opener_ = std::move(opener); }

  // Opens at the first use. Two threads may get here at once: the opener locks, and looks whether it has to.
  void ensure_open() const {
    if (signature_ == nullptr && opener_.is_valid()) {
      const nb::object opener = opener_;  // another thread may clear it
      call_python(opener, nb::make_tuple(nb::find(*this)));
    }
  }

  bool is_described() const { return signature_ != nullptr; }

  nb::tuple arity() const {
    (void)signature();
    return nb::make_tuple(num_inputs_, num_outputs_);
  }

  nb::object extern_nodes() const {
    const char* text = nullptr;
    std::size_t length = 0;
    check(untorch_method_extern_nodes(method_, &text, &length));
    if (text == nullptr) return nb::none();
    return nb::str(text, length);
  }

  nb::object source() const {
    const char* text = nullptr;
    std::size_t length = 0;
    check(untorch_method_source(method_, &text, &length));
    if (text == nullptr) return nb::none();
    return steal_or_throw(PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(length), "replace"));
  }

  // What the file says beside the call specification; see Signature. Before the first call.
  void describe(const nb::list& names, const nb::dict& constants, const nb::list& numbers,
                const nb::dict& fixed_outputs, const std::string& text) {
    const char *in = nullptr, *out = nullptr;
    check(untorch_method_call_spec(method_, &in, &out));
    signature_ = std::make_unique<const Signature>(name_, in, out, num_inputs_, num_outputs_, names, constants, numbers,
                                                   fixed_outputs, text);
    opener_ = nb::object();
  }

  void set_proxy(nb::object handler) {
    proxy_ = std::move(handler);
    untorch_method_set_proxy(method_, &Method::run_proxy, this);
  }

  // args: a tuple; kwargs: a dict or null.
  nb::object call(PyObject* args, PyObject* kwargs) const {
    return call_by(args, kwargs, [&](auto... arguments) { return untorch_method_run(method_, arguments...); });
  }

  // A call whose flat run is `body`; see run_on_arrays.
  template <class Body>
  nb::object call_by(PyObject* args, PyObject* kwargs, Body&& body) const {
    References results;
    const Signature& signature = this->signature();
    if (signature.is_flat(args, kwargs)) {
      run_on_arrays(taker(), TupleItems(args), num_outputs_, Form::kLikeInputs, results, body);
      return signature.result(results, nullptr);
    }
    nb::object keywords = nb::borrow(kwargs);
    const nb::object out = signature.take_out(keywords);
    References inputs, buffers;
    signature.flatten(args, keywords.ptr(), inputs);
    Form form = Form::kLikeInputs;
    if (out.is_valid()) {
      signature.flatten_out(out.ptr(), device_type_ == 0, device_type_ == 0 ? "" : device(), buffers);
      for (PyObject* buffer : buffers.span()) {
        if (buffer != Py_None && !is_ndarray(buffer)) form = Form::kTensor;
      }
    }
    run_on_arrays(taker(), inputs.span(), num_outputs_, form, results, body);
    return signature.result(results, out.is_valid() ? &buffers : nullptr);
  }

  // The flat inputs of a call.
  nb::list flatten(const nb::args& args, const nb::kwargs& kwargs) const {
    References inputs;
    signature().flatten(args.ptr(), kwargs.ptr(), inputs);
    nb::list list;
    for (PyObject* input : inputs.span()) list.append(nb::handle(input));
    return list;
  }

  // Runs on a list of arrays; gives the list of outputs.
  nb::list run(const nb::object& inputs) const {
    return run_by(inputs, [&](auto... arguments) { return untorch_method_run(method_, arguments...); });
  }

  template <class Body>
  nb::list run_by(const nb::object& inputs, Body&& body) const {
    const nb::object arrays = as_sequence(inputs, name_);
    (void)signature();
    References results;
    run_on_arrays(taker(), TupleItems(arrays.ptr()), num_outputs_, Form::kLikeInputs, results, body);
    nb::list list;
    for (PyObject* result : results.span()) list.append(nb::handle(result));
    return list;
  }

  Taker taker() const { return {name_.c_str(), device_type_, device_index_}; }
  std::string device() const {
    std::int32_t type = 0, index = -1;
    check(untorch_method_device(method_, &type, &index));
    return type == 0 ? "cpu" : "cuda:" + std::to_string(index);
  }

  std::pair<std::size_t, std::string> graphs() const {
    std::size_t count = 0;
    const char* refusal = "";
    check(untorch_method_graphs(method_, &count, &refusal));
    return {count, refusal};
  }
  std::string gpu_architecture() const { return untorch_method_gpu_architecture(method_); }

  // A CUDA graph of the call on these arrays. `keeper` gets what kernels gave: the graph reads it at every replay.
  // shares: a graph whose memory serves this one, too, or null.
  untorch_graph* capture(const nb::object& given, CaptureKeeper&, untorch_graph* shares) const {
    const nb::object arrays = as_sequence(given, name_);
    (void)signature();
    const Inputs inputs(taker(), TupleItems(arrays.ptr()));
    untorch_graph* graph = nullptr;
    untorch_status status;
    {
      const RunningInputs running(inputs);
      const GilRelease release;
      status = shares == nullptr ? untorch_graph_capture(method_, inputs.views(), inputs.size(), &graph)
                                 : untorch_graph_capture_shared(method_, inputs.views(), inputs.size(), shares, &graph);
    }
    if (status != UNTORCH_OK) throw_call_error(status);
    return graph;
  }

 private:
  static int32_t run_proxy(void* context, int32_t node, int32_t num_ints, const int64_t* ints, int32_t num_tensors,
                           untorch_tensor** tensors) {
    const GilAcquire acquire;
    auto* self = static_cast<Method*>(context);
    std::vector<nb::object> wrappers;
    std::vector<untorch_tensor*> alone;  // tensors whose memory nobody else had
    int32_t code = 0;
    try {
      {
        nb::list int_list, tensor_list;
        for (int32_t i = 0; i < num_ints; ++i) int_list.append(ints[i]);
        for (int32_t i = 0; i < num_tensors; ++i) {
          if (tensors[i] == nullptr) {
            tensor_list.append(nb::none());
            continue;
          }
          wrappers.push_back(nb::cast(Tensor::of_kernel(tensors[i]), nb::rv_policy::take_ownership));
          tensor_list.append(wrappers.back());
          if (untorch_tensor_use_count(tensors[i]) == 1) alone.push_back(tensors[i]);
        }
        call_python(self->proxy_, nb::make_tuple(nb::find(*self), node, int_list, tensor_list));
      }
      // A kernel may keep an array: the memory is then its own, and the model, which may use it again, gets a copy.
      for (untorch_tensor* tensor : alone) {
        if (untorch_tensor_use_count(tensor) > 1) check(untorch_tensor_copy_of(tensor, tensor));
      }
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

  const Signature& signature() const {
    if (signature_ == nullptr) [[unlikely]] {
      ensure_open();
      if (signature_ != nullptr) return *signature_;
      PyErr_SetString(PyExc_RuntimeError, "the method was not described");
      throw_python();
    }
    return *signature_;
  }

  std::shared_ptr<void> owner_;
  untorch_method* method_;
  std::string name_;
  std::unique_ptr<const Signature> signature_;
  std::size_t num_inputs_ = 0, num_outputs_ = 0;
  std::int32_t device_type_ = 0, device_index_ = -1;
  nb::object proxy_;
  nb::object opener_;
};

// A captured call; keeps its method, and through it the program.
class Graph {
 public:
  // shares: a Graph, or None.
  Graph(const nb::object& method, const nb::object& inputs, const nb::object& shares) : method_(method) {
    CaptureKeeper keeper;
    std::shared_ptr<untorch_graph> other;
    if (!shares.is_none()) other = nb::cast<Graph&>(shares).open_graph();
    const nb::object arrays = as_sequence(inputs, this->method().name());
    untorch_graph* const graph = this->method().capture(arrays, keeper, other.get());
    graph_.reset(graph, Free{std::make_shared<Kept>(Kept{keeper.take(), this->method().taker().device_index})});
    std::vector<nb::object>& kept = std::get_deleter<Free>(graph_)->kept->objects;
    const TupleItems all(arrays.ptr());
    const std::span<PyObject* const> given = all;
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (untorch_graph_writes(graph, i) != 0) kept.push_back(nb::borrow(given[i]));
    }
  }

  nb::list run(const nb::object& inputs) const {
    const std::shared_ptr<untorch_graph> graph = open_graph();
    return method().run_by(inputs, [&](auto... arguments) { return untorch_graph_run(graph.get(), arguments...); });
  }

  nb::object call(PyObject* args, PyObject* kwargs) const {
    const std::shared_ptr<untorch_graph> graph = open_graph();
    return method().call_by(args, kwargs,
                            [&](auto... arguments) { return untorch_graph_run(graph.get(), arguments...); });
  }

  void close() {
    std::shared_ptr<untorch_graph> graph = std::move(graph_);
    const GilRelease release;  // it waits for the GPU
    graph.reset();
  }
  bool closed() const { return graph_ == nullptr; }

 private:
  const Method& method() const { return nb::cast<Method&>(method_); }
  // Another thread may close it meanwhile.
  std::shared_ptr<untorch_graph> open_graph() const {
    if (graph_ == nullptr) raise(UNTORCH_CLOSED, "the graph was closed");
    Kept& kept = *std::get_deleter<Free>(graph_)->kept;
    if (!kept.objects.empty()) kept.stream = current_producer(kept.device).stream;
    return graph_;
  }

  // What kernels gave while the call was captured, and inputs that are written, until the last replay is done.
  struct Kept {
    std::vector<nb::object> objects;
    int device = 0;
    void* stream = nullptr;  // of the last replay
  };
  struct Free {
    std::shared_ptr<Kept> kept;
    void operator()(untorch_graph* graph) const {
      untorch_graph_free(graph);
      std::vector<PyObject*> objects;
      for (nb::object& object : kept->objects) objects.push_back(object.release().ptr());
      keep_until_done(kept->device, kept->stream, std::move(objects));
    }
  };

  nb::object method_;
  std::shared_ptr<untorch_graph> graph_;
};

// tp_call: without the tuple and the dict that a bound function would make of the arguments.
template <class Callable>
PyObject* call_slot(PyObject* self, PyObject* args, PyObject* kwargs) noexcept {
  try {
    return outlive_interpreter([=] { return nb::inst_ptr<Callable>(self)->call(args, kwargs).release().ptr(); });
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace untorch::python
