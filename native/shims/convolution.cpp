// Convolution: checks the arguments as PyTorch does, gives the result PyTorch's memory format, and chooses the kernel.
//
// On the CPU ours compute everything. On CUDA compute_on_cuda() asks cuDNN and our direct kernel in turn.
#include "shims/convolution.h"

#include <algorithm>

#include "cuda/blas.h"
#include "cuda/tf32.h"
#include "shims/gemm_cuda.h"
#include "shims/nn.h"

namespace untorch::shims {
namespace {

using kernels::ConvolutionShape;
using kernels::ConvolutionStrides;

// Three-dimensional sizes out of the last `n` of a list, leading ones added.
std::array<std::int64_t, 3> lift(DimSpan values, std::int64_t n, std::int64_t missing) {
  std::array<std::int64_t, 3> out{missing, missing, missing};
  const std::size_t count = static_cast<std::size_t>(n);
  for (std::size_t d = 0; d < count; ++d) out[3 - count + d] = values[values.size() - count + d];
  return out;
}

std::array<std::int64_t, 3> lifted_list(DimSpan values, std::int64_t n, std::int64_t missing, const char* op,
                                        const char* argument) {
  const auto list = expand_list(values, n, op, argument);
  return lift(DimSpan{list.data(), static_cast<std::size_t>(n)}, n, missing);
}

// The output padding of `n` spatial dimensions, at the end of three; zeros unless transposed.
std::array<std::int64_t, 3> output_padding_of(const char* op, const ConvolutionArguments& arguments, std::int64_t n) {
  if (!arguments.transposed) return {0, 0, 0};
  return lifted_list(arguments.output_padding, n, 0, op, "output_padding");
}

// Throws unless ranks, dtypes and channels agree.
void check_convolution(const char* op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                       const ConvolutionArguments& arguments) {
  const std::int64_t ndim = weight.dim();
  check(ndim >= 3 && ndim <= 5, op, ": argument 'weight' must be 3-D, 4-D or 5-D, got shape ",
        to_string(weight.sizes()));
  check(input.dim() == ndim, op, ": argument 'input' must be ", ndim, "-D like weight ", to_string(weight.sizes()),
        ", got shape ", to_string(input.sizes()));
  check(input.dtype() == weight.dtype(), op, ": input is ", dtype_name(input.dtype()), " but weight is ",
        dtype_name(weight.dtype()), "; convert one of them");
  if (!is_floating(input.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(input.dtype()),
                " is not supported, expected float16, bfloat16, float32 or float64");
  }
  check(arguments.groups > 0, op, ": argument 'groups' must be positive, got ", arguments.groups);
  const std::int64_t groups = arguments.groups;
  const std::int64_t expected = arguments.transposed ? weight.size(0) : weight.size(1) * groups;
  check(weight.size(0) % groups == 0, op, ": weight ", to_string(weight.sizes()), " does not divide into ", groups,
        " groups");
  check(input.size(1) == expected, op, ": weight ", to_string(weight.sizes()), " with groups=", groups, " expects ",
        expected, " input channels, got input ", to_string(input.sizes()));
  if (bias != nullptr) {
    const std::int64_t out = arguments.transposed ? weight.size(1) * groups : weight.size(0);
    check(bias->dim() == 1 && bias->size(0) == out, op, ": argument 'bias' must have shape [", out, "], got ",
          to_string(bias->sizes()));
    check(bias->dtype() == input.dtype(), op, ": bias is ", dtype_name(bias->dtype()), " but input is ",
          dtype_name(input.dtype()), "; convert one of them");
  }
}

// The sizes of a problem that check_convolution let pass; channels_last is left false. Throws on bad lists, kernels
// larger than the padded input, and negative outputs.
ConvolutionShape convolution_shape(const char* op, const Tensor& input, const Tensor& weight,
                                   const ConvolutionArguments& arguments) {
  const std::int64_t n = weight.dim() - 2;
  ConvolutionShape shape{};
  shape.batch = input.size(0);
  shape.groups = arguments.groups;
  shape.in_channels = input.size(1) / arguments.groups;
  shape.out_channels = arguments.transposed ? weight.size(1) : weight.size(0) / arguments.groups;
  shape.input = lift(input.sizes(), n, 1);
  shape.kernel = lift(weight.sizes(), n, 1);
  shape.stride = lifted_list(arguments.stride, n, 1, op, "stride");
  shape.padding = lifted_list(arguments.padding, n, 0, op, "padding");
  shape.dilation = lifted_list(arguments.dilation, n, 1, op, "dilation");
  const auto extra = output_padding_of(op, arguments, n);
  for (std::size_t d = 0; d < 3; ++d) {
    check(shape.kernel[d] > 0, op, ": argument 'weight' has an empty kernel, shape ", to_string(weight.sizes()));
    check(shape.stride[d] > 0, op, ": argument 'stride' must be positive, got ", to_string(arguments.stride));
    check(shape.dilation[d] > 0, op, ": argument 'dilation' must be positive, got ", to_string(arguments.dilation));
    check(shape.padding[d] >= 0, op, ": argument 'padding' must not be negative, got ", to_string(arguments.padding));
    const std::int64_t reach = shape.dilation[d] * (shape.kernel[d] - 1);
    if (arguments.transposed) {
      check(extra[d] >= 0 && (extra[d] < shape.stride[d] || extra[d] < shape.dilation[d]), op,
            ": argument 'output_padding' must be smaller than stride or dilation, got ",
            to_string(arguments.output_padding));
      shape.output[d] = (shape.input[d] - 1) * shape.stride[d] - 2 * shape.padding[d] + reach + extra[d] + 1;
    } else {
      const std::int64_t padded = shape.input[d] + 2 * shape.padding[d];
      check(padded > reach, op, ": kernel ", to_string(weight.sizes()), " with dilation ",
            to_string(arguments.dilation), " is larger than the padded input, got input ", to_string(input.sizes()),
            " with padding ", to_string(arguments.padding));
      shape.output[d] = (padded - reach - 1) / shape.stride[d] + 1;
    }
    check(shape.output[d] >= 0, op, ": the output size is negative for input ", to_string(input.sizes()),
          " and weight ", to_string(weight.sizes()));
  }
  return shape;
}

Dims convolution_output_sizes(const Tensor& input, const ConvolutionShape& shape) {
  Dims sizes(input.sizes());
  sizes[1] = shape.out_channels * shape.groups;
  const std::size_t n = sizes.size() - 2;
  for (std::size_t d = 0; d < n; ++d) sizes[2 + d] = shape.output[3 - n + d];
  return sizes;
}

// True when oneDNN serves the dtype on this CPU, as PyTorch asks it: the half types need instructions for them.
bool onednn_serves(DType dtype) {
  if (dtype == DType::kFloat32) return true;
#if defined(__x86_64__)
  if (dtype == DType::kBFloat16) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
  }
  if (dtype == DType::kFloat16) return __builtin_cpu_supports("avx512fp16");
#endif
  return false;
}

// The memory format that PyTorch's own choice of backend gives; compiled models count on it. Channels last wins when
// either operand has it.
//
// CPU: in three dimensions only where oneDNN is the backend, which small float32 problems, dtypes that it does not
// serve on this CPU and large output padding are not given to. CUDA: not for float64, and not for what PyTorch does not
// give cuDNN (empty problems and large output padding).
bool gives_channels_last(const Op& op, const Tensor& input, const Tensor& weight, const ConvolutionArguments& arguments,
                         const ConvolutionShape& shape) {
  if (!suggests_channels_last(input) && !suggests_channels_last(weight)) return false;
  if (op.on_cuda() && (input.dtype() == DType::kFloat64 || input.numel() == 0 || weight.numel() == 0)) return false;
  if (!op.on_cuda() && input.dim() == 4) return true;
  if (!op.on_cuda() && !onednn_serves(input.dtype())) return false;
  const auto extra = output_padding_of(op, arguments, input.dim() - 2);
  for (std::size_t d = 0; d < 3; ++d) {
    if (arguments.transposed && extra[d] >= shape.stride[d]) return false;
  }
  if (op.on_cuda() || input.dtype() != DType::kFloat32) return true;
  constexpr std::int64_t kLargeEnough = 20480;
  return shape.groups > 1 || (weight.size(-1) > 3 && weight.size(-2) > 3) || input.size(0) > 1 ||
         input.size(0) * input.size(1) * input.size(2) * input.size(3) > kLargeEnough;
}

// A problem that passed the checks, with its result. bias: null, or row-major on CUDA. The residual is laid out like
// the result; it and the epilogue are CUDA's.
struct Problem {
  const ConvolutionShape& shape;
  bool transposed;
  const Tensor &input, &weight;
  const Tensor* bias;
  const Tensor& out;
  const Tensor* residual = nullptr;
  kernels::ConvolutionEpilogue epilogue = {};
  std::string_view plan = {};

