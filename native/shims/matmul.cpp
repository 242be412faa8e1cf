// mm, addmm, bmm, baddbmm and their relatives.
#include "shims/gemm_cuda.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

void check_operands(const Op& op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b,
                    std::int64_t dim) {
  check_rank(op, a_name, a, dim);
  check_rank(op, b_name, b, dim);
  check_gemm_shapes(op, a_name, a, b_name, b);
  check_gemm_dtype(op, a.dtype());
}

Dims result_sizes(const Tensor& a, const Tensor& b) {
  return a.dim() == 3 ? Dims{a.size(0), a.size(1), b.size(2)} : Dims{a.size(0), b.size(1)};
}

// mm and bmm.
void gemm_into(const Op& op, std::int64_t dim, AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  const Tensor &a = op.input(self, "self"), &b = op.input(mat2, "mat2"), &c = op.input(out, "out");
  check_operands(op, "self", a, "mat2", b, dim);
  check_out(op, c, a.dtype(), result_sizes(a, b));
  gemm(op, c, a, b);
}

// addmm and baddbmm.
void added_gemm_into(const Op& op, std::int64_t dim, const char* a_name, const char* b_name, AtenTensorHandle out,
                     AtenTensorHandle self, AtenTensorHandle left, AtenTensorHandle right, double beta, double alpha) {
  const Tensor &a = op.input(left, a_name), &b = op.input(right, b_name);
  const Tensor &added = op.input(self, "self"), &c = op.input(out, "out");
  check_operands(op, a_name, a, b_name, b, dim);
  const Dims sizes = result_sizes(a, b);
  check_out(op, c, a.dtype(), sizes);
  check_added(op, added, a.dtype(), sizes);
  gemm(op, c, a, b, &added, alpha, beta);
}

}  // namespace

UNTORCH_OP_AS("mm", mm_out, (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2), out, self, mat2) {
  gemm_into(op, 2, out, self, mat2);
}

UNTORCH_SHIM aoti_torch_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  return guarded("mm", [&] { mm_out_op(Op::of("mm", self, "self"), out, self, mat2); });
}

UNTORCH_OP_AS("bmm", bmm_out, (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2), out, self, mat2) {
  gemm_into(op, 3, out, self, mat2);
}

UNTORCH_SHIM aoti_torch_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  return guarded("bmm", [&] { bmm_out_op(Op::of("bmm", self, "self"), out, self, mat2); });
}

UNTORCH_OP_AS("addmm", addmm_out,
              (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2, double beta,
               double alpha),
              out, self, mat1, mat2, beta, alpha) {
  added_gemm_into(op, 2, "mat1", "mat2", out, self, mat1, mat2, beta, alpha);
}

UNTORCH_SHIM aoti_torch_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
                                  AtenTensorHandle mat2, float beta, float alpha) {
  return guarded("addmm", [&] { addmm_out_op(Op::of("addmm", mat1, "mat1"), out, self, mat1, mat2, beta, alpha); });
}

UNTORCH_OP_AS("baddbmm", baddbmm_out,
              (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle batch1, AtenTensorHandle batch2,
               double beta, double alpha),
              out, self, batch1, batch2, beta, alpha) {
  added_gemm_into(op, 3, "batch1", "batch2", out, self, batch1, batch2, beta, alpha);
}

// a·b + c·d.
UNTORCH_SHIM aoti_torch__mm_plus_mm_out(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b,
                                        AtenTensorHandle c, AtenTensorHandle d) {
  constexpr const char* name = "_mm_plus_mm";
  return guarded(name, [&] {
    const Op op = Op::of(name, a, "self");
    mm_out_op(op, out, a, b);
    addmm_out_op(op, out, out, c, d, 1.0, 1.0);
  });
}

// beta·self + alpha·Σ batch1[i]·batch2[i]. The half types sum the batch in float32.
UNTORCH_OP(addbmm,
           (AtenTensorHandle self, AtenTensorHandle batch1, AtenTensorHandle batch2, double beta, double alpha,
            AtenTensorHandle* ret0),
           self, batch1, batch2, beta, alpha, ret0) {
  const Tensor &a = op.input(batch1, "batch1"), &b = op.input(batch2, "batch2"), &added = op.input(self, "self");
  check_operands(op, "batch1", a, "batch2", b, 3);
  const std::int64_t batch = a.size(0), m = a.size(1), k = a.size(2), n = b.size(2);
  const Dims sizes{m, n};
  check_added(op, added, a.dtype(), sizes);
  op.check_same_device({&a, &b, &added});
  if (op.on_cuda()) {
    // The sum over the batch is a longer sum over k: one GEMM of [m, batch·k] and [batch·k, n].
    const Dims order{m, batch, k}, strides{a.stride(1), a.stride(0), a.stride(2)};
    const TensorPtr left = contiguous(*a.view(order, strides, a.storage_offset())), right = contiguous(b);
    TensorPtr out = Tensor::empty(sizes, a.dtype(), a.device());
    gemm(op, *out, *left->view(Dims{m, batch * k}, Dims{batch * k, 1}, left->storage_offset()),
         *right->view(Dims{batch * k, n}, Dims{n, 1}, right->storage_offset()), &added, alpha, beta);
    give(ret0, std::move(out), op);
    return;
  }
  const bool half = a.dtype() == DType::kFloat16 || a.dtype() == DType::kBFloat16;
  const DType compute = half ? DType::kFloat32 : a.dtype();
  const TensorPtr sum = Tensor::empty(sizes, compute), left = to_dtype(a, compute), right = to_dtype(b, compute);
  if (beta != 0.0) copy(*sum, added);
  kernels::cpu::gemm_sum_batch(matrix_of(*left), matrix_of(*right), matrix_of(*sum), alpha, beta);
  give(ret0, to_dtype(*sum, a.dtype()), op);
}

