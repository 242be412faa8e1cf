// mm, addmm, bmm, baddbmm and their relatives on GPUs.
#include "shims/cuda/matmul.h"

#include "shims/device_ops.h"

namespace untorch::shims {
namespace {

using kernels::cuda::Activation;

void check_operands(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b,
                    std::int64_t dim) {
  check_rank(op, a_name, a, dim);
  check_rank(op, b_name, b, dim);
  check_product(op, a_name, a, b_name, b);
  check_multiply_dtype(op, a.dtype());
}

void check_same_device(const char* op, const Tensor& first, std::initializer_list<const Tensor*> others) {
  for (const Tensor* const other : others) {
    check(other->device() == first.device(), op, ": operands are on ", device_name(first.device()), " and ",
          device_name(other->device()), ", expected one device");
  }
}

Dims result_sizes(const Tensor& a, const Tensor& b) {
  return a.dim() == 3 ? Dims{a.size(0), a.size(1), b.size(2)} : Dims{a.size(0), b.size(1)};
}

// mm and bmm.
void product_into(const char* op, std::int64_t dim, AtenTensorHandle out, AtenTensorHandle self,
                  AtenTensorHandle mat2) {
  const Tensor& a = cuda_input(self, op, "self");
  const Tensor& b = cuda_input(mat2, op, "mat2");
  const Tensor& c = cuda_input(out, op, "out");
  check_operands(op, "self", a, "mat2", b, dim);
  check_out(op, c, a.dtype(), result_sizes(a, b));
  check_same_device(op, a, {&b, &c});
  const OnDevice on(op, a);
  multiply(op, on, {.a = cuda_matrix(a), .b = cuda_matrix(b), .out = cuda_matrix(c)});
}

void added_product(const char* op, const Tensor& out, const Tensor& self, const Tensor& a, const Tensor& b, double beta,
                   double alpha, Activation activation) {
  const OnDevice on(op, a);
  const CudaMatrix to = cuda_matrix(out), added = cuda_matrix_broadcast(self, to.batch, to.rows, to.cols);
  multiply(op, on,
           {.a = cuda_matrix(a),
            .b = cuda_matrix(b),
            .out = to,
            .added = &added,
            .alpha = alpha,
            .beta = beta,
            .activation = activation});
}

// addmm and baddbmm.
void added_product_into(const char* op, std::int64_t dim, const char* a_name, const char* b_name, AtenTensorHandle out,
                        AtenTensorHandle self, AtenTensorHandle left, AtenTensorHandle right, double beta,
                        double alpha) {
  const Tensor& a = cuda_input(left, op, a_name);
  const Tensor& b = cuda_input(right, op, b_name);
  const Tensor& added = cuda_input(self, op, "self");
  const Tensor& c = cuda_input(out, op, "out");
  check_operands(op, a_name, a, b_name, b, dim);
  const Dims sizes = result_sizes(a, b);
  check_out(op, c, a.dtype(), sizes);
  check_added(op, added, a.dtype(), sizes);
  check_same_device(op, a, {&b, &added, &c});
  added_product(op, c, added, a, b, beta, alpha, Activation::kNone);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  return guarded("mm", [&] { product_into("mm", 2, out, self, mat2); });
}

UNTORCH_SHIM aoti_torch_cuda_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  return guarded("bmm", [&] { product_into("bmm", 3, out, self, mat2); });
}

// Half operands with the sums kept in float32.
UNTORCH_SHIM aoti_torch_cuda_mm_dtype_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2,
                                          std::int32_t out_dtype) {
  constexpr const char* op = "mm";
  return guarded(op, [&] {
    const Tensor& a = cuda_input(self, op, "self");
    const Tensor& b = cuda_input(mat2, op, "mat2");
    const Tensor& c = cuda_input(out, op, "out");
    check_operands(op, "self", a, "mat2", b, 2);
    const auto dtype = static_cast<DType>(out_dtype);
    const bool half = a.dtype() == DType::kFloat16 || a.dtype() == DType::kBFloat16;
    check(dtype == a.dtype() || (half && dtype == DType::kFloat32), op, ": out_dtype must be ", dtype_name(a.dtype()),
          " like the operands, or float32 for bfloat16 and float16; got ", dtype_name(dtype), " for ",
          dtype_name(a.dtype()));
    check_out(op, c, dtype, result_sizes(a, b));
    check_same_device(op, a, {&b, &c});
    const OnDevice on(op, a);
    multiply(op, on, {.a = cuda_matrix(a), .b = cuda_matrix(b), .out = cuda_matrix(c)});
  });
}

UNTORCH_SHIM aoti_torch_cuda_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
                                       AtenTensorHandle mat2, double beta, double alpha) {
  return guarded("addmm", [&] { added_product_into("addmm", 2, "mat1", "mat2", out, self, mat1, mat2, beta, alpha); });
}

UNTORCH_SHIM aoti_torch_cuda_baddbmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle batch1,
                                         AtenTensorHandle batch2, double beta, double alpha) {
  return guarded("baddbmm",
                 [&] { added_product_into("baddbmm", 3, "batch1", "batch2", out, self, batch1, batch2, beta, alpha); });
}