  bool depthwise() const noexcept { return !transposed && shape.in_channels == 1 && shape.groups > 1; }
  const void* bias_data() const noexcept { return bias == nullptr ? nullptr : bias->raw(); }
  const void* residual_data() const noexcept { return residual == nullptr ? nullptr : residual->raw(); }
};

// [channels, 1, kernel…] as [kernel…, channels].
TensorPtr depthwise_weight(const Tensor& weight) {
  Dims sizes, strides;
  sizes.resize(static_cast<std::size_t>(weight.dim() - 1));
  strides.resize(sizes.size());
  for (std::size_t d = 0; d + 1 < sizes.size(); ++d) {
    sizes[d] = weight.sizes()[d + 2];
    strides[d] = weight.strides()[d + 2];
  }
  sizes[sizes.size() - 1] = weight.size(0);
  strides[sizes.size() - 1] = weight.stride(0);
  return contiguous(*weight.view(sizes, strides, weight.storage_offset()));
}

// float32 and float64.
void compute_on_cpu(const Problem& p) {
  namespace cpu = kernels::cpu;
  const DType dtype = p.out.dtype();
  const TensorPtr row = p.bias == nullptr ? nullptr : contiguous(*p.bias);
  const void* const bias = row == nullptr ? nullptr : row->raw();
  if (p.transposed) {
    const TensorPtr x = contiguous(p.input), w = contiguous(p.weight);
    const TensorPtr rows = p.out.is_contiguous() ? nullptr : Tensor::empty(p.out.sizes(), dtype);
    cpu::convolution_transposed(p.shape, dtype, x->raw(), w->raw(), bias, rows ? rows->raw() : p.out.raw());
    if (rows) copy_cpu(p.out, *rows);
    return;
  }
  const bool last = p.shape.channels_last;
  const TensorPtr x = last ? channels_last_contiguous(p.input) : contiguous(p.input);
  if (p.depthwise() && (!last || p.shape.out_channels == 1)) {
    const TensorPtr w = last ? depthwise_weight(p.weight) : contiguous(p.weight);
    cpu::convolution_depthwise(p.shape, dtype, x->raw(), w->raw(), bias, p.out.raw());
  } else {
    const TensorPtr w = last ? channels_last_contiguous(p.weight) : contiguous(p.weight);
    cpu::convolution(p.shape, dtype, x->raw(), w->raw(), bias, p.out.raw());
  }
}

// The half types in float32.
void compute_in_float32(const Problem& p) {
  const TensorPtr x = empty_format(p.input.sizes(), DType::kFloat32, p.shape.channels_last);
  copy_cpu(*x, p.input);
  const TensorPtr w = to_dtype(p.weight, DType::kFloat32);
  const TensorPtr b = p.bias == nullptr ? nullptr : to_dtype(*p.bias, DType::kFloat32);
  const TensorPtr wide = empty_format(p.out.sizes(), DType::kFloat32, p.shape.channels_last);
  compute_on_cpu({p.shape, p.transposed, *x, *w, b.get(), *wide});
  copy_cpu(p.out, *wide);
}

// Batch, channel and three spatial strides; the leading dimensions of size 1 have stride 0.
ConvolutionStrides strides_of(const Tensor& tensor) {
  ConvolutionStrides out{};
  const std::int64_t n = tensor.dim() - 2;
  out.at[0] = tensor.stride(0);
  out.at[1] = tensor.stride(1);
  for (std::int64_t d = 0; d < n; ++d) out.at[5 - n + d] = tensor.stride(2 + d);
  return out;
}

// CUDA's backends. Each computes the whole problem, or says that it does not serve it.

// The steps behind a convolution that is computed, in a kernel of their own.
template <class On>
void finish(const On& on, const Problem& p, const void* bias, const void* residual,
            const kernels::ConvolutionEpilogue& epilogue) {
  on.launched(kernels::cuda::convolution_epilogue(p.shape, p.input.dtype(), bias, residual, epilogue, p.out.raw(),
                                                  on.stream()));
}

template <class On>
void direct(const On& on, const Problem& p) {
  on.launched(kernels::cuda::convolution_direct(p.shape, p.transposed, p.input.dtype(), p.input.raw(),
                                                strides_of(p.input), p.weight.raw(), strides_of(p.weight),
                                                p.bias_data(), p.out.raw(), on.stream()));
  finish(on, p, nullptr, p.residual_data(), p.epilogue);
}

template <class On>
void depthwise_rows(const On& on, const Problem& p) {
  const TensorPtr x = contiguous(p.input), w = contiguous(p.weight);
  on.launched(kernels::cuda::convolution_depthwise_rows(p.shape, p.input.dtype(), x->raw(), w->raw(), p.bias_data(),
                                                        p.out.raw(), on.stream()));
  finish(on, p, nullptr, p.residual_data(), p.epilogue);
}

template <class On>
void depthwise(const On& on, const Problem& p) {
  const bool last = p.shape.channels_last;
  const TensorPtr x = last ? channels_last_contiguous(p.input) : contiguous(p.input);
  const TensorPtr w = last ? depthwise_weight(p.weight) : contiguous(p.weight);
  on.launched(kernels::cuda::convolution_depthwise(p.shape, p.input.dtype(), x->raw(), w->raw(), p.bias_data(),
                                                   p.residual_data(), p.epilogue, p.out.raw(), on.stream()));
}

// Groups with large kernels, as a GEMM a group: cuDNN launches a kernel a group for them, which few output positions do
// not fill the GPU with. Where there are many, its kernels for the half types lose the tensor cores, row-major
// somewhere between 63 and 128 kernel positions and channels last before; those for float32 are slow channels last.
bool serves_grouped_gemm(const Problem& p) {
  constexpr std::int64_t kLeastChannels = 16, kFewPositions = 128, kLargeKernel = 16, kHugeKernel = 128;
  const ConvolutionShape& s = p.shape;
  const DType dtype = p.out.dtype();
  if (s.groups == 1 || s.in_channels < kLeastChannels || p.transposed || dtype == DType::kFloat64) return false;
  if (s.channels_last || s.batch * s.output_size() <= kFewPositions) {
    return s.kernel_size() >= kLargeKernel && cuda::try_blas(nullptr) != nullptr;
  }
  return dtype != DType::kFloat32 && s.kernel_size() >= kHugeKernel && cuda::try_blas(nullptr) != nullptr;
}

// Channels last: rows that are dense along k and along the outputs are those that cuBLASLt's kernels for tensor cores
// take, whatever the number of positions.
template <class On>
void grouped_gemm(const On& on, const Problem& p) {
  if (!p.shape.channels_last) {
    const TensorPtr out = empty_format(p.out.sizes(), p.out.dtype(), true, p.out.device());
    ConvolutionShape shape = p.shape;
    shape.channels_last = true;
    grouped_gemm(on, {shape, false, p.input, p.weight, p.bias, *out});
    copy(p.out, *out);
    return;
  }
  constexpr std::int64_t kMostElements = std::int64_t{1} << 25;  // of the columns, which L2 keeps in part
  const ConvolutionShape& s = p.shape;
  const DType dtype = p.out.dtype();
  const std::int64_t depth = s.in_channels * s.kernel_size(), positions = s.output_size(), size = element_size(dtype);
  const std::int64_t part = std::clamp(kMostElements / (s.groups * depth), std::int64_t{1}, positions);
  const std::int64_t channels = s.groups * s.out_channels;
  const TensorPtr x = channels_last_contiguous(p.input), w = channels_last_contiguous(p.weight);
  const TensorPtr columns = Tensor::empty(Dims{s.groups, part, depth}, dtype, p.out.device());
  const std::int64_t image_bytes = s.groups * s.in_channels * s.input_size() * size;
  for (std::int64_t n = 0; n < s.batch; ++n) {
    for (std::int64_t first = 0; first < positions; first += part) {
      const std::int64_t count = std::min(part, positions - first);
      on.launched(kernels::cuda::convolution_columns(s, dtype, static_cast<const char*>(x->raw()) + n * image_bytes,
                                                     first, count, columns->raw(), on.stream()));
      void* const to = static_cast<char*>(p.out.raw()) + (n * positions + first) * channels * size;
      CudaGemm gemm;
      gemm.a = {columns->raw(), dtype, s.groups, count, depth, depth * count, depth, 1};
      gemm.b = {w->raw(), dtype, s.groups, depth, s.out_channels, s.out_channels * depth, 1, depth};
      gemm.out = {to, dtype, s.groups, count, s.out_channels, s.out_channels, channels, 1};
      gemm_cuda("convolution", on, gemm);
    }
  }
  finish(on, p, p.bias_data(), p.residual_data(), p.epilogue);
}

// Everything, in one kernel where cuDNN has one: channels last, and not transposed.
template <class On>
bool cudnn(const On& on, const Problem& p) {
  const auto dense = [&](const Tensor& t) {
    return p.shape.channels_last ? channels_last_contiguous(t) : contiguous(t);
  };
  const TensorPtr x = dense(p.input), w = dense(p.weight);
  cuda::DnnConvolution problem{p.shape, p.input.dtype(), p.transposed, cuda::tf32().convolution};
  problem.plan = p.plan;
  const cuda::DnnOperands operands{x->raw(), w->raw(), p.out.raw(), p.bias_data(), p.residual_data()};
  const bool relu = p.epilogue.activation == kernels::FusedUnary::kRelu;
  if (p.shape.channels_last && !p.transposed && p.input.dtype() != DType::kFloat64) {
    problem.bias = p.bias != nullptr, problem.residual = p.residual != nullptr, problem.relu = relu;
    if (problem.fused() && cuda::dnn_convolution(problem, operands, on.index(), on.stream())) {
      if (!relu) finish(on, p, nullptr, nullptr, p.epilogue);
      return true;
    }
    problem.bias = problem.residual = problem.relu = false;
  }
  if (!cuda::dnn_convolution(problem, operands, on.index(), on.stream())) return false;
  finish(on, p, p.bias_data(), p.residual_data(), p.epilogue);
  return true;
}

// Row-major, and then put into the result's format.
template <class On>
bool cudnn_row_major(const On& on, const Problem& p) {
  ConvolutionShape rows = p.shape;
  rows.channels_last = false;
  const TensorPtr out = Tensor::empty(p.out.sizes(), p.out.dtype(), p.out.device());
  if (!cudnn(on, {rows, p.transposed, p.input, p.weight, p.bias, *out})) return false;
  copy(p.out, *out);
  finish(on, p, nullptr, p.residual_data(), p.epilogue);
  return true;
}

// Which backend computes a convolution on CUDA. Depthwise problems are bound by memory and go to kernels of ours; what
// they do not serve goes to cuDNN, if it is channels last (5 times as fast there as the direct kernel), and else to the
// direct one. Groups with large kernels are GEMMs. Everything else is cuDNN's. What cuDNN has no deterministic
// engine for in one layout is tried row-major; what it refuses there too (more than 2^31 elements, output padding that
// is not smaller than the stride) the direct kernel computes as well.
template <class On>
void compute_on_cuda(const On& on, const Problem& p) {
  // Without input channels the sum is empty: the direct kernel writes zeros or the bias.
  const bool some = p.shape.in_channels != 0;
  const bool flat_last = p.shape.channels_last && p.shape.out_channels == 1 && p.shape.kernel[0] == 1;
  if (p.depthwise() && kernels::cuda::serves_depthwise_rows(p.shape)) {
    depthwise_rows(on, p);
    return;
  }
  if (p.depthwise() && kernels::cuda::serves_depthwise(p.shape, p.input.dtype())) {
    depthwise(on, p);
    return;
  }
  if (some && serves_grouped_gemm(p)) {
    grouped_gemm(on, p);
    return;
  }
  if (some && (!p.depthwise() || flat_last) && cudnn(on, p)) return;
  if (some && !p.depthwise() && p.shape.channels_last && cudnn_row_major(on, p)) return;
  direct(on, p);
}

}  // namespace

