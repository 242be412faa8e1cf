// mm, addmm, bmm, baddbmm and their relatives on the CPU.
#include "shims/cpu/matmul.h"

#include "shims/device_ops.h"

namespace untorch::shims {
namespace {

void mm_out(const char* op, AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  const Tensor& a = cpu_input(self, op, "self");
  const Tensor& b = cpu_input(mat2, op, "mat2");
  const Tensor& c = cpu_input(out, op, "out");
  check_rank(op, "self", a, 2);
  check_rank(op, "mat2", b, 2);
  check_product(op, "self", a, "mat2", b);
  check_out(op, c, a.dtype(), Dims{a.size(0), b.size(1)});
  multiply(op, a.dtype(), matrix_of(a), matrix_of(b), matrix_of(c), 0.0, 1.0);
}

void addmm_into(const char* op, const Tensor& c, const Tensor& self, const Tensor& a, const Tensor& b, double beta,
                double alpha) {
  check_rank(op, "mat1", a, 2);
  check_rank(op, "mat2", b, 2);
  check_product(op, "mat1", a, "mat2", b);
  check_out(op, c, a.dtype(), Dims{a.size(0), b.size(1)});
  if (beta != 0.0) seed_out(op, c, self);
  multiply(op, a.dtype(), matrix_of(a), matrix_of(b), matrix_of(c), beta, alpha);
}

void addmm_out(const char* op, AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
               AtenTensorHandle mat2, double beta, double alpha) {
  addmm_into(op, cpu_input(out, op, "out"), cpu_input(self, op, "self"), cpu_input(mat1, op, "mat1"),
             cpu_input(mat2, op, "mat2"), beta, alpha);
}

void bmm_out(const char* op, AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  const Tensor& a = cpu_input(self, op, "self");
  const Tensor& b = cpu_input(mat2, op, "mat2");
  const Tensor& c = cpu_input(out, op, "out");
  check_rank(op, "self", a, 3);
  check_rank(op, "mat2", b, 3);
  check_product(op, "self", a, "mat2", b);
  check_out(op, c, a.dtype(), Dims{a.size(0), a.size(1), b.size(2)});
  multiply_batch(op, a, b, c, 0.0, 1.0);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  return guarded("mm", [&] { mm_out("mm", out, self, mat2); });
}

UNTORCH_SHIM aoti_torch_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  if (on_cuda(self) && cuda_ops.mm_out != nullptr) return cuda_ops.mm_out(out, self, mat2);
  return guarded("mm", [&] { mm_out("mm", out, self, mat2); });
}

UNTORCH_SHIM aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
                                      AtenTensorHandle mat2, double beta, double alpha) {
  return guarded("addmm", [&] { addmm_out("addmm", out, self, mat1, mat2, beta, alpha); });
}

UNTORCH_SHIM aoti_torch_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1,
                                  AtenTensorHandle mat2, float beta, float alpha) {
  if (on_cuda(mat1) && cuda_ops.addmm_out != nullptr) return cuda_ops.addmm_out(out, self, mat1, mat2, beta, alpha);
  return guarded("addmm", [&] { addmm_out("addmm", out, self, mat1, mat2, beta, alpha); });
}

UNTORCH_SHIM aoti_torch_cpu_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  return guarded("bmm", [&] { bmm_out("bmm", out, self, mat2); });
}

UNTORCH_SHIM aoti_torch_bmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  if (on_cuda(self) && cuda_ops.bmm_out != nullptr) return cuda_ops.bmm_out(out, self, mat2);
  return guarded("bmm", [&] { bmm_out("bmm", out, self, mat2); });
}

UNTORCH_SHIM aoti_torch_cpu_baddbmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle batch1,
                                        AtenTensorHandle batch2, double beta, double alpha) {
  constexpr const char* op = "baddbmm";
  return guarded(op, [&] {
    const Tensor& a = cpu_input(batch1, op, "batch1");
    const Tensor& b = cpu_input(batch2, op, "batch2");
    const Tensor& c = cpu_input(out, op, "out");
    const Tensor& added = cpu_input(self, op, "self");
    check_rank(op, "batch1", a, 3);
    check_rank(op, "batch2", b, 3);
    check_product(op, "batch1", a, "batch2", b);
    check_out(op, c, a.dtype(), Dims{a.size(0), a.size(1), b.size(2)});
    if (beta != 0.0) seed_out(op, c, added);
    multiply_batch(op, a, b, c, beta, alpha);
  });
}

