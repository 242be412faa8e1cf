// Reads the extern nodes: PyTorch's export schema, as AOTInductor writes it. The generated code passes one flat list of
// integers and one of tensors a call, in the order of the node's inputs: `as_int`, `as_sym_int`, `as_ints` and
// `as_sym_ints` take integers (constants too), tensors take tensors, all else is a constant of the file. The results
// follow, in the order of the node's outputs.
#include "model/extern_nodes.h"

#include <cmath>
#include <limits>

#include "model/json.h"

namespace untorch {
namespace {

using json::Place;
using json::Value;
using shims::ProxyArgument;
using shims::ProxyNode;

// The one field of a serialised union that is set. Some writers keep the others as nulls.
struct Variant {
  std::string_view kind;
  const Value* value;
};
Variant variant(const Value& object, const Place& place) {
  Variant found{{}, nullptr};
  bool is_none = false;
  for (const auto& [key, value] : object.as_object(place)) {
    if (key == "$type") continue;
    if (value.is_null()) {
      is_none = is_none || key == "as_none";
      continue;
    }
    if (found.value != nullptr) place.fail(" must have one field `as_…`");
    found = {key, &value};
  }
  if (found.value == nullptr && is_none) return {"as_none", &object};
  if (found.value == nullptr) place.fail(" must have one field `as_…`");
  return found;
}

double number(const Value& value, const Place& place) {
  if (value.is_int()) return static_cast<double>(value.as_int(place));
  if (value.is_string()) {  // some writers put what JSON has no digits for into strings
    const std::string& text = value.as_string(place);
    if (text == "Infinity") return std::numeric_limits<double>::infinity();
    if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
    if (text == "NaN") return std::nan("");
  }
  return value.as_double(place);
}

class NodeReader {
 public:
  NodeReader(ProxyNode& node, const Place& place) : node_(node), place_(place) {}

  void read(const Value& object) {
    const json::Array& inputs = object.at("inputs", place_).as_array(place_.member("inputs"));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Place at = place_.numbered("argument", i);
      ProxyArgument argument;
      argument.name = inputs[i].at("name", at).as_string(at.member("name"));
      read_argument(argument, variant(inputs[i].at("arg", at), at), at);
      node_.arguments.push_back(std::move(argument));
    }
    node_.num_inputs = tensors_;
    node_.num_input_ints = ints_;
    const json::Array& outputs = object.at("outputs", place_).as_array(place_.member("outputs"));
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Place at = place_.numbered("result", i);
      read_result(variant(outputs[i], at), at);
    }
    node_.num_outputs = tensors_ - node_.num_inputs;
    node_.num_output_ints = ints_ - node_.num_input_ints;
  }

 private:
  std::int64_t next_tensor() { return static_cast<std::int64_t>(tensors_++); }

  void read_argument(ProxyArgument& argument, Variant given, const Place& place) {
    if (given.kind == "as_optional_tensor") given = variant(*given.value, place);
    const auto& [kind, value] = given;
    if (kind == "as_int" || kind == "as_sym_int") {
      argument.is_int = true;
      argument.first_int = ints_;
      argument.num_ints = 1;
      ints_ += 1;
    } else if (kind == "as_ints" || kind == "as_sym_ints") {
      argument.is_int_list = true;
      argument.first_int = ints_;
      argument.num_ints = value->as_array(place).size();
      ints_ += argument.num_ints;
    } else if (kind == "as_tensor") {
      argument.tensors.push_back(next_tensor());
    } else if (kind == "as_tensors" || kind == "as_optional_tensors") {
      argument.is_tensor_list = true;
      for (const Value& item : value->as_array(place)) {
        const bool absent = kind == "as_optional_tensors" && variant(item, place).kind == "as_none";
        argument.tensors.push_back(absent ? -1 : next_tensor());
      }
    } else {
      argument.constant = constant(given, place);
    }
  }

  static ProxyArgument::Constant constant(const Variant& given, const Place& place) {
    const auto& [kind, value] = given;
    const auto list = [&]<class T>(std::vector<T> items, auto&& read) {
      for (const Value& item : value->as_array(place)) items.push_back(read(item));
      return items;
    };
    if (kind == "as_none") return std::monostate();
    if (kind == "as_bool") return value->as_bool(place);
    if (kind == "as_float") return number(*value, place);
    if (kind == "as_string") return value->as_string(place);
    if (kind == "as_floats") return list(std::vector<double>(), [&](const Value& v) { return number(v, place); });
    if (kind == "as_bools") return list(std::vector<bool>(), [&](const Value& v) { return v.as_bool(place); });
    if (kind == "as_strings") {
      return list(std::vector<std::string>(), [&](const Value& v) { return v.as_string(place); });
    }
    if (kind == "as_scalar_type" || kind == "as_memory_format" || kind == "as_layout") return value->as_int(place);
    return ProxyArgument::Other();
  }

  void read_result(Variant given, const Place& place) {
    if (given.kind == "as_optional_tensor") given = variant(*given.value, place);
    const auto& [kind, value] = given;
    if (kind == "as_tensor") {
      node_.results.push_back(next_tensor());
    } else if (kind == "as_tensors") {
      for (std::size_t i = value->as_array(place).size(); i > 0; --i) node_.results.push_back(next_tensor());
    } else if (kind == "as_none") {
      node_.results.push_back(-1);
    } else if (kind == "as_int") {
      node_.results.push_back(-1);
      ++ints_;
    } else {
      place.fail(" must be a tensor, a list of tensors, an integer or none");
    }
  }

  ProxyNode& node_;
  const Place& place_;
  std::size_t tensors_ = 0, ints_ = 0;
};

}  // namespace

std::vector<ExternNode> parse_extern_nodes(std::string_view text, std::string_view name) {
  const Value document = json::parse(text, name, json::Dialect::kNonFiniteNumbers);
  const Place root(name);
  std::vector<ExternNode> found;
  // A list that is none, or a node without a target, is the callback's to refuse.
  const Value* const nodes = document.is_object() ? document.find("nodes", root) : nullptr;
  if (nodes == nullptr || !nodes->is_array()) return found;
  const json::Array& list = nodes->as_array(root);
  for (std::size_t i = 0; i < list.size(); ++i) {
    ExternNode& entry = found.emplace_back();
    const Place place = root.numbered("node", i);
    const Value* const node = list[i].is_object() ? list[i].find("node", place) : nullptr;
    const Value* const target = node != nullptr && node->is_object() ? node->find("target", place) : nullptr;
    if (target == nullptr || !target->is_string()) continue;
    entry.target = target->as_string(place);
    entry.op = shims::find_proxy_op(entry.target);
    const Value* const label = list[i].find("name", place);
    entry.node.name = label != nullptr && label->is_string() ? label->as_string(place) : std::to_string(i);
    entry.node.target = entry.target;
    try {
      NodeReader(entry.node, place).read(*node);
      entry.known = true;
    } catch (const Error&) {
      if (entry.op != nullptr) throw;
    }
  }
  return found;
}

}  // namespace untorch
