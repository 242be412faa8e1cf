// nonzero, nonzero_static, masked_select, masked_scatter and repeat_interleave.
#include "kernels/compact.h"

#include <algorithm>

#include "kernels/scan.h"
#include "shims/broadcast.h"
#include "shims/device_work.h"
#include "shims/layout.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::CompactParams;

namespace {

using Columns = std::vector<std::vector<std::int64_t>>;

// Elements of `flags` (seen as `shape`) that are not zero, and what lies there in `values`.
CompactParams compact_params(const char* op, DimSpan shape, const Tensor& flags, const Tensor& values) {
  // Only its strides count: they fix the order.
  const Tensor order({}, 0, DType::kInt64, shape, contiguous_strides(shape));
  CompactParams params;
  params.space = strided<3>(op, shape, {&order, &flags, &values});
  params.flags = flags.raw();
  params.flag_dtype = flags.dtype();
  return params;
}

[[maybe_unused]] TensorPtr count_on(const OnDevice& on, const CompactParams& params) {
  const std::int64_t entries = kernels::cuda::compact_entries(params.space.numel);
  TensorPtr starts = Tensor::empty(DimSpan(&entries, 1), DType::kInt64, on.device());
  on.launched(kernels::cuda::compact_count(params, starts->data<std::int64_t>(), on.stream()));
  return starts;
}

const std::int64_t* last_of(const Tensor& starts) { return starts.data<std::int64_t>() + starts.numel() - 1; }

[[maybe_unused]] std::int64_t counted(const OnDevice& on, const Tensor& starts, const char* op) {
  std::int64_t total = 0;
  read_back(on, op, last_of(starts), &total, 1);
  return total;
}

// The GPU's kernels also know two eight-bit floats.
void check_flags(const Op& op, const Tensor& t) {
  const bool known = t.dtype() == DType::kBool || is_integral(t.dtype()) || is_floating(t.dtype()) ||
                     t.dtype() == DType::kComplex64 || t.dtype() == DType::kComplex128 ||
                     (op.on_cuda() && (t.dtype() == DType::kFloat8E4M3FN || t.dtype() == DType::kFloat8E5M2));
  if (!known) throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()), " is not supported");
}

// PyTorch's layout: each dimension's positions lie together.
TensorPtr coordinates(std::int64_t count, std::int64_t ndim, Device device) {
  const Dims shape{count, ndim}, strides{1, std::max<std::int64_t>(count, 1)};
  return Tensor::empty_strided(shape, strides, DType::kInt64, device);
}

Columns columns_of(const Op& op, const Tensor& t) {
  return kernels::cpu::nonzero(op, t.sizes(), t.dtype(), contiguous(t)->raw());
}

[[maybe_unused]] void write_coordinates(const OnDevice& on, const CompactParams& params, const Tensor& starts,
                                        const Tensor& t, const Tensor& out) {
  on.launched(kernels::cuda::compact_coordinates(params, starts.data<std::int64_t>(), static_cast<int>(t.dim()),
                                                 t.sizes().data(), out.data<std::int64_t>(), out.strides()[0],
                                                 out.strides()[1], out.size(0), on.stream()));
}

const Tensor& mask_input(const Op& op, AtenTensorHandle mask, bool takes_uint8) {
  const Tensor& t = op.input(mask, "mask");
  check(t.dtype() == DType::kBool || (takes_uint8 && t.dtype() == DType::kUInt8), op, ": 'mask' must be bool, got ",
        dtype_name(t.dtype()));
  return t;
}

void check_width(const Op& op, const Tensor& t) {
  if (is_known(t.dtype()) && element_size(t.dtype()) <= 16) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()), " is not supported");
}

const std::uint8_t* flags_of(const Tensor& mask) { return static_cast<const std::uint8_t*>(mask.raw()); }

// The running sums of the counts, and whether one is negative: a flag behind them.
[[maybe_unused]] TensorPtr count_ends(const OnDevice& on, const Op& op, const Tensor& counts) {
  const std::int64_t rows = counts.size(0), entries = rows + 1, one = 1;
  TensorPtr ends = Tensor::empty(DimSpan(&entries, 1), DType::kInt64, on.device());
  const TensorPtr sums = ends->view({&rows, 1}, {&one, 1}, 0);
  kernels::ScanParams params;
  params.lanes = lanes<2>(op, 0, {sums.get(), &counts});
  params.out = sums->raw();
  params.input = counts.raw();
  params.out_dtype = DType::kInt64;
  params.in_dtype = counts.dtype();
  with_scratch(on, kernels::cuda::scan_scratch(1, rows),
               [&](void* scratch) { return kernels::cuda::cumsum(params, scratch, on.stream()); });
  return ends;
}

// Waits for the sum of the counts.
[[maybe_unused]] std::int64_t sum_on(const OnDevice& on, const Op& op, const Tensor& counts, const Tensor& ends) {
  const std::int64_t rows = counts.size(0);
  std::int64_t* const flag = ends.data<std::int64_t>() + rows;
  cuda::check_driver(
      cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(flag), 0, sizeof *flag, on.stream()), op);
  on.launched(kernels::cuda::find_negative(counts.raw(), counts.dtype(), rows, counts.stride(0), flag, on.stream()));
  std::int64_t seen[2] = {};
  read_back(on, op, flag - 1, seen, 2);
  check(seen[1] == 0, op, ": 'repeats' holds a negative count");
  return seen[0];
}