TensorPtr convolution(const Op& op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                      const ConvolutionArguments& arguments) {
  check_convolution(op, input, weight, bias, arguments);
  ConvolutionShape shape = convolution_shape(op, input, weight, arguments);
  shape.channels_last = gives_channels_last(op, input, weight, arguments, shape);
  const Dims sizes = convolution_output_sizes(input, shape);
  const DType dtype = input.dtype();
  TensorPtr out;
  run(
      op, {&input, &weight, bias},
      [&] {
        out = empty_format(sizes, dtype, shape.channels_last);
        if (out->numel() == 0) return;
        const bool wide = dtype == DType::kFloat32 || dtype == DType::kFloat64;
        (wide ? compute_on_cpu : compute_in_float32)({shape, arguments.transposed, input, weight, bias, *out});
      },
      [&](const auto& on) {
        out = empty_format(sizes, dtype, shape.channels_last, input.device());
        if (out->numel() == 0) return;
        const TensorPtr row = bias == nullptr ? nullptr : contiguous(*bias);
        compute_on_cuda(on, Problem{shape, arguments.transposed, input, weight, row.get(), *out});
      });
  return out;
}

TensorPtr convolution_with_tail(const Op& op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                                const ConvolutionArguments& arguments, const ConvolutionTail& tail) {
  check_convolution(op, input, weight, bias, arguments);
  ConvolutionShape shape = convolution_shape(op, input, weight, arguments);
  shape.channels_last = true;
  const Dims sizes = convolution_output_sizes(input, shape);
  const Tensor* const residual = tail.residual;
  if (residual != nullptr) {
    check(residual->sizes() == DimSpan(sizes), op, ": argument 'residual' must have shape ", to_string(sizes), ", got ",
          to_string(residual->sizes()));
    check(residual->dtype() == input.dtype(), op, ": residual is ", dtype_name(residual->dtype()), " but input is ",
          dtype_name(input.dtype()), "; convert one of them");
  }
  TensorPtr out;
  run(
      op, {&input, &weight, bias, residual},
      [&] { throw_error(ErrorKind::kUnsupported, op, ": tensors must be on CUDA, got ", device_name(input.device())); },
      [&](const auto& on) {
        out = empty_format(sizes, input.dtype(), true, input.device());
        if (out->numel() == 0) return;
        const TensorPtr row = bias == nullptr ? nullptr : contiguous(*bias);
        const TensorPtr added = residual == nullptr ? nullptr : channels_last_contiguous(*residual);
        compute_on_cuda(on, Problem{shape, arguments.transposed, input, weight, row.get(), *out, added.get(),
                                    tail.epilogue, tail.plan});
      });
  return out;
}

