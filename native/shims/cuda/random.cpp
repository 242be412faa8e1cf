// Random tensors on the GPU (aoti_torch_cuda_*): from the process's generator, whose seed serves the CPU and every GPU,
// or from a given one. The state is counted as cuda/random_state.h says; kernels/cuda/random/random.h says which
// numbers are PyTorch's.
#include "kernels/cuda/random/random.h"

#include <cmath>

#include "cuda/random_state.h"
#include "kernels/cuda/elementwise/copy.h"
#include "shims/cpu/elementwise.h"
#include "shims/cuda/factory.h"
#include "shims/cuda/sorting.h"
#include "shims/generator.h"
#include "shims/random_args.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::cuda::RandomGrid;

namespace {

// A null argument, or a pointer to null, is the default generator (null).
kernels::Generator* generator_of(AtenGeneratorHandle* handle) {
  return handle == nullptr || *handle == nullptr ? nullptr : unwrap(*handle)->get();
}

void check_floating(const Tensor& t, const char* op) {
  if (is_floating(t.dtype()) || t.dtype() == DType::kComplex64 || t.dtype() == DType::kComplex128) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()),
              " is not supported, expected a floating type");
}

// launch(space, state, blocks) with what the draws for a tensor need; nothing for an empty one, as in PyTorch.
template <class Launch>
void draw(const OnDevice& on, const Tensor& t, int per_draw, kernels::Generator* generator, const char* op,
          Launch&& launch) {
  if (t.numel() == 0) return;
  const auto& properties = on.properties();
  const RandomGrid grid =
      kernels::cuda::random_grid(t.numel(), per_draw, properties.num_sms, properties.max_threads_per_multiprocessor);
  on.launched(launch(cuda::reserve_random(generator, on.index(), on.stream(), grid.positions, op), grid.blocks));
}

void check_uniform(const Tensor& t, double from, double to, const char* op) {
  check(from <= to, op, ": 'from' is ", from, ", expected at most 'to' ", to);
  check_floating(t, op);
}

void fill_uniform(const OnDevice& on, const Tensor& tensor, double from, double to, kernels::Generator* generator,
                  const char* op) {
  const Tensor t = real_view(tensor);
  draw(on, t, kernels::cuda::draws_of(t.dtype()), generator, op, [&](const auto& state, unsigned blocks) {
    return kernels::cuda::uniform(strided<1>(op, t.sizes(), {&t}), t.raw(), t.dtype(), from, to, state, blocks,
                                  on.stream());
  });
}

void check_normal(const Tensor& t, double deviation, const char* op) {
  check(deviation >= 0, op, ": 'std' is ", deviation, ", expected 0 or more");
  check_floating(t, op);
}

void fill_normal(const OnDevice& on, const Tensor& tensor, double mean, double deviation, kernels::Generator* generator,
                 const char* op) {
  const Tensor t = real_view(tensor);
  // A complex normal spreads its variance over both parts.
  if (t.dtype() != tensor.dtype()) deviation /= std::sqrt(2.0);
  draw(on, t, kernels::cuda::draws_of(t.dtype()), generator, op, [&](const auto& state, unsigned blocks) {
    return kernels::cuda::normal(strided<1>(op, t.sizes(), {&t}), t.raw(), t.dtype(), mean, deviation, state, blocks,
                                 on.stream());
  });
}

void fill_integers(const OnDevice& on, const Tensor& t, std::int64_t low, std::int64_t high,
                   kernels::Generator* generator, const char* op) {
  const std::uint64_t range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
  draw(on, t, kernels::cuda::integer_draws(range), generator, op, [&](const auto& state, unsigned blocks) {
    return kernels::cuda::random_integers(strided<1>(op, t.sizes(), {&t}), t.raw(), t.dtype(), low, range, state,
                                          blocks, on.stream());
  });
}

// A dtype argument before there is a tensor of it.
Tensor probe(DType dtype) { return {StorageRef(), 0, dtype, DimSpan{}, DimSpan{}}; }

