// embedding_bag: rows of a table summed, averaged or maximised over bags of indices.
#include <algorithm>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "shims/device_ops.h"
#include "shims/nn.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char* kOp = "_embedding_bag";
constexpr std::int64_t kSum = 0, kMean = 1, kMax = 2;

struct Bags {
  std::vector<std::int64_t> indices, start;  // start has one entry more than there are bags
  std::int64_t count = 0;
};

std::vector<std::int64_t> as_int64(const Tensor& tensor) {
  const TensorPtr wide = to_dtype(tensor, DType::kInt64);
  const TensorPtr rows = contiguous(*wide);
  return {rows->data<std::int64_t>(), rows->data<std::int64_t>() + rows->numel()};
}

Bags bags_of(const Tensor& weight, const Tensor& indices, const Tensor& offsets, bool include_last_offset) {
  Bags bags;
  bags.indices = as_int64(indices);
  bags.start = as_int64(offsets);
  const auto total = static_cast<std::int64_t>(bags.indices.size());
  check(!include_last_offset || !bags.start.empty(), kOp,
        ": argument 'offsets' must hold at least one value with include_last_offset");
  bags.count = static_cast<std::int64_t>(bags.start.size()) - (include_last_offset ? 1 : 0);
  if (!include_last_offset) bags.start.push_back(total);
  if (bags.count > 0) check(bags.start[0] == 0, kOp, ": argument 'offsets' must begin with 0, got ", bags.start[0]);
  // What follows the given last offset belongs to the last bag, as in PyTorch.
  bags.start.back() = std::max(bags.start.back(), total);
  for (std::size_t i = 0; i + 1 < bags.start.size(); ++i) {
    check(bags.start[i] <= bags.start[i + 1] && bags.start[i] >= 0, kOp, ": argument 'offsets' must not decrease, got ",
          bags.start[i], " before ", bags.start[i + 1]);
  }
  check(bags.start.back() <= total, kOp, ": argument 'offsets' ends at ", bags.start.back(), ", beyond ", total,
        " indices");
  for (const std::int64_t index : bags.indices) {
    check(index >= 0 && index < weight.size(0), kOp, ": index ", index, " is outside of the table's ", weight.size(0),
          " rows");
  }
  return bags;
}

// The four results of PyTorch: rows, the bag of each index, the number of rows in each bag, the winning row of a
// maximum.
struct Result {
  TensorPtr out, offset2bag, bag_size, max_indices;
};

template <class T>
void reduce(const Bags& bags, const Tensor& weight, const Tensor* per_sample, std::int64_t mode,
            std::int64_t padding_idx, Result& result, std::vector<std::int64_t>& used,
            std::vector<std::int64_t>* best) {
  using C = compute_t<T>;
  const std::int64_t width = weight.size(1), row_stride = weight.stride(0), column_stride = weight.stride(1);
  const T* table = weight.data<T>();
  T* out = result.out->data<T>();
  const double work = static_cast<double>(bags.indices.size()) * static_cast<double>(width);
  kernels::for_each_item_grained(bags.count, 16, work > kernels::kParallelWork, [&](std::int64_t bag) {
    const auto b = static_cast<std::size_t>(bag);
    thread_local std::vector<C> sums;
    sums.assign(static_cast<std::size_t>(width), C(0));
    std::int64_t rows = 0;
    for (std::int64_t i = bags.start[b]; i < bags.start[b + 1]; ++i) {
      const std::int64_t index = bags.indices[static_cast<std::size_t>(i)];
      if (index == padding_idx) continue;
      const T* row = table + index * row_stride;
      const C scale = per_sample == nullptr ? C(1) : static_cast<C>(per_sample->data<T>()[i * per_sample->stride(0)]);
      C* to = sums.data();
      if (mode == kMax) {
        std::int64_t* winner = best->data() + bag * width;
        for (std::int64_t j = 0; j < width; ++j) {
          const C value = static_cast<C>(row[j * column_stride]);
          if (rows == 0 || value > to[j]) {
            to[j] = value;
            winner[j] = index;
          }
        }
      } else if (column_stride == 1) {
        for (std::int64_t j = 0; j < width; ++j) to[j] += scale * static_cast<C>(row[j]);
      } else {
        for (std::int64_t j = 0; j < width; ++j) to[j] += scale * static_cast<C>(row[j * column_stride]);
      }
      ++rows;
    }
    used[b] = rows;
    const C divisor = mode == kMean && rows > 0 ? static_cast<C>(rows) : C(1);
    for (std::int64_t j = 0; j < width; ++j) out[bag * width + j] = T(sums[static_cast<std::size_t>(j)] / divisor);
  });
}

