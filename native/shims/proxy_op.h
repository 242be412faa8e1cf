// Operators that models reach through the proxy executor and that this library serves itself: one front an operator, as
// UNTORCH_OP has it, in a table by schema name.
//
//   UNTORCH_PROXY_OP(nms, "torchvision::nms", kBothDevices) {
//     const Tensor& boxes = call.tensor("dets");
//     const double threshold = call.number("iou_threshold");
//     …
//     call.give(0, std::move(out));
//   }
//
// `op` names the operator and its device, `call` has the arguments under their names in the schema. The body runs
// behind guarded(): it may throw. Names are "namespace::operator" or "namespace::operator.overload", without
// ".default".
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "shims/op.h"

namespace untorch::shims {

// One argument of a node. Integers and tensors come with each call, in two flat lists; the rest are constants.
struct ProxyArgument {
  // A constant of a kind that no front takes (a device, a complex number).
  struct Other {};
  using Constant = std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<double>,
                                std::vector<bool>, std::vector<std::string>, Other>;

  std::string name;
  bool is_int = false, is_int_list = false, is_tensor_list = false;
  std::size_t first_int = 0, num_ints = 0;  // of the flat list
  std::vector<std::int64_t> tensors;        // positions in the flat list, -1 for an absent one
  Constant constant;                        // monostate: None
};

// A call site of an operator. Of the flat tensors the first num_inputs are arguments, the rest results.
struct ProxyNode {
  std::string name, target;
  std::vector<ProxyArgument> arguments;
  std::vector<std::int64_t> results;  // of each result its position in the flat list, -1 for one that is not used
  std::size_t num_inputs = 0, num_input_ints = 0, num_outputs = 0, num_output_ints = 0;
};

// The arguments of one call, and where its results go. Names are those of the schema; the getters throw kInvalidFile
// for an argument that the file does not have or has in another form.
class ProxyCall {
 public:
  ProxyCall(const Op& op, const ProxyNode& node, std::span<const std::int64_t> ints,
            std::span<const AtenTensorHandle> tensors)
      : op_(op), node_(node), ints_(ints), tensors_(tensors) {}

  // Defined, and on the operator's device.
  const Tensor& tensor(std::string_view name) const;
  AtenTensorHandle handle(std::string_view name) const;
  // Null where the call has none.
  const Tensor* optional_tensor(std::string_view name) const;
  std::int64_t integer(std::string_view name, std::optional<std::int64_t> fallback = {}) const;
  // Nothing for None.
  std::optional<std::int64_t> optional_integer(std::string_view name) const;
  std::span<const std::int64_t> integers(std::string_view name) const;
  bool flag(std::string_view name, std::optional<bool> fallback = {}) const;
  double number(std::string_view name) const;
  std::optional<double> optional_number(std::string_view name) const;
  std::string text(std::string_view name) const;

  // Result `index` of the operator, in the order of its schema.
  void give(std::size_t index, TensorPtr result) const;

 private:
  const ProxyArgument* find(std::string_view name) const noexcept;
  const ProxyArgument& required(std::string_view name) const;
  [[noreturn]] void fail(std::string_view name, const char* expected) const;

  const Op& op_;
  const ProxyNode& node_;
  std::span<const std::int64_t> ints_;
  std::span<const AtenTensorHandle> tensors_;
};

inline constexpr unsigned kOnCpu = 1, kOnCuda = kHasCudaKernels ? 2 : 0, kBothDevices = kOnCpu | kOnCuda;

// An entry of the table; made by UNTORCH_PROXY_OP, before main.
class ProxyOp {
 public:
  using Body = void (*)(const Op& op, const ProxyCall& call);
  ProxyOp(const char* target, unsigned devices, Body body) noexcept;
  ProxyOp(const ProxyOp&) = delete;
  ProxyOp& operator=(const ProxyOp&) = delete;

  const char* target() const noexcept { return target_; }
  bool serves(DeviceType device) const noexcept { return (devices_ & bit(device)) != 0; }
  // Serves it, and nobody has taken the operator over.
  bool enabled(DeviceType device) const noexcept {
    return serves(device) && (off_.load(std::memory_order_relaxed) & bit(device)) == 0;
  }
  void enable(DeviceType device, bool on) noexcept {
    on ? off_.fetch_and(~bit(device), std::memory_order_relaxed)
       : off_.fetch_or(bit(device), std::memory_order_relaxed);
  }
  // Runs it on the device of its operands. 0, or 1 with the last error set.
  AOTITorchError run(DeviceType device, const ProxyNode& node, std::span<const std::int64_t> ints,
                     std::span<const AtenTensorHandle> tensors) const noexcept;
  const ProxyOp* next() const noexcept { return next_; }
  ProxyOp* next() noexcept { return next_; }

 private:
  static unsigned bit(DeviceType device) noexcept {
    return device == DeviceType::kCPU ? kOnCpu : device == DeviceType::kCUDA ? 2u : 0u;
  }
  const char* target_;
  unsigned devices_;
  Body body_;
  std::atomic<unsigned> off_{0};
  ProxyOp* next_;
};

// Null when there is none of that name. ".default" may follow.
ProxyOp* find_proxy_op(std::string_view target) noexcept;
// The table, as a list.
ProxyOp* first_proxy_op() noexcept;

}  // namespace untorch::shims

// UNTORCH_PROXY_OP(identifier, "namespace::operator", devices) { body }
#define UNTORCH_PROXY_OP(identifier, target, devices)                                                         \
  static void identifier##_proxy_op(const ::untorch::shims::Op& op, const ::untorch::shims::ProxyCall& call); \
  static ::untorch::shims::ProxyOp identifier##_proxy_entry(target, devices, &identifier##_proxy_op);         \
  static void identifier##_proxy_op([[maybe_unused]] const ::untorch::shims::Op& op,                          \
                                    const ::untorch::shims::ProxyCall& call)
