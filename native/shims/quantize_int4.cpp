// quantize_int4: int4 weights, their scales and zeros. The build half calls it (src/untorch/quant/methods.py); no file
// does.
#include "kernels/cpu/quantize/int4.h"
#include "shims/destination.h"
#include "shims/weight_to_quantize.h"

using namespace untorch;
using namespace untorch::shims;

// packed int32 [n / 8][k / 128][32][4], scale_and_zero [k / group][n][2] in the weight's dtype and sums float64 [rows,
// 2] of weight [rows, columns]; see kernels/cpu/quantize/int4.h. by_range 0: scale_and_zero is given.
UNTORCH_SHIM untorch_quantize_int4(AtenTensorHandle packed, AtenTensorHandle scale_and_zero, AtenTensorHandle sums,
                                   AtenTensorHandle weight, std::int64_t group_size, std::int64_t by_range) {
  constexpr const char* op = "quantize_int4";
  return guarded(op, [&] {
    const Tensor& given = weight_to_quantize(weight, op);
    Tensor& result = cpu_input(packed, op, "packed");
    Tensor& scales = cpu_input(scale_and_zero, op, "scale_and_zero");
    Tensor& squares = cpu_input(sums, op, "sums");
    const DType dtype = given.dtype();
    check(group_size >= kernels::kInt4Group && group_size <= kernels::kInt4MostGroup &&
              group_size % kernels::kInt4Group == 0,
          op, ": group_size must be a multiple of ", kernels::kInt4Group, " up to ", kernels::kInt4MostGroup, ", got ",
          group_size);
    kernels::Int4Quantization p{};
    p.rows = given.size(0), p.k = given.size(1);
    check(result.dtype() == DType::kInt32 && result.dim() == 4 && result.size(2) == 32 && result.size(3) == 4 &&
              result.is_contiguous() && result.size(0) * kernels::kInt4Rows >= p.rows &&
              result.size(1) * kernels::kInt4Columns >= p.k && result.size(1) * kernels::kInt4Columns % group_size == 0,
          op, ": argument 'packed' must be contiguous int32 [n / 8, k / 128, 32, 4] with n of ", p.rows,
          " or more and k of ", p.k, " or more, a multiple of ", group_size, ", got ", dtype_name(result.dtype()),
          " of shape ", to_string(result.sizes()));
    p.padded_rows = result.size(0) * kernels::kInt4Rows, p.padded_k = result.size(1) * kernels::kInt4Columns;
    check(scales.dtype() == dtype && scales.dim() == 3 && scales.size(0) == p.padded_k / group_size &&
              scales.size(1) == p.padded_rows && scales.size(2) == 2 && scales.is_contiguous(),
          op, ": argument 'scale_and_zero' must be contiguous ", dtype_name(dtype), " [", p.padded_k / group_size, ", ",
          p.padded_rows, ", 2], got ", dtype_name(scales.dtype()), " of shape ", to_string(scales.sizes()));
    check(squares.dtype() == DType::kFloat64 && squares.dim() == 2 && squares.size(0) == p.rows &&
              squares.size(1) == 2 && squares.is_contiguous(),
          op, ": argument 'sums' must be contiguous float64 [", p.rows, ", 2], got ", dtype_name(squares.dtype()),
          " of shape ", to_string(squares.sizes()));
    p.dtype = dtype, p.weight = given.raw(), p.stride = given.stride(0);
    p.group = group_size, p.by_range = by_range != 0;
    p.scale_and_zero = scales.raw(), p.packed = result.data<std::int32_t>(), p.sums = squares.data<double>();
    kernels::quantize_int4(p);
  });
}