UNTORCH_OP(addmv,
           (AtenTensorHandle self, AtenTensorHandle mat, AtenTensorHandle vec, double beta, double alpha,
            AtenTensorHandle* ret0),
           self, mat, vec, beta, alpha, ret0) {
  const Tensor &a = op.input(mat, "mat"), &x = op.input(vec, "vec"), &added = op.input(self, "self");
  check_rank(op, "mat", a, 2);
  check_rank(op, "vec", x, 1);
  const std::int64_t m = a.size(0), k = a.size(1);
  check(a.dtype() == x.dtype(), op, ": 'mat' and 'vec' must have the same dtype, got ", dtype_name(a.dtype()), " and ",
        dtype_name(x.dtype()));
  check(x.size(0) == k, op, ": the inner sizes differ: 'mat' is ", to_string(a.sizes()), ", 'vec' is ",
        to_string(x.sizes()));
  check_gemm_dtype(op, a.dtype());
  check_added(op, added, a.dtype(), Dims{m});
  op.check_same_device({&a, &x, &added});
  TensorPtr out = Tensor::empty(Dims{m}, a.dtype(), a.device());
  // Vectors as matrices of one column.
  const bool one = added.dim() == 0 || added.size(0) == 1;
  const TensorPtr start = added.view(Dims{one ? 1 : m, 1}, Dims{one ? 0 : added.stride(0), 0}, added.storage_offset());
  gemm(op, *out->view(Dims{m, 1}, Dims{1, 1}, out->storage_offset()), a,
       *x.view(Dims{k, 1}, Dims{x.stride(0), 1}, x.storage_offset()), start.get(), alpha, beta);
  give(ret0, std::move(out), op);
}

// relu or gelu of beta·self + alpha·mat1·mat2: gelu's exact form on the CPU and the tanh form on CUDA, as in PyTorch.
UNTORCH_OP(_addmm_activation,
           (AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2, double beta, double alpha,
            std::int32_t use_gelu, AtenTensorHandle* ret0),
           self, mat1, mat2, beta, alpha, use_gelu, ret0) {
  const Tensor &added = op.input(self, "self"), &a = op.input(mat1, "mat1"), &b = op.input(mat2, "mat2");
  check_operands(op, "mat1", a, "mat2", b, 2);
  if (!is_floating(a.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": operands must be float32, float64, bfloat16 or float16, got ",
                dtype_name(a.dtype()));
  }
  const Dims sizes = result_sizes(a, b);
  check_added(op, added, a.dtype(), sizes);
  op.check_same_device({&a, &b, &added});
  TensorPtr out = Tensor::empty(sizes, a.dtype(), a.device());
  if (!op.on_cuda()) {
    gemm(op, *out, a, b, &added, alpha, beta);
    TensorPtr wide = to_dtype(*out, a.dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
    kernels::cpu::activate(wide->dtype(), sizes[0], sizes[1],
                           use_gelu != 0 ? kernels::Activation::kGelu : kernels::Activation::kRelu, wide->raw());
    out = to_dtype(*wide, a.dtype());
  }
#ifdef UNTORCH_CUDA_KERNELS
  if (op.on_cuda()) {
    using kernels::cuda::Activation;
    CudaGemm problem = gemm_problem(*out, a, b, &added, alpha, beta);
    problem.activation = use_gelu != 0 ? Activation::kGeluTanh : Activation::kRelu;
    gemm_cuda(op, OnDevice(op, a), problem);
  }
#endif
  give(ret0, std::move(out), op);
}

#ifdef UNTORCH_CUDA_KERNELS
// Half operands with the sums kept in float32.
UNTORCH_SHIM aoti_torch_cuda_mm_dtype_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2,
                                          std::int32_t out_dtype) {
  constexpr Op op{"mm", DeviceType::kCUDA};
  return guarded(op, [&] {
    const Tensor &a = op.input(self, "self"), &b = op.input(mat2, "mat2"), &c = op.input(out, "out");
    check_operands(op, "self", a, "mat2", b, 2);
    const auto dtype = static_cast<DType>(out_dtype);
    const bool half = a.dtype() == DType::kFloat16 || a.dtype() == DType::kBFloat16;
    check(dtype == a.dtype() || (half && dtype == DType::kFloat32), op, ": out_dtype must be ", dtype_name(a.dtype()),
          " like the operands, or float32 for bfloat16 and float16; got ", dtype_name(dtype), " for ",
          dtype_name(a.dtype()));
    check_out(op, c, dtype, result_sizes(a, b));
    gemm(op, c, a, b);
  });
}
#endif