cuda::DnnTuning tune_convolution(const Op& op, const Tensor& out, const Tensor& input, const Tensor& weight,
                                 const Tensor* bias, const ConvolutionArguments& arguments, const ConvolutionTail& tail,
                                 bool tf32) {
  check_convolution(op, input, weight, bias, arguments);
  ConvolutionShape shape = convolution_shape(op, input, weight, arguments);
  shape.channels_last = true;
  check(out.sizes() == DimSpan(convolution_output_sizes(input, shape)), op, ": argument 'out' has shape ",
        to_string(out.sizes()));
  const OnDevice on(op.name, input, {&input, &weight, bias, tail.residual, &out});
  const TensorPtr x = channels_last_contiguous(input), w = channels_last_contiguous(weight);
  const TensorPtr row = bias == nullptr ? nullptr : contiguous(*bias);
  const TensorPtr added = tail.residual == nullptr ? nullptr : channels_last_contiguous(*tail.residual);
  cuda::DnnConvolution problem{shape, input.dtype(), arguments.transposed, tf32};
  const cuda::DnnOperands operands{x->raw(), w->raw(), out.raw(), row == nullptr ? nullptr : row->raw(),
                                   added == nullptr ? nullptr : added->raw()};
  if (!arguments.transposed) {
    problem.bias = bias != nullptr, problem.residual = added != nullptr;
    problem.relu = tail.epilogue.activation == kernels::FusedUnary::kRelu;
    cuda::DnnTuning found = cuda::dnn_tune(problem, operands, on.index(), on.stream());
    if (found.best_us > 0 || !problem.fused()) return found;
    problem.bias = problem.residual = problem.relu = false;
  }
  return cuda::dnn_tune(problem, operands, on.index(), on.stream());
}

}  // namespace untorch::shims