void nonzero(const Op& op, AtenTensorHandle self, AtenTensorHandle* ret0) {
  const Tensor& t = op.input(self, "self");
  check_flags(op, t);
  TensorPtr out;
  run(
      op, {&t},
      [&] {
        const std::int64_t one = 1;  // a 0-D tensor has no column to count
        const Columns columns =
            t.dim() == 0 ? columns_of(op, *t.view({&one, 1}, {&one, 1}, t.storage_offset())) : columns_of(op, t);
        const auto count = static_cast<std::int64_t>(columns[0].size());
        out = count == 0 ? Tensor::empty(Dims{0, t.dim()}, DType::kInt64) : coordinates(count, t.dim(), {});
        auto* to = out->data<std::int64_t>();
        for (std::int64_t d = 0; d < t.dim(); ++d) {
          to = std::copy_n(columns[static_cast<std::size_t>(d)].data(), count, to);
        }
      },
      [&](const auto& on) {
        refuse_capture(on, op, "the size of the result depends on the data");
        if (t.numel() == 0) {
          out = coordinates(0, t.dim(), on.device());
          return;
        }
        const CompactParams params = compact_params(op, t.sizes(), t, t);
        const TensorPtr starts = count_on(on, params);
        out = coordinates(counted(on, *starts, op), t.dim(), on.device());
        if (out->numel() != 0) write_coordinates(on, params, *starts, t, *out);
      });
  give(ret0, std::move(out), op);
}

// On CUDA nothing is read back where output_size is given, so counts that do not sum to it are not noticed: positions
// past their sum get n, the length of `repeats`.
void repeat_interleave(const Op& op, AtenTensorHandle repeats, const std::int64_t* output_size,
                       AtenTensorHandle* ret0) {
  const Tensor& t = op.input(repeats, "repeats");
  check(t.dim() == 1, op, ": 'repeats' must be 1-D, got ", t.dim(), "-D");
  check(t.dtype() == DType::kInt64 || t.dtype() == DType::kInt32, op, ": 'repeats' is ", dtype_name(t.dtype()),
        ", expected int32 or int64");
  const std::int64_t given = output_size == nullptr ? 0 : *output_size, rows = t.size(0);
  check(given >= 0, op, ": 'output_size' is ", given, ", expected 0 or more");
  check(rows != 0 || given == 0, op, ": 'output_size' is ", given, ", but the repeats sum to 0");
  TensorPtr out;
  run(
      op, {&t},
      [&] {
        const auto sum = kernels::cpu::sum_counts(t.raw(), t.dtype(), rows, t.stride(0));
        check(sum.negative_at < 0, op, ": 'repeats' holds ", sum.negative, " at ", sum.negative_at,
              ", expected no negative count");
        check(output_size == nullptr || given == sum.total, op, ": 'output_size' is ", given,
              ", but the repeats sum to ", sum.total);
        out = Tensor::empty(Dims{sum.total}, t.dtype());
        kernels::cpu::expand_rows(t.raw(), t.dtype(), rows, t.stride(0), out->raw());
      },
      [&](const auto& on) {
        if (output_size == nullptr) {
          refuse_capture(on, op, "without 'output_size' its result's size depends on the data");
        }
        std::int64_t total = given;
        TensorPtr ends;
        if (rows != 0) {
          ends = count_ends(on, op, t);
          if (output_size == nullptr) total = sum_on(on, op, t, *ends);
        }
        out = Tensor::empty(Dims{total}, t.dtype(), on.device());
        if (total != 0) {
          on.launched(kernels::cuda::expand_rows(ends->data<std::int64_t>(), rows, out->raw(),
                                                 t.dtype() == DType::kInt32, total, on.stream()));
        }
      });
  give(ret0, std::move(out), op);
}

}  // namespace

UNTORCH_OP(nonzero, (AtenTensorHandle self, AtenTensorHandle* ret0), self, ret0) { nonzero(op, self, ret0); }

UNTORCH_SHIM aoti_torch_nonzero(AtenTensorHandle self, AtenTensorHandle* out) {
  return guarded("nonzero", [&] { nonzero(Op::of("nonzero", self, "self"), self, out); });
}