TensorPtr from_vector(const std::vector<std::int64_t>& values, DimSpan sizes, DType dtype) {
  const TensorPtr wide = Tensor::empty(sizes, DType::kInt64);
  std::copy(values.begin(), values.end(), wide->data<std::int64_t>());
  return to_dtype(*wide, dtype);
}

Result embedding_bag(const Tensor& weight, const Tensor& indices, const Tensor& offsets, std::int64_t mode,
                     const Tensor* per_sample, bool include_last_offset, std::int64_t padding_idx, bool forward_only) {
  check(weight.dim() == 2, kOp, ": argument 'weight' must be 2-D, got shape ", to_string(weight.sizes()));
  check(indices.dim() == 1, kOp, ": argument 'indices' must be 1-D, got shape ", to_string(indices.sizes()));
  check(offsets.dim() == 1, kOp, ": argument 'offsets' must be 1-D, got shape ", to_string(offsets.sizes()));
  for (const auto& [tensor, name] : {std::pair{&indices, "indices"}, std::pair{&offsets, "offsets"}}) {
    check(tensor->dtype() == DType::kInt32 || tensor->dtype() == DType::kInt64, kOp, ": argument '", name,
          "' must be int32 or int64, got ", dtype_name(tensor->dtype()));
  }
  check(mode >= kSum && mode <= kMax, kOp, ": argument 'mode' must be 0 (sum), 1 (mean) or 2 (max), got ", mode);
  if (per_sample != nullptr) {
    check(mode == kSum, kOp, ": argument 'per_sample_weights' goes with mode 0 (sum) only, got mode ", mode);
    check(per_sample->dtype() == weight.dtype(), kOp, ": argument 'per_sample_weights' must be ",
          dtype_name(weight.dtype()), " like weight, got ", dtype_name(per_sample->dtype()));
    check(per_sample->dim() == 1 && per_sample->size(0) == indices.size(0), kOp,
          ": argument 'per_sample_weights' must have shape ", to_string(indices.sizes()), ", got ",
          to_string(per_sample->sizes()));
  }
  const std::int64_t table_rows = weight.size(0);
  check(padding_idx >= -table_rows && padding_idx < std::max<std::int64_t>(table_rows, 1), kOp,
        ": argument 'padding_idx' must be inside of the table's ", table_rows, " rows, got ", padding_idx);
  // -1 means none: PyTorch's Python side has wrapped negative rows already.
  const DType index_dtype =
      indices.dtype() == DType::kInt64 || offsets.dtype() == DType::kInt64 ? DType::kInt64 : DType::kInt32;
  const Bags bags = bags_of(weight, indices, offsets, include_last_offset);
  const std::int64_t width = weight.size(1);
  Result result;
  result.out = Tensor::empty(Dims{bags.count, width}, weight.dtype());
  std::vector<std::int64_t> used(static_cast<std::size_t>(std::max<std::int64_t>(bags.count, 0)), 0), best;
  if (mode == kMax) best.assign(static_cast<std::size_t>(bags.count * width), 0);
  dispatch_floating(kOp, weight.dtype(),
                    [&]<class T>() { reduce<T>(bags, weight, per_sample, mode, padding_idx, result, used, &best); });

  // The other three feed the backward pass. A plain sum over rows without gaps leaves them empty or zero.
  const bool fast = mode == kSum && padding_idx < 0 && weight.stride(1) == 1 &&
                    (per_sample == nullptr || per_sample->stride(0) == 1) && (weight.dtype() != DType::kFloat64);
  if (fast) {
    result.offset2bag = Tensor::empty(Dims{0}, index_dtype);
  } else {
    std::vector<std::int64_t> bag_of(bags.indices.size(), 0);
    for (std::int64_t b = 0; b < bags.count; ++b) {
      const auto at = static_cast<std::size_t>(b);
      std::fill(bag_of.begin() + bags.start[at], bag_of.begin() + bags.start[at + 1], b);
    }
    result.offset2bag = from_vector(bag_of, indices.sizes(), index_dtype);
  }
  if (mode == kSum) {
    const std::int64_t length = forward_only ? offsets.size(0) : bags.count;
    result.bag_size =
        from_vector(std::vector<std::int64_t>(static_cast<std::size_t>(length), 0), Dims{length}, index_dtype);
    result.max_indices = clone_contiguous(*result.bag_size);
  } else {
    result.bag_size = from_vector(used, Dims{bags.count}, index_dtype);
    result.max_indices =
        mode == kMean ? clone_contiguous(*result.bag_size) : from_vector(best, Dims{bags.count, width}, index_dtype);
  }
  return result;
}

