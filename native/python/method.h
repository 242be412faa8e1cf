// A method of a loaded file, and a call of it that was captured.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>

#include "call.h"

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

}  // namespace untorch::python
