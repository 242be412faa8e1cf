// The table of operators behind the proxy executor, and the arguments of their calls.
#include "shims/proxy_op.h"

using namespace untorch;
using namespace untorch::shims;

namespace untorch::shims {
namespace {

constinit ProxyOp* first = nullptr;  // before any entry is made

}  // namespace

ProxyOp::ProxyOp(const char* target, unsigned devices, Body body) noexcept
    : target_(target), devices_(devices), body_(body), next_(std::exchange(first, this)) {}

AOTITorchError ProxyOp::run(DeviceType device, const ProxyNode& node, std::span<const std::int64_t> ints,
                            std::span<const AtenTensorHandle> tensors) const noexcept {
  return guarded(target_, [&] {
    check_interrupt();
    const Op op{target_, device};
    if (ints.size() != node.num_input_ints + node.num_output_ints ||
        tensors.size() != node.num_inputs + node.num_outputs) {
      throw_error(ErrorKind::kInvalidFile, target_, ": node `", node.name, "`: expected ",
                  node.num_input_ints + node.num_output_ints, " integers and ", node.num_inputs + node.num_outputs,
                  " tensors, got ", ints.size(), " and ", tensors.size(),
                  "; the model library and its list of extern nodes do not belong together");
    }
    body_(op, ProxyCall(op, node, ints, tensors));
  });
}

ProxyOp* first_proxy_op() noexcept { return first; }

ProxyOp* find_proxy_op(std::string_view target) noexcept {
  if (target.ends_with(".default")) target.remove_suffix(std::string_view(".default").size());
  for (ProxyOp* entry = first; entry != nullptr; entry = entry->next()) {
    if (target == entry->target()) return entry;
  }
  return nullptr;
}

const ProxyArgument* ProxyCall::find(std::string_view name) const noexcept {
  for (const ProxyArgument& argument : node_.arguments) {
    if (argument.name == name) return &argument;
  }
  return nullptr;
}

void ProxyCall::fail(std::string_view name, const char* expected) const {
  throw_error(ErrorKind::kInvalidFile, op_, ": argument '", std::string(name), "' of node `", node_.name,
              "`: expected ", expected, " in the file's list of extern nodes");
}

const ProxyArgument& ProxyCall::required(std::string_view name) const {
  const ProxyArgument* const argument = find(name);
  if (argument == nullptr) fail(name, "a value");
  return *argument;
}

AtenTensorHandle ProxyCall::handle(std::string_view name) const {
  const ProxyArgument& argument = required(name);
  if (argument.is_tensor_list || argument.tensors.size() != 1 || argument.tensors[0] < 0) fail(name, "a tensor");
  return tensors_[static_cast<std::size_t>(argument.tensors[0])];
}

const Tensor& ProxyCall::tensor(std::string_view name) const {
  return op_.input(handle(name), std::string(name).c_str());
}

const Tensor* ProxyCall::optional_tensor(std::string_view name) const {
  const ProxyArgument* const argument = find(name);
  if (argument == nullptr) return nullptr;
  if (argument->tensors.empty() && std::holds_alternative<std::monostate>(argument->constant)) return nullptr;
  const AtenTensorHandle given = handle(name);
  return given == nullptr || !unwrap(given)->defined() ? nullptr : &tensor(name);
}

std::optional<std::int64_t> ProxyCall::optional_integer(std::string_view name) const {
  const ProxyArgument* const argument = find(name);
  if (argument == nullptr) return std::nullopt;
  if (argument->is_int) return ints_[argument->first_int];
  if (!argument->tensors.empty() || argument->is_int_list ||
      !std::holds_alternative<std::monostate>(argument->constant)) {
    fail(name, "an integer");
  }
  return std::nullopt;
}

std::int64_t ProxyCall::integer(std::string_view name, std::optional<std::int64_t> fallback) const {
  const std::optional<std::int64_t> value = optional_integer(name);
  if (value) return *value;
  if (!fallback) fail(name, "an integer");
  return *fallback;
}

std::span<const std::int64_t> ProxyCall::integers(std::string_view name) const {
  const ProxyArgument& argument = required(name);
  if (!argument.is_int_list) fail(name, "a list of integers");
  return ints_.subspan(argument.first_int, argument.num_ints);
}

bool ProxyCall::flag(std::string_view name, std::optional<bool> fallback) const {
  const ProxyArgument* const argument = find(name);
  if (argument == nullptr && fallback) return *fallback;
  if (argument == nullptr || !std::holds_alternative<bool>(argument->constant)) fail(name, "a bool");
  return std::get<bool>(argument->constant);
}

std::optional<double> ProxyCall::optional_number(std::string_view name) const {
  const ProxyArgument* const argument = find(name);
  if (argument == nullptr) return std::nullopt;
  if (argument->is_int) return static_cast<double>(ints_[argument->first_int]);
  if (const double* const value = std::get_if<double>(&argument->constant)) return *value;
  if (!std::holds_alternative<std::monostate>(argument->constant) || !argument->tensors.empty()) fail(name, "a number");
  return std::nullopt;
}

double ProxyCall::number(std::string_view name) const {
  const std::optional<double> value = optional_number(name);
  if (!value) fail(name, "a number");
  return *value;
}

std::string ProxyCall::text(std::string_view name) const {
  const ProxyArgument& argument = required(name);
  if (!std::holds_alternative<std::string>(argument.constant)) fail(name, "a string");
  return std::get<std::string>(argument.constant);
}

void ProxyCall::give(std::size_t index, TensorPtr result) const {
  if (index >= node_.results.size() || node_.results[index] < 0) return;
  const AtenTensorHandle slot = tensors_[static_cast<std::size_t>(node_.results[index])];
  check(slot != nullptr, op_, ": the slot of result ", index, " is null");
  *unwrap(slot) = std::move(*result);
}

}  // namespace untorch::shims
