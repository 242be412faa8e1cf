// Random tensors, from the process's generator, whose seed serves the CPU and every GPU, or from a given one. What a
// GPU drew is counted as cuda/random_state.h says; kernels/random.h says which numbers are PyTorch's.
#include "kernels/random.h"

#include <cmath>
#include <limits>
#include <mutex>

#include "cuda/random_state.h"
#include "shims/broadcast.h"
#include "shims/factory.h"
#include "shims/generator.h"
#include "shims/layout.h"
#include "shims/promotion.h"
#include "shims/random.h"
#include "shims/segments.h"
#include "tensor/iteration.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::Generator;

namespace {

// A null argument, or a pointer to null, is the default generator (null).
Generator* generator_of(AtenGeneratorHandle* handle) {
  return handle == nullptr || *handle == nullptr ? nullptr : unwrap(*handle)->get();
}
Generator& or_default(Generator* generator) { return generator == nullptr ? kernels::default_generator() : *generator; }

// A complex tensor as a real one with a last dimension of 2; others unchanged.
Tensor real_view(const Tensor& t) {
  if (!is_complex(t.dtype())) return t;
  std::vector<std::int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides;
  for (const std::int64_t stride : t.strides()) strides.push_back(stride * 2);
  sizes.push_back(2);
  strides.push_back(1);
  const DType dtype = t.dtype() == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
  return {t.storage(), t.storage_offset() * 2, dtype, sizes, strides};
}

[[noreturn]] void refuse_dtype(const Op& op, DType dtype, const char* why) {
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), why);
}

// A distribution: what it checks before there is a tensor, and how it fills one.
struct Uniform {
  static constexpr DType kDefault = DType::kFloat32;
  double from = 0, to = 1;

  void check_for(const Op& op, DType dtype) const {
    check(from <= to, op, ": 'from' is ", from, ", expected at most 'to' ", to);
    if (!is_floating(dtype) && dtype != DType::kComplex64 && dtype != DType::kComplex128) {
      refuse_dtype(op, dtype, " is not supported, expected a floating type");
    }
  }
  void fill(const Op& op, const Tensor& tensor, Generator* generator) const {
    const Tensor t = real_view(tensor);
    const auto space = strided<1>(op, t.sizes(), {&t});
    run(
        op, {&t}, [&] { kernels::cpu::uniform(space, t.raw(), t.dtype(), from, to, or_default(generator)); },
        [&](const auto& on) {
          draw(op, on, t, kernels::cuda::draws_of(t.dtype()), generator, [&](const auto& state, unsigned ctas) {
            return kernels::cuda::uniform(space, t.raw(), t.dtype(), from, to, state, ctas, on.stream());
          });
        });
  }
};

struct Normal {
  static constexpr DType kDefault = DType::kFloat32;
  double mean = 0, deviation = 1;

  void check_for(const Op& op, DType dtype) const {
    check(deviation >= 0, op, ": 'std' is ", deviation, ", expected 0 or more");
    Uniform{}.check_for(op, dtype);
  }
  void fill(const Op& op, const Tensor& tensor, Generator* generator) const {
    const Tensor t = real_view(tensor);
    const auto space = strided<1>(op, t.sizes(), {&t});
    // A complex normal spreads its variance over both parts.
    const double scale = t.dtype() != tensor.dtype() ? deviation / std::sqrt(2.0) : deviation;
    run(
        op, {&t},
        [&] { kernels::cpu::normal(space, t.raw(), t.dtype(), mean, scale, t.is_contiguous(), or_default(generator)); },
        [&](const auto& on) {
          draw(op, on, t, kernels::cuda::draws_of(t.dtype()), generator, [&](const auto& state, unsigned ctas) {
            return kernels::cuda::normal(space, t.raw(), t.dtype(), mean, scale, state, ctas, on.stream());
          });
        });
  }
};

struct Integers {
  static constexpr DType kDefault = DType::kInt64;
  std::int64_t low, high;