// beta·self + alpha·Σ batch1[i]·batch2[i]. The half types sum the batch in float.
UNTORCH_SHIM aoti_torch_cpu_addbmm(AtenTensorHandle self, AtenTensorHandle batch1, AtenTensorHandle batch2, double beta,
                                   double alpha, AtenTensorHandle* ret0) {
  constexpr const char* op = "addbmm";
  return guarded(op, [&] {
    const Tensor& a = cpu_input(batch1, op, "batch1");
    const Tensor& b = cpu_input(batch2, op, "batch2");
    const Tensor& added = cpu_input(self, op, "self");
    check_rank(op, "batch1", a, 3);
    check_rank(op, "batch2", b, 3);
    check_product(op, "batch1", a, "batch2", b);
    check(added.dtype() == a.dtype(), op, ": 'self' must have the operands' dtype ", dtype_name(a.dtype()), ", got ",
          dtype_name(added.dtype()));
    const bool half = a.dtype() == DType::kFloat16 || a.dtype() == DType::kBFloat16;
    const DType compute = half ? DType::kFloat32 : a.dtype();
    const Dims sizes{a.size(1), b.size(2)};
    TensorPtr sum = beta == 0.0 ? Tensor::zeros(sizes, compute) : Tensor::empty(sizes, compute);
    const TensorPtr left = to_dtype(a, compute), right = to_dtype(b, compute), start = to_dtype(added, compute);
    if (beta != 0.0) seed_out(op, *sum, *start);
    if (a.size(0) == 0 && beta != 0.0 && beta != 1.0) {  // no product to carry beta
      const MatrixView none{nullptr, a.size(1), 0, 0, 0};
      multiply(op, compute, none, MatrixView{nullptr, 0, b.size(2), 0, 0}, matrix_of(*sum), beta, alpha);
    }
    for (std::int64_t i = 0; i < a.size(0); ++i) {
      multiply(op, compute, matrix_of(*left, i), matrix_of(*right, i), matrix_of(*sum), i == 0 ? beta : 1.0, alpha);
    }
    give(ret0, half ? to_dtype(*sum, a.dtype()) : std::move(sum), op);
  });
}

UNTORCH_SHIM aoti_torch_cpu_addmv(AtenTensorHandle self, AtenTensorHandle mat, AtenTensorHandle vec, double beta,
                                  double alpha, AtenTensorHandle* ret0) {
  constexpr const char* op = "addmv";
  return guarded(op, [&] {
    const Tensor& a = cpu_input(mat, op, "mat");
    const Tensor& x = cpu_input(vec, op, "vec");
    const Tensor& added = cpu_input(self, op, "self");
    check_rank(op, "mat", a, 2);
    check_rank(op, "vec", x, 1);
    const TensorPtr column = x.view(Dims{x.size(0), 1}, Dims{x.stride(0), 1}, x.storage_offset());
    check_product(op, "mat", a, "vec", *column);
    TensorPtr out = Tensor::empty(Dims{a.size(0)}, a.dtype());
    if (beta != 0.0) seed_out(op, *out, added);
    const MatrixView result{static_cast<std::byte*>(out->raw()), a.size(0), 1, 1, 1};
    multiply(op, a.dtype(), matrix_of(a), matrix_of(*column), result, beta, alpha);
    give(ret0, std::move(out), op);
  });
}

// a·b + c·d.
UNTORCH_SHIM aoti_torch__mm_plus_mm_out(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b,
                                        AtenTensorHandle c, AtenTensorHandle d) {
  constexpr const char* op = "_mm_plus_mm";
  if (on_cuda(a) && cuda_ops.mm_out != nullptr && cuda_ops.addmm_out != nullptr) {
    const AOTITorchError code = cuda_ops.mm_out(out, a, b);
    return code != 0 ? code : cuda_ops.addmm_out(out, out, c, d, 1.0, 1.0);
  }
  return guarded(op, [&] {
    mm_out(op, out, a, b);
    addmm_out(op, out, out, c, d, 1.0, 1.0);
  });
}

}  // namespace untorch::shims
