// The GEMM dispatch of CUDA: the small-M kernel or cuBLASLt, with a copy of every operand that neither reads in place.
#include <algorithm>

#include "cuda/blas.h"
#include "cuda/tf32.h"
#include "kernels/cuda/gemm/heuristic.h"
#include "shims/gemm_cuda.h"

namespace untorch::shims {
namespace {

using kernels::Matrix;
using kernels::cuda::Activation;
using kernels::cuda::GemmChoice;
using kernels::cuda::SmallGemm;

// cuBLAS's and the grid's limit.
constexpr std::int64_t kMaxBatch = 65535;

// Strides of dimensions of size 1 say nothing: make them what a dense matrix has, so that later tests are simple.
void normalize(Matrix& m) {
  if (m.rows == 1 && m.cols == 1) {
    m.row_stride = m.col_stride = 1;
  } else if (m.cols == 1) {
    m.col_stride = 1;
  } else if (m.rows == 1) {
    m.row_stride = m.col_stride == 1 ? m.cols : 1;
  }
  if (m.batch == 1) m.batch_stride = 0;
}

// A tensor that broadcasts to [batch, rows, cols] (or to [rows, cols], with batch 1), as a matrix of that shape.
Matrix broadcast_matrix(const Tensor& tensor, std::int64_t batch, std::int64_t rows, std::int64_t cols) {
  const auto stride = [&](std::int64_t from_end) {
    return tensor.dim() < from_end || tensor.size(-from_end) == 1 ? 0 : tensor.stride(-from_end);
  };
  return {tensor.raw(), tensor.dtype(), batch, rows, cols, stride(3), stride(2), stride(1)};
}

// The matrices as a [batch, rows, cols] tensor over the same memory, and a dense copy of them.
Tensor borrowed(const Matrix& m, Device device) {
  const Dims sizes{m.batch, m.rows, m.cols}, strides{m.batch_stride, m.row_stride, m.col_stride};
  const auto nbytes = static_cast<std::size_t>(storage_extent(sizes, strides)) * element_size(m.dtype);
  return {StorageRef::borrow(m.data, nbytes, device), 0, m.dtype, sizes, strides};
}

TensorPtr dense_copy(const Matrix& m, Device device) {
  TensorPtr out = Tensor::empty(Dims{m.batch, m.rows, m.cols}, m.dtype, device);
  copy(*out, borrowed(m, device));
  return out;
}

// True when the rows are dense runs at a distance that BLAS takes.
bool row_major(const Matrix& m) { return m.col_stride == 1 && m.row_stride >= std::max<std::int64_t>(m.cols, 1); }
bool column_major(const Matrix& m) { return m.row_stride == 1 && m.col_stride >= std::max<std::int64_t>(m.rows, 1); }

Matrix slice(const Matrix& m, std::int64_t first, std::int64_t count) {
  Matrix out = m;
  out.data =
      static_cast<std::byte*>(m.data) + first * m.batch_stride * static_cast<std::int64_t>(element_size(m.dtype));
  out.batch = count;
  return out;
}

Matrix row_slice(const Matrix& m, std::int64_t first, std::int64_t count) {
  Matrix out = m;
  out.data = static_cast<std::byte*>(m.data) + first * m.row_stride * static_cast<std::int64_t>(element_size(m.dtype));
  out.rows = count;
  return out;
}

bool same_layout(const Matrix& x, const Matrix& y) {
  return x.data == y.data && x.row_stride == y.row_stride && x.col_stride == y.col_stride &&
         x.batch_stride == y.batch_stride;
}

SmallGemm small_of(const OnDevice& on, const CudaGemm& p) {
  SmallGemm s;
  s.dtype = p.a.dtype;
  s.batch = p.out.batch, s.m = p.out.rows, s.n = p.out.cols, s.k = p.a.cols;
  s.a = p.a.data, s.a_row = p.a.row_stride, s.a_col = p.a.col_stride, s.a_batch = p.a.batch_stride;
  s.b = p.b.data, s.b_row = p.b.row_stride, s.b_col = p.b.col_stride, s.b_batch = p.b.batch_stride;
  if (p.added) {
    s.c = p.added->data;
    s.c_row = p.added->row_stride, s.c_col = p.added->col_stride, s.c_batch = p.added->batch_stride;
  }
  s.out = p.out.data, s.out_row = p.out.row_stride, s.out_col = p.out.col_stride, s.out_batch = p.out.batch_stride;
  s.alpha = p.alpha, s.beta = p.beta, s.activation = p.activation;
  s.num_sms = on.properties().num_sms;
  s.has_clusters = on.properties().major >= 9;
  s.pdl = on.properties().has_pdl;
  s.max_shared_bytes = on.properties().max_shared_per_block;
  s.b_is_constant = p.b.is_constant;
  return s;
}

// k = 0: out = activation(beta · added), or of zeros.
void epilogue_only(const OnDevice& on, const CudaGemm& p) {
  constexpr std::int64_t kMaxRows = 65535 * 16;
  for (std::int64_t z = 0; z < p.out.batch; z += kMaxBatch) {
    const std::int64_t count = std::min(kMaxBatch, p.out.batch - z);
    for (std::int64_t top = 0; top < p.out.rows; top += kMaxRows) {
      const std::int64_t rows = std::min(kMaxRows, p.out.rows - top);
      CudaGemm part = p;
      part.out = row_slice(slice(p.out, z, count), top, rows);
      part.a = part.b = part.out;  // never read
      part.a.dtype = p.out.dtype;
      part.a.cols = 0;
      if (p.added) part.added = row_slice(slice(*p.added, z, count), top, rows);
      on.launched(kernels::cuda::gemm_small(small_of(on, part), on.stream()));
    }
  }
}

// The operand as cuBLAS takes it; what it does not take is copied, and `keep` holds the copy.
cuda::BlasOperand blas_operand(const Matrix& m, Device device, TensorPtr& keep) {
  if (row_major(m)) return {m.data, m.dtype, false, m.row_stride, m.batch_stride};
  if (column_major(m)) return {m.data, m.dtype, true, m.col_stride, m.batch_stride};
  keep = dense_copy(m, device);
  return {keep->raw(), m.dtype, false, m.cols, m.batch == 1 ? 0 : m.rows * m.cols};
}

cuda::BlasActivation blas_activation(Activation activation) {
  return activation == Activation::kRelu       ? cuda::BlasActivation::kRelu
         : activation == Activation::kGeluTanh ? cuda::BlasActivation::kGeluTanh
                                               : cuda::BlasActivation::kNone;
}

// out is row-major; a batch of at most kMaxBatch.
void gemm_by_blas(const char* op, const OnDevice& on, const CudaGemm& p) {
  TensorPtr keep_a, keep_b;
  cuda::BlasGemm call;
  call.batch = p.out.batch, call.m = p.out.rows, call.n = p.out.cols, call.k = p.a.cols;
  call.a = blas_operand(p.a, on.device(), keep_a);
  call.b = blas_operand(p.b, on.device(), keep_b);
  call.d = p.out.data, call.d_dtype = p.out.dtype, call.ldd = p.out.row_stride,
  call.d_batch_stride = p.out.batch_stride;
  call.alpha = p.alpha;
  call.beta = 0.0;
  const bool full = p.a.dtype == DType::kFloat64;  // has no fused epilogue
  if (!full) call.activation = blas_activation(p.activation);
  const auto run = [&] { return cuda::blas_gemm(op, call, on.index(), on.stream()); };

  bool done = false;
  if (!p.added) {
    done = run();
  } else {
    const Matrix& added = *p.added;
    const bool vector = added.row_stride == 0 && added.col_stride == 1 && added.batch_stride == 0;
    if (vector && p.beta == 1.0 && !full && p.out.batch == 1) {
      call.bias = added.data, call.bias_dtype = added.dtype;
      done = run();
      call.bias = nullptr;
    }
    call.beta = p.beta;
    if (!done && row_major(added)) {
      call.c = added.data, call.ldc = added.row_stride, call.c_batch_stride = added.batch_stride;
      done = run();
      call.c = nullptr;
    }
    if (!done) {
      // Any other layout is copied to out and added in place.
      if (!same_layout(added, p.out)) copy(borrowed(p.out, on.device()), borrowed(added, on.device()));
      done = run();
    }
  }
  const bool fused = done && !full;
  if (!done && call.activation != cuda::BlasActivation::kNone) {
    call.activation = cuda::BlasActivation::kNone;
    done = run();
  }
  if (!done) {
    throw_error(ErrorKind::kUnsupported, op, ": cuBLAS has no algorithm for ", dtype_name(p.a.dtype), " [", call.m,
                ", ", call.k, "] times [", call.k, ", ", call.n, "] on this GPU");
  }
  if (!fused && p.activation != Activation::kNone) {
    CudaGemm last;
    last.out = p.out;
    last.added = p.out;
    last.activation = p.activation;
    epilogue_only(on, last);
  }
}

}  // namespace

CudaGemm gemm_problem(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* added, double alpha,
                      double beta) {
  CudaGemm p{.a = matrix_of(a), .b = matrix_of(b), .out = matrix_of(out), .added = {}, .alpha = alpha, .beta = beta};
  if (added != nullptr) p.added = broadcast_matrix(*added, p.out.batch, p.out.rows, p.out.cols);
  return p;
}

void gemm_cuda(const char* op, const OnDevice& on, const CudaGemm& problem) {
  CudaGemm p = problem;
  if (p.out.batch == 0 || p.out.rows == 0 || p.out.cols == 0) return;
  if (p.beta == 0.0) p.added.reset();
  if (p.a.cols == 0) {
    epilogue_only(on, p);
    return;
  }
  const auto swap_sides = [&] {
    const Matrix left = p.a;
    p.a = p.b.transposed();
    p.b = left.transposed();
    p.out = p.out.transposed();
    if (p.added) p.added = p.added->transposed();
  };
  normalize(p.a), normalize(p.b), normalize(p.out);

  if (p.a.dtype == p.out.dtype) {
    // A small N is a small M of the transposed GEMM.
    const bool tall = p.out.cols <= kernels::cuda::GemmLimits::kRowsOfATile && p.out.rows > p.out.cols &&
                      (p.b.row_stride == 1 || p.a.cols == 1);
    if (tall) swap_sides();
    const SmallGemm small = small_of(on, p);
    if (kernels::cuda::choose(small, cuda::tf32().matmul) == GemmChoice::kSmall) {
      on.launched(kernels::cuda::gemm_small(small, on.stream()));
      return;
    }
    if (tall) swap_sides();
  }

  if (!row_major(p.out) && column_major(p.out)) swap_sides();
  if (!row_major(p.out)) {
    TensorPtr dense = Tensor::empty(Dims{p.out.batch, p.out.rows, p.out.cols}, p.out.dtype, on.device());
    CudaGemm into = p;
    into.out = matrix_of(*dense);
    gemm_cuda(op, on, into);
    copy(borrowed(p.out, on.device()), *dense);
    return;
  }
  if (p.out.batch <= kMaxBatch) {
    gemm_by_blas(op, on, p);
    return;
  }
  for (std::int64_t z = 0; z < p.out.batch; z += kMaxBatch) {
    const std::int64_t count = std::min(kMaxBatch, p.out.batch - z);
    CudaGemm part = p;
    part.a = slice(p.a, z, count), part.b = slice(p.b, z, count), part.out = slice(p.out, z, count);
    if (p.added) part.added = slice(*p.added, z, count);
    gemm_by_blas(op, on, part);
  }
}

}  // namespace untorch::shims
