// What fronts share where an operator runs on the GPU: scratch memory, values of the host, and waiting for results.
#pragma once

#include "cuda/driver.h"
#include "kernels/compact.h"
#include "kernels/cuda/elementwise/copy.h"
#include "shims/op.h"
#include "tensor/iteration.h"

namespace untorch::shims {

// Refuses dtypes that have no order.
inline void check_ordered(const Op& op, const Tensor& t) {
  if (t.dtype() != DType::kBool && !is_integral(t.dtype()) && !is_floating(t.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()), " is not supported");
  }
}

// Operators whose result depends on data in a way that the host must know wait for the GPU, which a capture forbids.
inline void refuse_capture(const OnDevice& on, const char* op, const char* why) {
  if (cuda::is_capturing(on.stream())) {
    throw_error(ErrorKind::kUnsupported, op, ": ", why,
                ", so it waits for the GPU, which a stream that is being captured into a graph does not allow");
  }
}

// Waits for the stream and fetches `count` int64 values.
inline void read_back(const OnDevice& on, const char* op, const std::int64_t* from, std::int64_t* to,
                      std::size_t count) {
  const cuda::Driver& api = cuda::driver();
  cuda::check_driver(
      api.memcpy_d2h_async(to, reinterpret_cast<cuda::DevicePtr>(from), count * sizeof(std::int64_t), on.stream()), op);
  cuda::check_driver(api.stream_synchronize(on.stream()), op);
}

// launch(scratch) with that many bytes of device memory; null for none.
template <class Launch>
void with_scratch(const OnDevice& on, std::size_t bytes, Launch&& launch) {
  const StorageRef scratch = bytes == 0 ? StorageRef() : on.scratch(bytes);
  on.launched(launch(bytes == 0 ? nullptr : scratch->data()));
}

// Every element of `t` becomes that of `value`, a 0-D tensor of its dtype on the CPU. Written by a kernel, so that a
// graph keeps it.
inline void fill_on_device(const OnDevice& on, const Tensor& t, const Tensor& value) {
  on.launched(kernels::cuda::fill(strided<1>("fill", t.sizes(), {&t}), t.raw(), value.raw(),
                                  static_cast<int>(element_size(t.dtype())), on.stream()));
}

// Of a dense mask: how many elements are set up to and with each.
inline StorageRef mask_ranks(const OnDevice& on, const Tensor& mask) {
  const std::int64_t n = mask.numel();
  StorageRef ranks = on.scratch(static_cast<std::size_t>(n) * sizeof(std::int64_t));
  const auto* const flags = static_cast<const std::uint8_t*>(mask.raw());
  auto* const to = static_cast<std::int64_t*>(ranks->data());
  std::size_t bytes = 0;
  on.launched(kernels::cuda::inclusive_count(nullptr, bytes, flags, to, n, on.stream()));
  with_scratch(on, bytes, [&](void* scratch) {
    return kernels::cuda::inclusive_count(scratch, bytes, flags, to, n, on.stream());
  });
  return ranks;
}

}  // namespace untorch::shims
