// A convolution as cuDNN describes it, and the plans for it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/dnn.h"
#include "cuda/dnn_library.h"
#include "cuda/recorded_launches.h"

namespace untorch::cuda::dnn {

// The tensors in a variant pack; those between operations have later ids.
enum Operand : std::size_t { kInput, kWeight, kOutput, kBias, kResidual, kOperands };
using Pointers = std::array<const void*, kOperands>;  // null: the problem has no such operand

Pointers pointers_of(const DnnConvolution& problem, const DnnOperands& operands) noexcept;
// What a plan may rely on.
std::int64_t alignment_of(const void* pointer) noexcept;
// A plan in words without its algorithm: the list of algorithms is of a cuDNN, a GPU and sizes.
std::string plan_text(const DnnConvolution& problem, int device);

struct Plan {
  Plan(Descriptor made, std::size_t bytes) : descriptor(std::move(made)), workspace(bytes) {}

  Descriptor descriptor;
  std::size_t workspace;  // bytes
  RepeatedCall repeated;
};

Status execute(Handle handle, const Plan& plan, const Pointers& pointers, const void* workspace);

class Problem {
 public:
  // When cuDNN refuses the problem, there is no plan.
  Problem(Handle handle, const DnnConvolution& problem, const Pointers& pointers, int device);

  // The plan to use; null when no engine serves the problem. `refused_one` is a plan that failed at execution: the one
  // after it is made then.
  Plan* plan(Handle handle, const Plan* refused_one = nullptr);

  // Calls with each plan in turn, at most kMostTuned. Not with those that are compiled now: there may be dozens.
  template <class Visit>
  void for_each_plan(Handle handle, Visit&& visit) {
    constexpr std::size_t kMostTuned = 24;
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < configs_.size() && i < kMostTuned; ++i) {
      if (is_compiled_now(configs_[i])) continue;
      if (const Plan* made = make_plan(handle, configs_[i])) visit(i, *made);
    }
  }

 private:
  // [n, c, spatial…] of `n` spatial dimensions, dense in the format.
  struct Sizes {
    std::int64_t batch, channels;
    std::array<std::int64_t, 3> spatial;
    std::size_t n;
    bool channels_last;
  };

  void describe(Handle handle, const DnnConvolution& problem, const Pointers& pointers);
  RawDescriptor tensor(const Sizes& of, std::int32_t type, std::int64_t id, std::int64_t alignment,
                       bool between = false);
  // y = mode(x, b); b is null for an operation of one operand.
  RawDescriptor pointwise(std::int32_t mode, RawDescriptor x, RawDescriptor b, RawDescriptor y);
  // Finalized, and kept for as long as the graph needs it.
  Descriptor& keep(Descriptor descriptor);

  // Adds what the heuristics give, the best first.
  void find_configs(std::int32_t mode);
  // The algorithm that dnn_tune found comes first.
  void prefer(const DnnConvolution& problem, int device);
  static bool is_compiled_now(Descriptor& config);
  // Deterministic, no less accurate than asked for, and if anything is fused, compiled already.
  bool is_acceptable(Descriptor& config) const;
  Plan* next_plan(Handle handle);
  Plan* make_plan(Handle handle, Descriptor& config);

  const bool exact_;  // float32 without TF32
  const bool wide_;   // float32: not to be rounded to half
  const bool fused_;
  Status status_ = kOk;
  std::vector<Descriptor> parts_;  // what the graph is made of; the graph itself last
  std::mutex mutex_;               // over the following
  std::vector<Descriptor> configs_;
  std::size_t next_ = 0;
  bool asked_fallback_ = false;
  std::vector<std::unique_ptr<Plan>> plans_;
  std::atomic<Plan*> current_{nullptr};
};

}  // namespace untorch::cuda::dnn