AOTITorchError rand_shim(const std::int64_t* size, std::int64_t length, AtenGeneratorHandle* generator,
                         const Factory& f, AtenTensorHandle* ret0) {
  return guarded("rand", [&] {
    const DType dtype = f.checked("rand", DType::kFloat32);
    check_floating(probe(dtype), "rand");
    checked_numel(ints(size, length));
    const OnDevice on("rand", f.where());
    TensorPtr out = Tensor::empty(ints(size, length), dtype, on.device());
    fill_uniform(on, *out, 0, 1, generator_of(generator), "rand");
    give(ret0, std::move(out), "rand");
  });
}

AOTITorchError randn_shim(const std::int64_t* size, std::int64_t length, AtenGeneratorHandle* generator,
                          const Factory& f, AtenTensorHandle* ret0) {
  return guarded("randn", [&] {
    const DType dtype = f.checked("randn", DType::kFloat32);
    check_floating(probe(dtype), "randn");
    checked_numel(ints(size, length));
    const OnDevice on("randn", f.where());
    TensorPtr out = Tensor::empty(ints(size, length), dtype, on.device());
    fill_normal(on, *out, 0, 1, generator_of(generator), "randn");
    give(ret0, std::move(out), "randn");
  });
}

AOTITorchError randint_shim(std::int64_t low, std::int64_t high, const std::int64_t* size, std::int64_t length,
                            AtenGeneratorHandle* generator, const Factory& f, AtenTensorHandle* ret0) {
  return guarded("randint", [&] {
    const DType dtype = f.checked("randint", DType::kInt64);
    check_integer_range(dtype, low, high, "randint");
    checked_numel(ints(size, length));
    const OnDevice on("randint", f.where());
    TensorPtr out = Tensor::empty(ints(size, length), dtype, on.device());
    fill_integers(on, *out, low, high, generator_of(generator), "randint");
    give(ret0, std::move(out), "randint");
  });
}

// fill(on, out, op) for a tensor like self.
template <class Check, class Fill>
AOTITorchError like_shim(const char* op, AtenTensorHandle self, const Factory& f, const std::int32_t* memory_format,
                         AtenTensorHandle* ret0, Check&& check_dtype, Fill&& fill_tensor) {
  return guarded(op, [&] {
    const Tensor& t = cuda_input(self, op, "self");
    const DType dtype = f.checked(op, t.dtype());
    check_dtype(dtype);
    const OnDevice on(op, t);
    TensorPtr out = empty_like_format(t, dtype, memory_format, op);
    fill_tensor(on, *out);
    give(ret0, std::move(out), op);
  });
}

AOTITorchError rand_like_shim(AtenTensorHandle self, AtenGeneratorHandle* generator, const Factory& f,
                              const std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return like_shim(
      "rand_like", self, f, memory_format, ret0, [](DType dtype) { check_floating(probe(dtype), "rand_like"); },
      [&](const OnDevice& on, const Tensor& out) {
        fill_uniform(on, out, 0, 1, generator_of(generator), "rand_like");
      });
}

AOTITorchError randn_like_shim(AtenTensorHandle self, AtenGeneratorHandle* generator, const Factory& f,
                               const std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return like_shim(
      "randn_like", self, f, memory_format, ret0, [](DType dtype) { check_floating(probe(dtype), "randn_like"); },
      [&](const OnDevice& on, const Tensor& out) {
        fill_normal(on, out, 0, 1, generator_of(generator), "randn_like");
      });
}

AOTITorchError randint_like_shim(AtenTensorHandle self, std::int64_t low, std::int64_t high, const Factory& f,
                                 const std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return like_shim(
      "randint_like", self, f, memory_format, ret0,
      [&](DType dtype) { check_integer_range(dtype, low, high, "randint_like"); },
      [&](const OnDevice& on, const Tensor& out) { fill_integers(on, out, low, high, nullptr, "randint_like"); });
}