// The CPU's result is row-major.
UNTORCH_OP(nonzero_static, (AtenTensorHandle self, std::int64_t size, std::int64_t fill_value, AtenTensorHandle* ret0),
           self, size, fill_value, ret0) {
  const Tensor& t = op.input(self, "self");
  check(size >= 0, "nonzero_static: 'size' is ", size, ", expected 0 or more");
  check_flags(op, t);
  TensorPtr out;
  run(
      op, {&t},
      [&] {
        const Columns columns = columns_of(op, t);
        out = Tensor::empty(Dims{size, t.dim()}, DType::kInt64);
        auto* to = out->data<std::int64_t>();
        for (std::size_t i = 0; i < static_cast<std::size_t>(size); ++i) {
          for (const auto& column : columns) *to++ = i < column.size() ? column[i] : fill_value;
        }
      },
      [&](const auto& on) {
        out = coordinates(size, t.dim(), on.device());
        if (out->numel() == 0) return;
        // An empty input has a count as well: zero.
        const CompactParams params = compact_params(op, t.sizes(), t, t);
        const TensorPtr starts = count_on(on, params);
        write_coordinates(on, params, *starts, t, *out);
        on.launched(kernels::cuda::compact_fill_rest(last_of(*starts), static_cast<int>(t.dim()),
                                                     out->data<std::int64_t>(), out->strides()[0], out->strides()[1],
                                                     size, fill_value, on.stream()));
      });
  give(ret0, std::move(out), op);
}

UNTORCH_OP(masked_select, (AtenTensorHandle self, AtenTensorHandle mask, AtenTensorHandle* ret0), self, mask, ret0) {
  const Tensor &t = op.input(self, "self"), &m = mask_input(op, mask, true);
  const auto shape = broadcast_shapes(t.sizes(), m.sizes(), op);
  check_width(op, t);
  TensorPtr out;
  run(
      op, {&t, &m},
      [&] {
        const TensorPtr values = clone_contiguous(expand(t, shape, op, "self")),
                        chosen = clone_contiguous(expand(m, shape, op, "mask"));
        out = Tensor::empty(Dims{kernels::cpu::count_set(flags_of(*chosen), chosen->numel())}, t.dtype());
        kernels::cpu::masked_select(t.dtype(), flags_of(*chosen), values->raw(), values->numel(), out->raw());
      },
      [&](const auto& on) {
        refuse_capture(on, op, "the size of the result depends on the data");
        std::int64_t total = 0;
        TensorPtr starts;
        CompactParams params;
        if (checked_numel(shape) != 0) {
          params = compact_params(op, shape, m, t);
          starts = count_on(on, params);
          total = counted(on, *starts, op);
        }
        out = Tensor::empty(Dims{total}, t.dtype(), on.device());
        if (total != 0) {
          on.launched(kernels::cuda::compact_values(params, starts->data<std::int64_t>(), out->raw(), t.raw(),
                                                    static_cast<int>(element_size(t.dtype())), on.stream()));
        }
      });
  give(ret0, std::move(out), op);
}

UNTORCH_OP(masked_scatter,
           (AtenTensorHandle self, AtenTensorHandle mask, AtenTensorHandle source, AtenTensorHandle* ret0), self, mask,
           source, ret0) {
  const Tensor &t = op.input(self, "self"), &m = mask_input(op, mask, false), &src = op.input(source, "source");
  check(t.dtype() == src.dtype(), op, ": 'source' is ", dtype_name(src.dtype()), ", expected ", dtype_name(t.dtype()),
        " as 'self'");
  check_width(op, t);
  const auto shape = broadcast_shapes(t.sizes(), m.sizes(), op);
  TensorPtr out;
  run(
      op, {&t, &m, &src},
      [&] {
        const TensorPtr chosen = clone_contiguous(expand(m, shape, op, "mask")), values = contiguous(src);
        const std::int64_t needed = kernels::cpu::count_set(flags_of(*chosen), chosen->numel());
        check(needed <= values->numel(), op, ": the mask sets ", needed, " elements, but 'source' has only ",
              values->numel());
        out = clone_like(expand(t, shape, op, "self"));
        kernels::cpu::masked_scatter(strided<2>(op, shape, {chosen.get(), out.get()}), t.dtype(), flags_of(*chosen),
                                     values->raw(), out->raw());
      },
      [&](const auto& on) {
        out = clone_like(expand(t, shape, op, "self"));
        if (out->numel() == 0) return;
        const TensorPtr chosen = contiguous(expand(m, shape, op, "mask")), values = contiguous(src);
        const StorageRef ranks = mask_ranks(on, *chosen);
        on.launched(kernels::cuda::masked_scatter(strided<2>(op, shape, {out.get(), chosen.get()}), out->raw(),
                                                  flags_of(*chosen), static_cast<const std::int64_t*>(ranks->data()),
                                                  values->raw(), values->numel(),
                                                  static_cast<int>(element_size(t.dtype())), on.faults(), on.stream()));
      });
  give(ret0, std::move(out), op);
}

UNTORCH_OP_AS("repeat_interleave", repeat_interleave_Tensor,
              (AtenTensorHandle repeats, std::int64_t* output_size, AtenTensorHandle* ret0), repeats, output_size,
              ret0) {
  repeat_interleave(op, repeats, output_size, ret0);
}

UNTORCH_SHIM aoti_torch_repeat_interleave_Tensor(AtenTensorHandle repeats, std::int64_t* output_size,
                                                 AtenTensorHandle* out) {
  return guarded("repeat_interleave", [&] {
    repeat_interleave(Op::of("repeat_interleave", repeats, "repeats"), repeats, output_size, out);
  });
}