  // The range [low, high) is not empty and fits the dtype.
  void check_for(const Op& op, DType dtype) const {
    check(low < high, op, ": 'low' is ", low, ", expected less than 'high' ", high);
    dispatch_real(op, dtype, [&]<class T>() {
      if constexpr (std::is_integral_v<T>) {
        const bool fits = std::is_same_v<T, std::uint64_t>
                              ? low >= 0
                              : low >= static_cast<std::int64_t>(std::numeric_limits<T>::lowest()) &&
                                    high - 1 <= static_cast<std::int64_t>(std::numeric_limits<T>::max());
        check(fits, op, ": the range [", low, ", ", high, ") does not fit dtype ", dtype_name(dtype));
      }
    });
  }
  void fill(const Op& op, const Tensor& t, Generator* generator) const {
    const auto space = strided<1>(op, t.sizes(), {&t});
    const std::uint64_t range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
    run(
        op, {&t}, [&] { kernels::cpu::random_integers(space, t.raw(), t.dtype(), low, range, or_default(generator)); },
        [&](const auto& on) {
          draw(op, on, t, kernels::cuda::integer_draws(range), generator, [&](const auto& state, unsigned ctas) {
            return kernels::cuda::random_integers(space, t.raw(), t.dtype(), low, range, state, ctas, on.stream());
          });
        });
  }
};

struct Exponential {
  double rate;

  void check_for(const Op& op, DType dtype) const {
    check(rate > 0, op, ": 'lambd' is ", rate, ", expected more than 0");
    if (!is_floating(dtype)) refuse_dtype(op, dtype, " is not supported, expected a floating type");
  }
  void fill(const Op& op, const Tensor& t, Generator* generator) const {
    const auto space = strided<1>(op, t.sizes(), {&t});
    run(
        op, {&t}, [&] { kernels::cpu::exponential(space, t.raw(), t.dtype(), rate, or_default(generator)); },
        [&](const auto& on) {
          draw(op, on, t, kernels::cuda::draws_of(t.dtype()), generator, [&](const auto& state, unsigned ctas) {
            return kernels::cuda::exponential(space, t.raw(), t.dtype(), rate, state, ctas, on.stream());
          });
        });
  }
};

template <class Distribution>
void create(const Op& op, const Distribution& distribution, DimSpan size, const Factory& f,
            AtenGeneratorHandle* generator, AtenTensorHandle* ret0) {
  const DType dtype = f.checked(op, Distribution::kDefault);
  distribution.check_for(op, dtype);
  TensorPtr out = Tensor::empty(size, dtype, f.where(op));
  distribution.fill(op, *out, generator_of(generator));
  give(ret0, std::move(out), op);
}

template <class Distribution>
void create_like(const Op& op, const Distribution& distribution, AtenTensorHandle self, const Factory& f,
                 const std::int32_t* memory_format, AtenGeneratorHandle* generator, AtenTensorHandle* ret0) {
  const Tensor& t = op.input(self, "self");
  const DType dtype = f.checked(op, t.dtype());
  distribution.check_for(op, dtype);
  TensorPtr out = empty_like_format(t, dtype, memory_format, op);
  distribution.fill(op, *out, generator_of(generator));
  give(ret0, std::move(out), op);
}

// The functional form of an operator that fills: a new tensor like self.
template <class Distribution>
void functional(const Op& op, const Distribution& distribution, AtenTensorHandle self, AtenGeneratorHandle* generator,
                AtenTensorHandle* ret0) {
  const Tensor& t = op.input(self, "self");
  distribution.check_for(op, t.dtype());
  TensorPtr out = empty_like(t, t.dtype());
  distribution.fill(op, *out, generator_of(generator));
  give(ret0, std::move(out), op);
}

// 1 in a real dtype.
TensorPtr one_of(const Op& op, DType dtype) {
  if (!is_floating(dtype) && !is_integral(dtype) && dtype != DType::kBool) {
    refuse_dtype(op, dtype, " is not supported");
  }
  return scalar_tensor(1, dtype);
}

void check_probability(const Op& op, double p) { check(p >= 0 && p <= 1, op, ": 'p' holds ", p, ", expected 0 to 1"); }

