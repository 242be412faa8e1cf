// What CUDA shims that work along one dimension share: the rows of their operands, and reading results back.
#pragma once

#include "kernels/cuda/lanes.h"
#include "shims/cpu/elementwise.h"
#include "shims/cuda/shim.h"

namespace untorch::shims {

// The rows along `dim` of operands that agree in the other dimensions; the last one is the input, whose row length
// counts. A 0-D tensor is one row of one element.
template <int N>
kernels::cuda::Lanes<N> lanes(const char* op, std::int64_t dim, const Tensor* const (&tensors)[N]) {
  kernels::cuda::Lanes<N> out;
  std::vector<std::int64_t> strides[N];
  std::span<const std::int64_t> spans[N];
  for (int k = 0; k < N; ++k) {
    out.step[k] = lane_stride(*tensors[k], dim);
    strides[k] = without(tensors[k]->strides(), dim);
    spans[k] = strides[k];
  }
  const Tensor& input = *tensors[N - 1];
  out.n = lane_size(input, dim);
  const auto sizes = without(input.sizes(), dim);
  check(kernels::cuda::make_strided<N>(sizes, spans, out.rows), op, ": shape ", to_string(input.sizes()),
        " has more dimensions than the kernels take (", kernels::cuda::kMaxDims, " after merging)");
  return out;
}

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