using namespace untorch;
using namespace untorch::shims;

UNTORCH_OP(convolution,
           (AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, const std::int64_t* stride,
            std::int64_t stride_len, const std::int64_t* padding, std::int64_t padding_len,
            const std::int64_t* dilation, std::int64_t dilation_len, std::int32_t transposed,
            const std::int64_t* output_padding, std::int64_t output_padding_len, std::int64_t groups,
            AtenTensorHandle* ret0),
           input, weight, bias, stride, stride_len, padding, padding_len, dilation, dilation_len, transposed,
           output_padding, output_padding_len, groups, ret0) {
  const ConvolutionArguments arguments{ints(stride, stride_len),
                                       ints(padding, padding_len),
                                       ints(dilation, dilation_len),
                                       ints(output_padding, output_padding_len),
                                       transposed != 0,
                                       groups};
  const Tensor &x = op.input(input, "input"), &w = op.input(weight, "weight");
  give(ret0, convolution(op, x, w, op.optional_input(bias, "bias"), arguments), op);
}

UNTORCH_SHIM aoti_torch_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias,
                                    const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding,
                                    std::int64_t padding_len, const std::int64_t* dilation, std::int64_t dilation_len,
                                    int transposed, const std::int64_t* output_padding, std::int64_t output_padding_len,
                                    std::int64_t groups, AtenTensorHandle* ret) {
  return guarded("convolution", [&] {
    convolution_op(Op::of("convolution", input, "input"), input, weight, &bias, stride, stride_len, padding,
                   padding_len, dilation, dilation_len, transposed, output_padding, output_padding_len, groups, ret);
  });
}
