// What CUDA shims that work along one dimension share: checks, and reading results back.
#pragma once

#include "shims/cuda/shim.h"

namespace untorch::shims {

// Refuses dtypes that have no order.
inline void check_ordered(const Tensor& t, const char* op) {
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

}  // namespace untorch::shims
