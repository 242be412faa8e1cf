// aten::multinomial on a GPU, by an exponential race. Nothing waits, so graphs can hold it.
#include "kernels/multinomial.h"

#include "cuda/random_state.h"
#include "kernels/sort.h"
#include "shims/device_work.h"
#include "shims/proxy_op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// The `count` largest of each row's speeds, largest first: where they are goes to `out`.
template <class On>
void take_first(const On& on, const Op& op, const Tensor& speeds, std::int64_t count, const Tensor& out) {
  const TensorPtr values = Tensor::empty(out.sizes(), speeds.dtype(), on.device());
  kernels::SelectParams params;
  params.what = kernels::Select::kFirst;
  params.rank = count;
  params.sort.lanes = lanes<3>(op, 1, {values.get(), &out, &speeds});
  params.sort.values = values->raw();
  params.sort.indices = out.template data<std::int64_t>();
  params.sort.input = speeds.raw();
  params.sort.dtype = speeds.dtype();
  params.sort.descending = true;
  params.sort.take = count;
  const bool sorts = speeds.size(1) <= kernels::cuda::kCtaSortMax || count > kernels::cuda::kSelectMax;
  std::size_t bytes = 0;
  on.launched(sorts ? kernels::cuda::sort_scratch(params.sort, bytes) : kernels::cuda::select_scratch(params, bytes));
  with_scratch(on, bytes, [&](void* scratch) {
    return sorts ? kernels::cuda::sort(params.sort, scratch, on.stream())
                 : kernels::cuda::select(params, scratch, on.stream());
  });
  const auto* const last =
      static_cast<const std::byte*>(values->raw()) + static_cast<std::size_t>(count - 1) * element_size(speeds.dtype());
  on.launched(kernels::cuda::check_race(last, speeds.dtype() == DType::kFloat64, speeds.size(0), count, on.faults(),
                                        on.stream()));
}

}  // namespace

UNTORCH_PROXY_OP(multinomial, "aten::multinomial", kOnCuda) {
  const Tensor& t = call.tensor("self");
  const std::int64_t count = call.integer("num_samples");
  const bool replacement = call.flag("replacement", false);
  check(t.dim() == 1 || t.dim() == 2, op, ": argument 'self' must be 1-D or 2-D, got ", t.dim(), "-D");
  if (!is_floating(t.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()),
                " is not supported, expected a floating type");
  }
  const std::int64_t categories = t.size(-1), rows = t.dim() == 1 ? 1 : t.size(0);
  check(count >= 1, op, ": 'num_samples' is ", count, ", expected 1 or more");
  check(replacement || count <= categories, op, ": 'num_samples' is ", count, ", expected at most the ", categories,
        " categories without replacement");
  check(categories >= 1 || rows == 0, op, ": argument 'self' has no categories");
  check(categories <= kernels::cuda::kSortMax, op, ": argument 'self' has ", categories,
        " categories, expected at most ", kernels::cuda::kSortMax);
  TensorPtr out = t.dim() == 1 ? Tensor::empty(Dims{count}, DType::kInt64, t.device())
                               : Tensor::empty(Dims{rows, count}, DType::kInt64, t.device());
  run(
      op, {&t}, [] {},
      [&](const auto& on) {
        if (rows == 0) return;
        const TensorPtr weights = contiguous(t);
        const kernels::cuda::Race race{weights->raw(), t.dtype(), rows, categories};
        const bool races = replacement || count == 1;
        const auto grid = kernels::cuda::race_grid(race, races ? count : 1);
        const auto state = cuda::reserve_random(nullptr, on.index(), on.stream(), grid.positions, op);
        if (races) {
          on.launched(kernels::cuda::race_winners(race, count, out->template data<std::int64_t>(), state, on.faults(),
                                                  on.stream()));
          return;
        }
        const DType wide = t.dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
        const TensorPtr speeds = Tensor::empty(Dims{rows, categories}, wide, on.device());
        on.launched(kernels::cuda::race_speeds(race, speeds->raw(), state, on.faults(), on.stream()));
        const TensorPtr rows_out = out->view(Dims{rows, count}, Dims{count, 1}, 0);
        take_first(on, op, *speeds, count, *rows_out);
      });
  call.give(0, std::move(out));
}
