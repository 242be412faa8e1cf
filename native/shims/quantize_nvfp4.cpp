// quantize_nvfp4: NVFP4 weights. The build half calls it (src/untorch/quant/nvfp4.py); no file does.
#include "kernels/cpu/quantize/nvfp4.h"
#include "shims/destination.h"
#include "shims/weight_to_quantize.h"

using namespace untorch;
using namespace untorch::shims;

// packed uint8 [rows, blocks · 8], block_scale uint8 [rows, blocks] and sums float64 [rows, 3] of weight [rows,
// columns] and global_scale float32 [rows]; see kernels/cpu/quantize/nvfp4.h.
UNTORCH_SHIM untorch_quantize_nvfp4(AtenTensorHandle packed, AtenTensorHandle block_scale, AtenTensorHandle sums,
                                    AtenTensorHandle weight, AtenTensorHandle global_scale, std::int64_t search) {
  constexpr const char* op = "quantize_nvfp4";
  return guarded(op, [&] {
    const Tensor& given = weight_to_quantize(weight, op);
    const Tensor& world = cpu_input(global_scale, op, "global_scale");
    Tensor& result = cpu_input(packed, op, "packed");
    Tensor& scales = cpu_input(block_scale, op, "block_scale");
    Tensor& squares = cpu_input(sums, op, "sums");
    const DType dtype = given.dtype();
    kernels::Nvfp4Quantization p{};
    p.rows = given.size(0), p.k = given.size(1);
    p.blocks = (p.k + kernels::kNvfp4Block - 1) / kernels::kNvfp4Block;
    const auto expect = [&](const Tensor& tensor, const char* name, DType wanted, std::int64_t columns) {
      const bool fits = columns == 0 ? tensor.dim() == 1 : tensor.dim() == 2 && tensor.size(1) == columns;
      check(tensor.dtype() == wanted && fits && tensor.size(0) == p.rows && tensor.is_contiguous(), op, ": argument '",
            name, "' must be contiguous ", dtype_name(wanted), " [", p.rows,
            columns == 0 ? std::string() : ", " + std::to_string(columns), "], got ", dtype_name(tensor.dtype()),
            " of shape ", to_string(tensor.sizes()));
    };
    expect(world, "global_scale", DType::kFloat32, 0);
    expect(result, "packed", DType::kUInt8, p.blocks * kernels::kNvfp4Block / 2);
    expect(scales, "block_scale", DType::kUInt8, p.blocks);
    expect(squares, "sums", DType::kFloat64, 3);
    p.dtype = dtype, p.weight = given.raw(), p.stride = given.stride(0);
    p.global_scale = world.data<float>(), p.search = search != 0;
    p.packed = result.data<std::uint8_t>(), p.block_scale = scales.data<std::uint8_t>();
    p.sums = squares.data<double>();
    kernels::quantize_nvfp4(p);
  });
}
