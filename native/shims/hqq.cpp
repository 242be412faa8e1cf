// hqq: scales and zeros of int4 weights. The build half calls it (src/untorch/quant/methods.py); no file does.
#include "kernels/cpu/quantize/hqq.h"
#include "shims/destination.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

// out float32 [rows, ceil(padded k / group), 2], the scale and the zero of each group of weight float32 [rows, k]; see
// kernels/cpu/quantize/hqq.h. Groups beyond k get 0 and 0.
UNTORCH_SHIM untorch_hqq(AtenTensorHandle out, AtenTensorHandle weight, std::int64_t group_size) {
  constexpr const char* op = "hqq";
  return guarded(op, [&] {
    const Tensor& given = cpu_input(weight, op, "weight");
    Tensor& result = cpu_input(out, op, "out");
    check(given.dtype() == DType::kFloat32 && given.dim() == 2 && (given.size(1) <= 1 || given.stride(1) == 1), op,
          ": argument 'weight' must be float32 of two dimensions, the last one dense, got ", dtype_name(given.dtype()),
          " of shape ", to_string(given.sizes()));
    check(group_size >= 1 && group_size <= kernels::kHqqMostGroup, op, ": group_size must be 1 to ",
          kernels::kHqqMostGroup, ", got ", group_size);
    const std::int64_t least = (given.size(1) + group_size - 1) / group_size;
    check(result.dtype() == DType::kFloat32 && result.dim() == 3 && result.size(0) == given.size(0) &&
              result.size(1) >= least && result.size(2) == 2 && result.is_contiguous(),
          op, ": argument 'out' must be contiguous float32 [", given.size(0), ", at least ", least, ", 2], got ",
          dtype_name(result.dtype()), " of shape ", to_string(result.sizes()));
    kernels::Hqq p{};
    p.rows = given.size(0), p.k = given.size(1);
    p.weight = given.data<float>(), p.stride = given.stride(0);
    p.group = group_size, p.groups = result.size(1);
    p.out = result.data<float>();
    kernels::hqq(p);
  });
}
