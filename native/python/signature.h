// What a method takes and gives: its two trees, names, and the Python values that became part of the model.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <string>
#include <vector>

#include "python_api.h"
#include "tree.h"

namespace untorch::python {

class Signature {
 public:
  // in_spec, out_spec: JSON text (tree.h). names: of all inputs in order, none if the file does not tell. constants:
  // the value of each input that is no tensor, by its index. numbers: the indices of inputs that are Python ints.
  // fixed_outputs: the value of each output that is no tensor, None or a constant, by its index. text: the signature
  // for messages, may be empty. Throws InvalidFileError.
  Signature(std::string method, const char* in_spec, const char* out_spec, std::size_t num_inputs,
            std::size_t num_outputs, const nanobind::list& names, const nanobind::dict& constants,
            const nanobind::list& numbers, const nanobind::dict& fixed_outputs, std::string text);

  std::size_t num_outputs() const noexcept { return num_outputs_; }
  // True for a call of arrays by position and nothing else: `args` are the flat inputs.
  bool is_flat(PyObject* args, PyObject* kwargs) const noexcept {
    return flat_inputs_ && static_cast<std::size_t>(tuple_size(args)) == num_inputs_ &&
           (kwargs == nullptr || dict_size(kwargs) == 0);
  }
  // Takes `out` out of the keyword arguments, unless it is an argument of the model; null: there is none.
  nanobind::object take_out(nanobind::object& kwargs) const;
  // The flat tensor inputs of a call. Throws InvalidArgumentError.
  void flatten(PyObject* args, PyObject* kwargs, References& inputs) const;
  // The arrays that outputs are to be copied to, None for those that are not; flat.
  void flatten_out(PyObject* out, bool on_cpu, const std::string& device, References& buffers) const;
  // The result from the flat outputs of a run; with buffers, they are copied there first.
  nanobind::object result(const References& outputs, const References* buffers) const;

 private:
  void place_names(PyObject* args, nanobind::object& kwargs, References& positional) const;
  void name_places(std::size_t count, const References& values, nanobind::object& kwargs) const;
  std::vector<nanobind::object> known_names() const;
  void refuse_unknown(PyObject* kwargs) const;
  void check_keywords(PyObject* kwargs) const;
  [[noreturn]] void refuse(const std::string& what) const;  // with the signature at its end
  void add_fixed(const References& outputs, References& leaves) const;
  void copy_to_device(PyObject* output, PyObject* buffer, std::size_t index) const;

  std::string method_, text_;
  std::string args_path_, kwargs_path_;  // how places in the arguments begin, for messages
  std::size_t num_inputs_, num_outputs_;
  Tree in_, out_;
  std::vector<nanobind::object> names_;      // of positional arguments that are single arrays
  std::vector<nanobind::object> constants_;  // by leaf; null: a tensor
  std::size_t num_constants_ = 0;
  std::vector<bool> numbers_;            // by leaf
  std::vector<nanobind::object> fixed_;  // by leaf of the outputs; null: a tensor
  std::size_t num_fixed_ = 0;
  bool flat_inputs_ = false, single_output_ = false;
};

}  // namespace untorch::python