void fill_bernoulli(const Op& op, const Tensor& t, const Tensor& probability, Generator* generator) {
  const auto space = strided<2>(op, t.sizes(), {&t, &probability});
  const auto outside =
      kernels::cpu::bernoulli(space, t.raw(), t.dtype(), probability.raw(), probability.dtype(), or_default(generator));
  if (outside) check_probability(op, *outside);
}

}  // namespace

// Seeds the process's generator; rand, randn, randint and randperm then give what torch.manual_seed(seed) gives. The
// GPUs take their seed from it too.
extern "C" UNTORCH_EXPORT void untorch_manual_seed(std::uint64_t seed) {
  Generator& generator = kernels::default_generator();
  const std::lock_guard lock(generator.mutex());
  generator.manual_seed(seed);
}

extern "C" UNTORCH_EXPORT std::uint64_t untorch_initial_seed(void) {
  Generator& generator = kernels::default_generator();
  const std::lock_guard lock(generator.mutex());
  return generator.initial_seed();
}

UNTORCH_OP(rand, (const std::int64_t* size, std::int64_t size_len, UNTORCH_FACTORY, AtenTensorHandle* ret0), size,
           size_len, UNTORCH_FACTORY_ARGUMENTS, ret0) {
  create(op, Uniform{}, ints(size, size_len), {dtype, layout, device, device_index}, nullptr, ret0);
}

UNTORCH_OP_AS("rand", rand_generator,
              (const std::int64_t* size, std::int64_t size_len, AtenGeneratorHandle* generator, UNTORCH_FACTORY,
               AtenTensorHandle* ret0),
              size, size_len, generator, UNTORCH_FACTORY_ARGUMENTS, ret0) {
  create(op, Uniform{}, ints(size, size_len), {dtype, layout, device, device_index}, generator, ret0);
}

UNTORCH_OP(rand_like, (AtenTensorHandle self, UNTORCH_FACTORY, std::int32_t* memory_format, AtenTensorHandle* ret0),
           self, UNTORCH_FACTORY_ARGUMENTS, memory_format, ret0) {
  create_like(op, Uniform{}, self, {dtype, layout, device, device_index}, memory_format, nullptr, ret0);
}

UNTORCH_OP_AS("rand_like", rand_like_generator,
              (AtenTensorHandle self, AtenGeneratorHandle* generator, UNTORCH_FACTORY, std::int32_t* memory_format,
               AtenTensorHandle* ret0),
              self, generator, UNTORCH_FACTORY_ARGUMENTS, memory_format, ret0) {
  create_like(op, Uniform{}, self, {dtype, layout, device, device_index}, memory_format, generator, ret0);
}

UNTORCH_OP(randn, (const std::int64_t* size, std::int64_t size_len, UNTORCH_FACTORY, AtenTensorHandle* ret0), size,
           size_len, UNTORCH_FACTORY_ARGUMENTS, ret0) {
  create(op, Normal{}, ints(size, size_len), {dtype, layout, device, device_index}, nullptr, ret0);
}

UNTORCH_OP_AS("randn", randn_generator,
              (const std::int64_t* size, std::int64_t size_len, AtenGeneratorHandle* generator, UNTORCH_FACTORY,
               AtenTensorHandle* ret0),
              size, size_len, generator, UNTORCH_FACTORY_ARGUMENTS, ret0) {
  create(op, Normal{}, ints(size, size_len), {dtype, layout, device, device_index}, generator, ret0);
}

UNTORCH_OP(randn_like, (AtenTensorHandle self, UNTORCH_FACTORY, std::int32_t* memory_format, AtenTensorHandle* ret0),
           self, UNTORCH_FACTORY_ARGUMENTS, memory_format, ret0) {
  create_like(op, Normal{}, self, {dtype, layout, device, device_index}, memory_format, nullptr, ret0);
}