// relu or gelu (the tanh form, as PyTorch's CUDA has it) of beta·self + alpha·mat1·mat2.
UNTORCH_SHIM aoti_torch_cuda__addmm_activation(AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2,
                                               double beta, double alpha, std::int32_t use_gelu,
                                               AtenTensorHandle* ret0) {
  constexpr const char* op = "_addmm_activation";
  return guarded(op, [&] {
    const Tensor& added = cuda_input(self, op, "self");
    const Tensor& a = cuda_input(mat1, op, "mat1");
    const Tensor& b = cuda_input(mat2, op, "mat2");
    check_operands(op, "mat1", a, "mat2", b, 2);
    const Dims sizes = result_sizes(a, b);
    check_added(op, added, a.dtype(), sizes);
    check_same_device(op, a, {&b, &added});
    TensorPtr out = Tensor::empty(sizes, a.dtype(), a.device());
    added_product(op, *out, added, a, b, beta, alpha, use_gelu != 0 ? Activation::kGelu : Activation::kRelu);
    give(ret0, std::move(out), op);
  });
}

// beta·self + alpha·Σ batch1[i]·batch2[i]: the sum over the batch is a longer sum over k, so it is one product of
// [m, batch·k] and [batch·k, n], summed in float32 throughout.
UNTORCH_SHIM aoti_torch_cuda_addbmm(AtenTensorHandle self, AtenTensorHandle batch1, AtenTensorHandle batch2,
                                    double beta, double alpha, AtenTensorHandle* ret0) {
  constexpr const char* op = "addbmm";
  return guarded(op, [&] {
    const Tensor& a = cuda_input(batch1, op, "batch1");
    const Tensor& b = cuda_input(batch2, op, "batch2");
    const Tensor& added = cuda_input(self, op, "self");
    check_operands(op, "batch1", a, "batch2", b, 3);
    const Dims sizes{a.size(1), b.size(2)};
    check_added(op, added, a.dtype(), sizes);
    check_same_device(op, a, {&b, &added});
    const std::int64_t batch = a.size(0), m = a.size(1), k = a.size(2), n = b.size(2);
    const TensorPtr left =
        contiguous(*a.view(Dims{m, batch, k}, Dims{a.stride(1), a.stride(0), a.stride(2)}, a.storage_offset()));
    const TensorPtr right = contiguous(b);
    TensorPtr out = Tensor::empty(sizes, a.dtype(), a.device());
    const OnDevice on(op, a);
    const CudaMatrix to = cuda_matrix(*out), start = cuda_matrix_broadcast(added, 1, m, n);
    multiply(op, on,
             {.a = {left->raw(), a.dtype(), 1, m, batch * k, 0, batch * k, 1},
              .b = {right->raw(), a.dtype(), 1, batch * k, n, 0, n, 1},
              .out = to,
              .added = &start,
              .alpha = alpha,
              .beta = beta});
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_addmv(AtenTensorHandle self, AtenTensorHandle mat, AtenTensorHandle vec, double beta,
                                   double alpha, AtenTensorHandle* ret0) {
  constexpr const char* op = "addmv";
  return guarded(op, [&] {
    const Tensor& a = cuda_input(mat, op, "mat");
    const Tensor& x = cuda_input(vec, op, "vec");
    const Tensor& added = cuda_input(self, op, "self");
    check_rank(op, "mat", a, 2);
    check_rank(op, "vec", x, 1);
    const std::int64_t m = a.size(0), k = a.size(1);
    check(a.dtype() == x.dtype(), op, ": 'mat' and 'vec' must have the same dtype, got ", dtype_name(a.dtype()),
          " and ", dtype_name(x.dtype()));
    check(x.size(0) == k, op, ": the inner sizes differ: 'mat' is ", to_string(a.sizes()), ", 'vec' is ",
          to_string(x.sizes()));
    check_multiply_dtype(op, a.dtype());
    check_added(op, added, a.dtype(), Dims{m});
    check_same_device(op, a, {&x, &added});
    TensorPtr out = Tensor::empty(Dims{m}, a.dtype(), a.device());
    const OnDevice on(op, a);
    const std::int64_t step = added.dim() == 0 || added.size(0) == 1 ? 0 : added.stride(0);
    const CudaMatrix start{added.raw(), a.dtype(), 1, m, 1, 0, step, 0};
    multiply(op, on,
             {.a = cuda_matrix(a),
              .b = {x.raw(), a.dtype(), 1, k, 1, 0, x.stride(0), 1},
              .out = {out->raw(), a.dtype(), 1, m, 1, 0, 1, 1},
              .added = &start,
              .alpha = alpha,
              .beta = beta});
    give(ret0, std::move(out), op);
  });
}

namespace {

[[maybe_unused]] const bool registered = [] {
  cuda_ops.mm_out = aoti_torch_cuda_mm_out;
  cuda_ops.bmm_out = aoti_torch_cuda_bmm_out;
  cuda_ops.addmm_out = aoti_torch_cuda_addmm_out;
  return true;
}();

}  // namespace
}  // namespace untorch::shims