// The bytes of 1 in a real dtype.
TensorPtr one_of(DType dtype, const char* op) {
  if (!is_floating(dtype) && !is_integral(dtype) && dtype != DType::kBool) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported");
  }
  return scalar_tensor(1, dtype);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_rand(const std::int64_t* size, std::int64_t size_len_, std::int32_t* dtype,
                                  std::int32_t* layout, std::int32_t* device, std::int32_t device_index_, std::int32_t*,
                                  AtenTensorHandle* ret0) {
  return rand_shim(size, size_len_, nullptr, {dtype, layout, device, device_index_}, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_rand_generator(const std::int64_t* size, std::int64_t size_len_,
                                            AtenGeneratorHandle* generator, std::int32_t* dtype, std::int32_t* layout,
                                            std::int32_t* device, std::int32_t device_index_, std::int32_t*,
                                            AtenTensorHandle* ret0) {
  return rand_shim(size, size_len_, generator, {dtype, layout, device, device_index_}, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_rand_like(AtenTensorHandle self, std::int32_t* dtype, std::int32_t* layout,
                                       std::int32_t* device, std::int32_t device_index_, std::int32_t*,
                                       std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return rand_like_shim(self, nullptr, {dtype, layout, device, device_index_}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_rand_like_generator(AtenTensorHandle self, AtenGeneratorHandle* generator,
                                                 std::int32_t* dtype, std::int32_t* layout, std::int32_t* device,
                                                 std::int32_t device_index_, std::int32_t*, std::int32_t* memory_format,
                                                 AtenTensorHandle* ret0) {
  return rand_like_shim(self, generator, {dtype, layout, device, device_index_}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randn(const std::int64_t* size, std::int64_t size_len_, std::int32_t* dtype,
                                   std::int32_t* layout, std::int32_t* device, std::int32_t device_index_,
                                   std::int32_t*, AtenTensorHandle* ret0) {
  return randn_shim(size, size_len_, nullptr, {dtype, layout, device, device_index_}, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randn_generator(const std::int64_t* size, std::int64_t size_len_,
                                             AtenGeneratorHandle* generator, std::int32_t* dtype, std::int32_t* layout,
                                             std::int32_t* device, std::int32_t device_index_, std::int32_t*,
                                             AtenTensorHandle* ret0) {
  return randn_shim(size, size_len_, generator, {dtype, layout, device, device_index_}, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randn_like(AtenTensorHandle self, std::int32_t* dtype, std::int32_t* layout,
                                        std::int32_t* device, std::int32_t device_index_, std::int32_t*,
                                        std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return randn_like_shim(self, nullptr, {dtype, layout, device, device_index_}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randn_like_generator(AtenTensorHandle self, AtenGeneratorHandle* generator,
                                                  std::int32_t* dtype, std::int32_t* layout, std::int32_t* device,
                                                  std::int32_t device_index_, std::int32_t*,
                                                  std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return randn_like_shim(self, generator, {dtype, layout, device, device_index_}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randint(std::int64_t high, const std::int64_t* size, std::int64_t size_len_,
                                     std::int32_t* dtype, std::int32_t* layout, std::int32_t* device,
                                     std::int32_t device_index_, std::int32_t*, AtenTensorHandle* ret0) {
  return randint_shim(0, high, size, size_len_, nullptr, {dtype, layout, device, device_index_}, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randint_generator(std::int64_t high, const std::int64_t* size, std::int64_t size_len_,
                                               AtenGeneratorHandle* generator, std::int32_t* dtype,
                                               std::int32_t* layout, std::int32_t* device, std::int32_t device_index_,
                                               std::int32_t*, AtenTensorHandle* ret0) {
  return randint_shim(0, high, size, size_len_, generator, {dtype, layout, device, device_index_}, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randint_low(std::int64_t low, std::int64_t high, const std::int64_t* size,
                                         std::int64_t size_len_, std::int32_t* dtype, std::int32_t* layout,
                                         std::int32_t* device, std::int32_t device_index_, std::int32_t*,
                                         AtenTensorHandle* ret0) {
  return randint_shim(low, high, size, size_len_, nullptr, {dtype, layout, device, device_index_}, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randint_low_out(AtenTensorHandle out, std::int64_t low, std::int64_t high,
                                             const std::int64_t* size, std::int64_t size_len_) {
  return guarded("randint", [&] {
    const Tensor& t = cuda_input(out, "randint", "out");
    const Dims sizes(ints(size, size_len_));
    check(t.sizes() == sizes, "randint: 'out' has shape ", to_string(t.sizes()), ", expected ", to_string(sizes));
    check_integer_range(t.dtype(), low, high, "randint");
    fill_integers(OnDevice("randint", t), t, low, high, nullptr, "randint");
  });
}

UNTORCH_SHIM aoti_torch_cuda_randint_like(AtenTensorHandle self, std::int64_t high, std::int32_t* dtype,
                                          std::int32_t* layout, std::int32_t* device, std::int32_t device_index_,
                                          std::int32_t*, std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return randint_like_shim(self, 0, high, {dtype, layout, device, device_index_}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randint_like_low_dtype(AtenTensorHandle self, std::int64_t low, std::int64_t high,
                                                    std::int32_t* dtype, std::int32_t* layout, std::int32_t* device,
                                                    std::int32_t device_index_, std::int32_t*,
                                                    std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return randint_like_shim(self, low, high, {dtype, layout, device, device_index_}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cuda_randperm(std::int64_t n, std::int32_t* dtype, std::int32_t* layout, std::int32_t* device,
                                      std::int32_t device_index_, std::int32_t*, AtenTensorHandle* ret0) {
  return guarded("randperm", [&] {
    const Factory f{dtype, layout, device, device_index_};
    const DType wanted = f.checked("randperm", DType::kInt64);
    check(n >= 0, "randperm: 'n' is ", n, ", expected 0 or more");
    check_entries(n, "randperm");
    one_of(wanted, "randperm");
    const OnDevice on("randperm", f.where());
    TensorPtr out = Tensor::empty(DimSpan(&n, 1), wanted, on.device());
    if (n != 0) {
      // Sorted by random keys of 64 bits; two that are equal keep their order.
      const auto count = static_cast<std::size_t>(n);
      const StorageRef keys = on.scratch(count * sizeof(std::uint64_t)),
                       ids = on.scratch(count * sizeof(std::uint32_t));
      draw(on, *out, 2, nullptr, "randperm", [&](const auto& state, unsigned blocks) {
        return kernels::cuda::random_keys(static_cast<std::uint64_t*>(keys->data()),
                                          static_cast<std::uint32_t*>(ids->data()), n, state, blocks, on.stream());
      });
      const SortedSegments sorted = sort_segments(on, keys, ids, n, std::numeric_limits<std::int64_t>::max());
      const std::int64_t one = 1;
      copy(*out, Tensor(sorted.ids, 0, DType::kUInt32, DimSpan(&n, 1), DimSpan(&one, 1)));
    }
    give(ret0, std::move(out), "randperm");
  });
}

UNTORCH_SHIM aoti_torch_cuda_uniform(AtenTensorHandle self, double from, double to, AtenGeneratorHandle* generator,
                                     AtenTensorHandle* ret0) {
  return guarded("uniform", [&] {
    const Tensor& t = cuda_input(self, "uniform", "self");
    check_uniform(t, from, to, "uniform");
    const OnDevice on("uniform", t);
    TensorPtr out = empty_like(t, t.dtype());
    fill_uniform(on, *out, from, to, generator_of(generator), "uniform");
    give(ret0, std::move(out), "uniform");
  });
}

UNTORCH_SHIM aoti_torch_cuda_normal_functional(AtenTensorHandle self, double mean, double std,
                                               AtenGeneratorHandle* generator, AtenTensorHandle* ret0) {
  return guarded("normal", [&] {
    const Tensor& t = cuda_input(self, "normal", "self");
    check_normal(t, std, "normal");
    const OnDevice on("normal", t);
    TensorPtr out = empty_like(t, t.dtype());
    fill_normal(on, *out, mean, std, generator_of(generator), "normal");
    give(ret0, std::move(out), "normal");
  });
}

UNTORCH_SHIM aoti_torch_cuda_exponential(AtenTensorHandle self, double lambd, AtenGeneratorHandle* generator,
                                         AtenTensorHandle* ret0) {
  const char* op = "exponential";
  return guarded(op, [&] {
    const Tensor& t = cuda_input(self, op, "self");
    check(lambd > 0, op, ": 'lambd' is ", lambd, ", expected more than 0");
    if (!is_floating(t.dtype())) {
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()),
                  " is not supported, expected a floating type");
    }
    const OnDevice on(op, t);
    TensorPtr out = empty_like(t, t.dtype());
    draw(on, *out, kernels::cuda::draws_of(out->dtype()), generator_of(generator), op,
         [&](const auto& state, unsigned blocks) {
           return kernels::cuda::exponential(strided<1>(op, out->sizes(), {out.get()}), out->raw(), out->dtype(), lambd,
                                             state, blocks, on.stream());
         });
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_bernoulli__float(AtenTensorHandle self, double p, AtenGeneratorHandle* generator) {
  const char* op = "bernoulli_";
  return guarded(op, [&] {
    const Tensor& t = cuda_input(self, op, "self");
    check(p >= 0 && p <= 1, op, ": 'p' holds ", p, ", expected 0 to 1");
    const TensorPtr one = one_of(t.dtype(), op);
    const OnDevice on(op, t);
    draw(on, t, kernels::cuda::draws_of(t.dtype()), generator_of(generator), op,
         [&](const auto& state, unsigned blocks) {
           return kernels::cuda::bernoulli(strided<1>(op, t.sizes(), {&t}), t.raw(),
                                           static_cast<int>(element_size(t.dtype())), one->raw(),
                                           t.dtype() == DType::kFloat64, p, state, blocks, on.stream());
         });
  });
}

UNTORCH_SHIM aoti_torch_cuda_bernoulli__Tensor(AtenTensorHandle self, AtenTensorHandle p,
                                               AtenGeneratorHandle* generator) {
  const char* op = "bernoulli_";
  return guarded(op, [&] {
    const Tensor& t = cuda_input(self, op, "self");
    const Tensor& probability = cuda_input(p, op, "p");
    if (!is_floating(probability.dtype())) {
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(probability.dtype()),
                  " of 'p' is not supported, expected a floating type");
    }
    const TensorPtr one = one_of(t.dtype(), op);
    broadcast_strides(probability, t.sizes(), op, "p");
    const OnDevice on(op, t, {&probability});
    const bool wide = probability.dtype() == DType::kFloat64;
    const bool half = !wide && probability.dtype() != DType::kFloat32;
    const TensorPtr converted = half ? to_dtype(probability, DType::kFloat32) : nullptr;
    const Tensor& given = half ? *converted : probability;
    draw(on, t, kernels::cuda::draws_of(given.dtype()), generator_of(generator), op,
         [&](const auto& state, unsigned blocks) {
           return kernels::cuda::bernoulli(
               strided<2>(op, t.sizes(), {&t, &given}), t.raw(), static_cast<int>(element_size(t.dtype())), one->raw(),
               given.raw(), given.dtype(), state, blocks, cuda::DeviceErrors::word(on.index()), on.stream());
         });
  });
}

UNTORCH_SHIM aoti_torch_cuda_native_dropout(AtenTensorHandle input, double p, std::int32_t* train,
                                            AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  const char* op = "native_dropout";
  return guarded(op, [&] {
    const Tensor& t = cuda_input(input, op, "input");
    check(p >= 0 && p <= 1, op, ": argument 'p' must be between 0 and 1, got ", p);
    const bool training = train == nullptr || *train != 0;
    if (training && !is_floating(t.dtype())) {
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()),
                  " is not supported, expected a floating type");
    }
    check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
    const OnDevice on(op, t);
    TensorPtr out = empty_like(t, t.dtype()), mask = empty_like(t, DType::kBool);
    const auto set = [&](const Tensor& to, std::uint8_t byte) {
      cuda::check_driver(
          cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(to.raw()), byte,
                                         static_cast<std::size_t>(to.numel()) * element_size(to.dtype()), on.stream()),
          op);
    };
    if (t.numel() == 0) {
      // Nothing to draw for.
    } else if (!training) {
      copy(*out, t);
      set(*mask, 1);
    } else if (p == 1) {
      set(*out, 0);
      set(*mask, 0);
    } else {
      draw(on, *out, 4, nullptr, op, [&](const auto& state, unsigned blocks) {
        return kernels::cuda::dropout(strided<3>(op, out->sizes(), {out.get(), mask.get(), &t}), out->raw(),
                                      mask->data<bool>(), t.raw(), t.dtype(), p, state, blocks, on.stream());
      });
    }
    give(ret0, std::move(out), op);
    give(ret1, std::move(mask), op);
  });
}