UNTORCH_OP_AS("randn_like", randn_like_generator,
              (AtenTensorHandle self, AtenGeneratorHandle* generator, UNTORCH_FACTORY, std::int32_t* memory_format,
               AtenTensorHandle* ret0),
              self, generator, UNTORCH_FACTORY_ARGUMENTS, memory_format, ret0) {
  create_like(op, Normal{}, self, {dtype, layout, device, device_index}, memory_format, generator, ret0);
}

UNTORCH_OP(randint,
           (std::int64_t high, const std::int64_t* size, std::int64_t size_len, UNTORCH_FACTORY,
            AtenTensorHandle* ret0),
           high, size, size_len, UNTORCH_FACTORY_ARGUMENTS, ret0) {
  create(op, Integers{0, high}, ints(size, size_len), {dtype, layout, device, device_index}, nullptr, ret0);
}

UNTORCH_OP_AS("randint", randint_generator,
              (std::int64_t high, const std::int64_t* size, std::int64_t size_len, AtenGeneratorHandle* generator,
               UNTORCH_FACTORY, AtenTensorHandle* ret0),
              high, size, size_len, generator, UNTORCH_FACTORY_ARGUMENTS, ret0) {
  create(op, Integers{0, high}, ints(size, size_len), {dtype, layout, device, device_index}, generator, ret0);
}

UNTORCH_OP_AS("randint", randint_low,
              (std::int64_t low, std::int64_t high, const std::int64_t* size, std::int64_t size_len, UNTORCH_FACTORY,
               AtenTensorHandle* ret0),
              low, high, size, size_len, UNTORCH_FACTORY_ARGUMENTS, ret0) {
  create(op, Integers{low, high}, ints(size, size_len), {dtype, layout, device, device_index}, nullptr, ret0);
}

UNTORCH_OP_AS("randint", randint_low_out,
              (AtenTensorHandle out, std::int64_t low, std::int64_t high, const std::int64_t* size,
               std::int64_t size_len),
              out, low, high, size, size_len) {
  const Tensor& t = op.input(out, "out");
  const Dims sizes(ints(size, size_len));
  check(t.sizes() == sizes, op, ": 'out' has shape ", to_string(t.sizes()), ", expected ", to_string(sizes));
  const Integers integers{low, high};
  integers.check_for(op, t.dtype());
  integers.fill(op, t, nullptr);
}

UNTORCH_OP(randint_like,
           (AtenTensorHandle self, std::int64_t high, UNTORCH_FACTORY, std::int32_t* memory_format,
            AtenTensorHandle* ret0),
           self, high, UNTORCH_FACTORY_ARGUMENTS, memory_format, ret0) {
  create_like(op, Integers{0, high}, self, {dtype, layout, device, device_index}, memory_format, nullptr, ret0);
}

UNTORCH_OP_AS("randint_like", randint_like_low_dtype,
              (AtenTensorHandle self, std::int64_t low, std::int64_t high, UNTORCH_FACTORY, std::int32_t* memory_format,
               AtenTensorHandle* ret0),
              self, low, high, UNTORCH_FACTORY_ARGUMENTS, memory_format, ret0) {
  create_like(op, Integers{low, high}, self, {dtype, layout, device, device_index}, memory_format, nullptr, ret0);
}

UNTORCH_OP(randperm, (std::int64_t n, UNTORCH_FACTORY, AtenTensorHandle* ret0), n, UNTORCH_FACTORY_ARGUMENTS, ret0) {
  const Factory f{dtype, layout, device, device_index};
  const DType wanted = f.checked(op, DType::kInt64);
  check(n >= 0, op, ": 'n' is ", n, ", expected 0 or more");
  if (op.on_cuda()) {
    check_entries(n, op);
    one_of(op, wanted);
  }
  const DType drawn = op.on_cuda() ? wanted : DType::kInt64;
  TensorPtr out = Tensor::empty(DimSpan(&n, 1), drawn, f.where(op));
  run(
      op, {out.get()},
      [&] {
        kernels::cpu::permutation(out->data<std::int64_t>(), n, kernels::default_generator());
        if (wanted != DType::kInt64) out = to_dtype(*out, wanted);
      },
      [&](const auto& on) {
        if (n == 0) return;
        // Sorted by random keys of 64 bits; two that are equal keep their order.
        const auto count = static_cast<std::size_t>(n);
        const StorageRef keys = on.scratch(count * sizeof(std::uint64_t)),
                         ids = on.scratch(count * sizeof(std::uint32_t));
        draw(op, on, *out, 2, nullptr, [&](const auto& state, unsigned ctas) {
          return kernels::cuda::random_keys(static_cast<std::uint64_t*>(keys->data()),
                                            static_cast<std::uint32_t*>(ids->data()), n, state, ctas, on.stream());
        });
        const SortedSegments sorted = sort_segments(on, keys, ids, n, std::numeric_limits<std::int64_t>::max());
        const std::int64_t one = 1;
        copy(*out, Tensor(sorted.ids, 0, DType::kUInt32, DimSpan(&n, 1), DimSpan(&one, 1)));
      });
  give(ret0, std::move(out), op);
}