AOTITorchError shim(AtenTensorHandle weight, AtenTensorHandle indices, AtenTensorHandle offsets, std::int64_t mode,
                    AtenTensorHandle* per_sample_weights, bool include_last_offset, std::int64_t padding_idx,
                    bool forward_only, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2,
                    AtenTensorHandle* ret3) {
  return guarded(kOp, [&] {
    Result result = embedding_bag(cpu_input(weight, kOp, "weight"), cpu_input(indices, kOp, "indices"),
                                  cpu_input(offsets, kOp, "offsets"), mode,
                                  optional_cpu_input(per_sample_weights, kOp, "per_sample_weights"),
                                  include_last_offset, padding_idx, forward_only);
    check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr && ret3 != nullptr, kOp, ": output pointer is null");
    give(ret0, std::move(result.out), kOp);
    give(ret1, std::move(result.offset2bag), kOp);
    give(ret2, std::move(result.bag_size), kOp);
    give(ret3, std::move(result.max_indices), kOp);
  });
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu__embedding_bag(AtenTensorHandle weight, AtenTensorHandle indices, AtenTensorHandle offsets,
                                           std::int32_t /*scale_grad_by_freq*/, std::int64_t mode,
                                           std::int32_t /*sparse*/, AtenTensorHandle* per_sample_weights,
                                           std::int32_t include_last_offset, std::int64_t padding_idx,
                                           AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2,
                                           AtenTensorHandle* ret3) {
  return shim(weight, indices, offsets, mode, per_sample_weights, include_last_offset != 0, padding_idx, false, ret0,
              ret1, ret2, ret3);
}

UNTORCH_SHIM aoti_torch_cpu__embedding_bag_forward_only(AtenTensorHandle weight, AtenTensorHandle indices,
                                                        AtenTensorHandle offsets, std::int32_t /*scale_grad_by_freq*/,
                                                        std::int64_t mode, std::int32_t /*sparse*/,
                                                        AtenTensorHandle* per_sample_weights,
                                                        std::int32_t include_last_offset, std::int64_t padding_idx,
                                                        AtenTensorHandle* ret0, AtenTensorHandle* ret1,
                                                        AtenTensorHandle* ret2, AtenTensorHandle* ret3) {
  return shim(weight, indices, offsets, mode, per_sample_weights, include_last_offset != 0, padding_idx, true, ret0,
              ret1, ret2, ret3);
}

UNTORCH_SHIM aoti_torch__embedding_bag(AtenTensorHandle weight, AtenTensorHandle indices, AtenTensorHandle offsets,
                                       std::int32_t /*scale_grad_by_freq*/, std::int32_t mode, std::int32_t /*sparse*/,
                                       AtenTensorHandle per_sample_weights, std::int32_t include_last_offset,
                                       std::int32_t padding_idx, AtenTensorHandle* ret0, AtenTensorHandle* ret1,
                                       AtenTensorHandle* ret2, AtenTensorHandle* ret3) {
  if (on_cuda(weight) && cuda_ops.embedding_bag != nullptr) {
    return cuda_ops.embedding_bag(weight, indices, offsets, mode, &per_sample_weights, include_last_offset, padding_idx,
                                  ret0, ret1, ret2, ret3);
  }
  return shim(weight, indices, offsets, mode, &per_sample_weights, include_last_offset != 0, padding_idx, false, ret0,
              ret1, ret2, ret3);
}
