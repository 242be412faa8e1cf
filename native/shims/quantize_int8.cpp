// quantize_int8: int8 weights. The build half calls it (src/untorch/quant/int8.py); no file does.
#include "kernels/cpu/quantize/int8.h"
#include "shims/destination.h"
#include "shims/weight_to_quantize.h"

using namespace untorch;
using namespace untorch::shims;

// values int8 [rows, columns], scales float32 [rows] and sums float64 [rows, 2] of weight [rows, columns]; see
// kernels/cpu/quantize/int8.h.
UNTORCH_SHIM untorch_quantize_int8(AtenTensorHandle values, AtenTensorHandle scales, AtenTensorHandle sums,
                                   AtenTensorHandle weight) {
  constexpr const char* op = "quantize_int8";
  return guarded(op, [&] {
    const Tensor& given = weight_to_quantize(weight, op);
    Tensor& result = cpu_input(values, op, "values");
    Tensor& steps = cpu_input(scales, op, "scales");
    Tensor& squares = cpu_input(sums, op, "sums");
    const DType dtype = given.dtype();
    const std::int64_t rows = given.size(0), columns = given.size(1);
    check(result.dtype() == DType::kInt8 && result.dim() == 2 && result.size(0) == rows && result.size(1) == columns &&
              result.is_contiguous(),
          op, ": argument 'values' must be contiguous int8 [", rows, ", ", columns, "], got ",
          dtype_name(result.dtype()), " of shape ", to_string(result.sizes()));
    check(steps.dtype() == DType::kFloat32 && steps.dim() == 1 && steps.size(0) == rows && steps.is_contiguous(), op,
          ": argument 'scales' must be contiguous float32 [", rows, "], got ", dtype_name(steps.dtype()), " of shape ",
          to_string(steps.sizes()));
    check(squares.dtype() == DType::kFloat64 && squares.dim() == 2 && squares.size(0) == rows && squares.size(1) == 2 &&
              squares.is_contiguous(),
          op, ": argument 'sums' must be contiguous float64 [", rows, ", 2], got ", dtype_name(squares.dtype()),
          " of shape ", to_string(squares.sizes()));
    kernels::Int8Quantization p{};
    p.rows = rows, p.k = columns;
    p.dtype = dtype, p.weight = given.raw(), p.stride = given.stride(0);
    p.values = result.data<std::int8_t>(), p.scales = steps.data<float>(), p.sums = squares.data<double>();
    kernels::quantize_int8(p);
  });
}