UNTORCH_OP(uniform,
           (AtenTensorHandle self, double from, double to, AtenGeneratorHandle* generator, AtenTensorHandle* ret0),
           self, from, to, generator, ret0) {
  functional(op, Uniform{from, to}, self, generator, ret0);
}

UNTORCH_OP_AS("normal", normal_functional,
              (AtenTensorHandle self, double mean, double std, AtenGeneratorHandle* generator, AtenTensorHandle* ret0),
              self, mean, std, generator, ret0) {
  functional(op, Normal{mean, std}, self, generator, ret0);
}

UNTORCH_OP(exponential, (AtenTensorHandle self, double lambd, AtenGeneratorHandle* generator, AtenTensorHandle* ret0),
           self, lambd, generator, ret0) {
  functional(op, Exponential{lambd}, self, generator, ret0);
}

UNTORCH_OP_AS("bernoulli_", bernoulli__float, (AtenTensorHandle self, double p, AtenGeneratorHandle* handle), self, p,
              handle) {
  const Tensor& t = op.input(self, "self");
  check_probability(op, p);
  const TensorPtr one = one_of(op, t.dtype());
  Generator* const generator = generator_of(handle);
  run(
      op, {&t}, [&] { fill_bernoulli(op, t, *scalar_tensor(p, DType::kFloat64), generator); },
      [&](const auto& on) {
        draw(op, on, t, kernels::cuda::draws_of(t.dtype()), generator, [&](const auto& state, unsigned ctas) {
          return kernels::cuda::bernoulli(strided<1>(op, t.sizes(), {&t}), t.raw(),
                                          static_cast<int>(element_size(t.dtype())), one->raw(),
                                          t.dtype() == DType::kFloat64, p, state, ctas, on.stream());
        });
      });
}

UNTORCH_OP_AS("bernoulli_", bernoulli__Tensor, (AtenTensorHandle self, AtenTensorHandle p, AtenGeneratorHandle* handle),
              self, p, handle) {
  const Tensor &t = op.input(self, "self"), &probability = op.input(p, "p");
  if (!is_floating(probability.dtype())) {
    refuse_dtype(op, probability.dtype(), " of 'p' is not supported, expected a floating type");
  }
  const TensorPtr one = one_of(op, t.dtype());
  broadcast_strides(probability, t.sizes(), op, "p");
  Generator* const generator = generator_of(handle);
  run(
      op, {&t, &probability}, [&] { fill_bernoulli(op, t, probability, generator); },
      [&](const auto& on) {
        const bool half = probability.dtype() != DType::kFloat64 && probability.dtype() != DType::kFloat32;
        const TensorPtr converted = half ? to_dtype(probability, DType::kFloat32) : nullptr;
        const Tensor& given = half ? *converted : probability;
        draw(op, on, t, kernels::cuda::draws_of(given.dtype()), generator, [&](const auto& state, unsigned ctas) {
          return kernels::cuda::bernoulli(strided<2>(op, t.sizes(), {&t, &given}), t.raw(),
                                          static_cast<int>(element_size(t.dtype())), one->raw(), given.raw(),
                                          given.dtype(), state, ctas, on.faults(), on.stream());
        });
      });
}
