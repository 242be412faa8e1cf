// Random tensors from the process's generator or a given one (aoti_torch_cpu_*), and the seed.
#include "kernels/cpu/random/random.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "shims/cpu/elementwise.h"
#include "shims/generator.h"
#include "shims/random_args.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::Generator;

namespace {

// A null argument, or a pointer to null, is the default generator.
Generator& generator_of(AtenGeneratorHandle* handle) {
  if (handle == nullptr || *handle == nullptr) return kernels::default_generator();
  return **unwrap(*handle);
}

// Draws element by element in memory order, as PyTorch does for any layout.
template <class T, class Draw>
void draw_each(const Tensor& t, Draw&& draw) {
  const kernels::StridedLoop<1> loop(t.sizes(), {DimSpan(t.strides())});
  const std::int64_t step = loop.inner()[0];
  T* to = t.data<T>();
  loop.run_serial([&](const std::array<std::int64_t, 1>& at, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) to[at[0] + i * step] = draw();
  });
}

void fill_uniform(const Tensor& tensor, double from, double to, Generator& generator, const char* op) {
  check(from <= to, op, ": 'from' is ", from, ", expected at most 'to' ", to);
  const Tensor t = real_view(tensor);
  dispatch_floating(op, t.dtype(), [&]<class T>() {
    const std::lock_guard lock(generator.mutex());
    if constexpr (std::is_same_v<T, double>) {
      draw_each<T>(t, [&] { return std::fma(generator.uniform_double(), to - from, from); });
    } else {
      const double low = static_cast<float>(from), width = static_cast<float>(to) - static_cast<float>(from);
      const T end = static_cast<T>(static_cast<float>(to)), start = static_cast<T>(static_cast<float>(from));
      draw_each<T>(t, [&] {
        const T value = static_cast<T>(static_cast<float>(generator.uniform_float() * width + low));
        // A half may round up to the open end, which PyTorch replaces by the start.
        if constexpr (!std::is_same_v<T, float>) return from < to && value >= end ? start : value;
        return value;
      });
    }
  });
}

void fill_normal(const Tensor& tensor, double mean, double deviation, Generator& generator, const char* op) {
  check(deviation >= 0, op, ": 'std' is ", deviation, ", expected 0 or more");
  const Tensor t = real_view(tensor);
  // A complex normal spreads its variance over both parts.
  if (t.dtype() != tensor.dtype()) deviation /= std::sqrt(2.0);
  dispatch_floating(op, t.dtype(), [&]<class T>() {
    const std::lock_guard lock(generator.mutex());
    const std::int64_t n = t.numel();
    if (n < 16 || !t.is_contiguous()) {
      draw_each<T>(t, [&] { return static_cast<T>(static_cast<compute_t<T>>(generator.normal() * deviation + mean)); });
      return;
    }
    using Wide = compute_t<T>;
    const auto scale = static_cast<Wide>(deviation), shift = static_cast<Wide>(mean);
    if constexpr (std::is_same_v<T, Wide>) {
      generator.normal_blocks(t.data<T>(), n);
      if (scale != 1 || shift != 0) {
        for (std::int64_t i = 0; i < n; ++i) t.data<T>()[i] = t.data<T>()[i] * scale + shift;
      }
    } else {
      std::vector<float> wide(static_cast<std::size_t>(n));
      generator.normal_blocks(wide.data(), n, true);
      for (std::int64_t i = 0; i < n; ++i)
        t.data<T>()[i] = static_cast<T>(wide[static_cast<std::size_t>(i)] * scale + shift);
    }
  });
}

void fill_randint(const Tensor& t, std::int64_t low, std::int64_t high, Generator& generator, const char* op) {
  check_integer_range(t.dtype(), low, high, op);
  const std::uint64_t range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
  dispatch_real(op, t.dtype(), [&]<class T>() {
    const std::lock_guard lock(generator.mutex());
    draw_each<T>(t, [&] {
      const auto value = static_cast<std::int64_t>(generator.below(range) + static_cast<std::uint64_t>(low));
      return static_cast<T>(static_cast<compute_t<T>>(value));
    });
  });
}

struct Factory {
  std::int32_t *dtype, *layout, *device;
};

TensorPtr make(const std::int64_t* size, std::int64_t size_len, const Factory& f, DType fallback, const char* op) {
  check_factory(f.layout, f.device, op);
  return Tensor::empty(ints(size, size_len), dtype_or(f.dtype, fallback));
}

TensorPtr make_like(AtenTensorHandle self, const Factory& f, const std::int32_t* memory_format, const char* op) {
  const Tensor& t = cpu_input(self, op, "self");
  check_factory(f.layout, f.device, op);
  return empty_like_format(t, dtype_or(f.dtype, t.dtype()), memory_format, op);
}

AOTITorchError rand_shim(const std::int64_t* size, std::int64_t length, AtenGeneratorHandle* generator, Factory f,
                         AtenTensorHandle* ret0) {
  return guarded("rand", [&] {
    TensorPtr out = make(size, length, f, DType::kFloat32, "rand");
    fill_uniform(*out, 0, 1, generator_of(generator), "rand");
    give(ret0, std::move(out), "rand");
  });
}

AOTITorchError randn_shim(const std::int64_t* size, std::int64_t length, AtenGeneratorHandle* generator, Factory f,
                          AtenTensorHandle* ret0) {
  return guarded("randn", [&] {
    TensorPtr out = make(size, length, f, DType::kFloat32, "randn");
    fill_normal(*out, 0, 1, generator_of(generator), "randn");
    give(ret0, std::move(out), "randn");
  });
}

AOTITorchError randint_shim(std::int64_t low, std::int64_t high, const std::int64_t* size, std::int64_t length,
                            AtenGeneratorHandle* generator, Factory f, AtenTensorHandle* ret0) {
  return guarded("randint", [&] {
    TensorPtr out = make(size, length, f, DType::kInt64, "randint");
    fill_randint(*out, low, high, generator_of(generator), "randint");
    give(ret0, std::move(out), "randint");
  });
}

AOTITorchError rand_like_shim(AtenTensorHandle self, AtenGeneratorHandle* generator, Factory f,
                              std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return guarded("rand_like", [&] {
    TensorPtr out = make_like(self, f, memory_format, "rand_like");
    fill_uniform(*out, 0, 1, generator_of(generator), "rand_like");
    give(ret0, std::move(out), "rand_like");
  });
}

AOTITorchError randn_like_shim(AtenTensorHandle self, AtenGeneratorHandle* generator, Factory f,
                               std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return guarded("randn_like", [&] {
    TensorPtr out = make_like(self, f, memory_format, "randn_like");
    fill_normal(*out, 0, 1, generator_of(generator), "randn_like");
    give(ret0, std::move(out), "randn_like");
  });
}

AOTITorchError randint_like_shim(AtenTensorHandle self, std::int64_t low, std::int64_t high, Factory f,
                                 std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return guarded("randint_like", [&] {
    TensorPtr out = make_like(self, f, memory_format, "randint_like");
    fill_randint(*out, low, high, kernels::default_generator(), "randint_like");
    give(ret0, std::move(out), "randint_like");
  });
}

// Bernoulli draws; `probability` broadcasts to the tensor's shape. A double probability is compared in double.
void fill_bernoulli(const Tensor& t, const Tensor& probability, Generator& generator) {
  const auto strides = broadcast_strides(probability, t.sizes(), "bernoulli_", "p");
  const kernels::StridedLoop<2> loop(t.sizes(), {DimSpan(t.strides()), DimSpan(strides)});
  const auto step = loop.inner();
  dispatch_floating("bernoulli_", probability.dtype(), [&]<class P>() {
    const P* p = probability.data<P>();
    loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) {
        const auto value = static_cast<double>(static_cast<compute_t<P>>(p[at[1] + i * step[1]]));
        check(value >= 0 && value <= 1, "bernoulli_: 'p' holds ", value, ", expected 0 to 1");
      }
    });
    const std::lock_guard lock(generator.mutex());
    dispatch_real("bernoulli_", t.dtype(), [&]<class T>() {
      T* to = t.data<T>();
      loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i) {
          const auto value = static_cast<compute_t<P>>(p[at[1] + i * step[1]]);
          bool hit;
          if constexpr (std::is_same_v<P, double>) {
            hit = generator.uniform_double() < value;
          } else {
            hit = generator.uniform_float() < value;
          }
          to[at[0] + i * step[0]] = static_cast<T>(static_cast<compute_t<T>>(hit ? 1 : 0));
        }
      });
    });
  });
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

UNTORCH_SHIM aoti_torch_cpu_rand(const std::int64_t* size, std::int64_t size_len_, std::int32_t* dtype,
                                 std::int32_t* layout, std::int32_t* device, std::int32_t, std::int32_t*,
                                 AtenTensorHandle* ret0) {
  return rand_shim(size, size_len_, nullptr, {dtype, layout, device}, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_rand_generator(const std::int64_t* size, std::int64_t size_len_,
                                           AtenGeneratorHandle* generator, std::int32_t* dtype, std::int32_t* layout,
                                           std::int32_t* device, std::int32_t, std::int32_t*, AtenTensorHandle* ret0) {
  return rand_shim(size, size_len_, generator, {dtype, layout, device}, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_rand_like(AtenTensorHandle self, std::int32_t* dtype, std::int32_t* layout,
                                      std::int32_t* device, std::int32_t, std::int32_t*, std::int32_t* memory_format,
                                      AtenTensorHandle* ret0) {
  return rand_like_shim(self, nullptr, {dtype, layout, device}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_rand_like_generator(AtenTensorHandle self, AtenGeneratorHandle* generator,
                                                std::int32_t* dtype, std::int32_t* layout, std::int32_t* device,
                                                std::int32_t, std::int32_t*, std::int32_t* memory_format,
                                                AtenTensorHandle* ret0) {
  return rand_like_shim(self, generator, {dtype, layout, device}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randn(const std::int64_t* size, std::int64_t size_len_, std::int32_t* dtype,
                                  std::int32_t* layout, std::int32_t* device, std::int32_t, std::int32_t*,
                                  AtenTensorHandle* ret0) {
  return randn_shim(size, size_len_, nullptr, {dtype, layout, device}, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randn_generator(const std::int64_t* size, std::int64_t size_len_,
                                            AtenGeneratorHandle* generator, std::int32_t* dtype, std::int32_t* layout,
                                            std::int32_t* device, std::int32_t, std::int32_t*, AtenTensorHandle* ret0) {
  return randn_shim(size, size_len_, generator, {dtype, layout, device}, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randn_like(AtenTensorHandle self, std::int32_t* dtype, std::int32_t* layout,
                                       std::int32_t* device, std::int32_t, std::int32_t*, std::int32_t* memory_format,
                                       AtenTensorHandle* ret0) {
  return randn_like_shim(self, nullptr, {dtype, layout, device}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randn_like_generator(AtenTensorHandle self, AtenGeneratorHandle* generator,
                                                 std::int32_t* dtype, std::int32_t* layout, std::int32_t* device,
                                                 std::int32_t, std::int32_t*, std::int32_t* memory_format,
                                                 AtenTensorHandle* ret0) {
  return randn_like_shim(self, generator, {dtype, layout, device}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randint(std::int64_t high, const std::int64_t* size, std::int64_t size_len_,
                                    std::int32_t* dtype, std::int32_t* layout, std::int32_t* device, std::int32_t,
                                    std::int32_t*, AtenTensorHandle* ret0) {
  return randint_shim(0, high, size, size_len_, nullptr, {dtype, layout, device}, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randint_generator(std::int64_t high, const std::int64_t* size, std::int64_t size_len_,
                                              AtenGeneratorHandle* generator, std::int32_t* dtype, std::int32_t* layout,
                                              std::int32_t* device, std::int32_t, std::int32_t*,
                                              AtenTensorHandle* ret0) {
  return randint_shim(0, high, size, size_len_, generator, {dtype, layout, device}, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randint_low(std::int64_t low, std::int64_t high, const std::int64_t* size,
                                        std::int64_t size_len_, std::int32_t* dtype, std::int32_t* layout,
                                        std::int32_t* device, std::int32_t, std::int32_t*, AtenTensorHandle* ret0) {
  return randint_shim(low, high, size, size_len_, nullptr, {dtype, layout, device}, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randint_low_out(AtenTensorHandle out, std::int64_t low, std::int64_t high,
                                            const std::int64_t* size, std::int64_t size_len_) {
  return guarded("randint", [&] {
    const Tensor& t = cpu_input(out, "randint", "out");
    const Dims sizes(ints(size, size_len_));
    check(t.sizes() == sizes, "randint: 'out' has shape ", to_string(t.sizes()), ", expected ", to_string(sizes));
    fill_randint(t, low, high, kernels::default_generator(), "randint");
  });
}

UNTORCH_SHIM aoti_torch_cpu_randint_like(AtenTensorHandle self, std::int64_t high, std::int32_t* dtype,
                                         std::int32_t* layout, std::int32_t* device, std::int32_t, std::int32_t*,
                                         std::int32_t* memory_format, AtenTensorHandle* ret0) {
  return randint_like_shim(self, 0, high, {dtype, layout, device}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randint_like_low_dtype(AtenTensorHandle self, std::int64_t low, std::int64_t high,
                                                   std::int32_t* dtype, std::int32_t* layout, std::int32_t* device,
                                                   std::int32_t, std::int32_t*, std::int32_t* memory_format,
                                                   AtenTensorHandle* ret0) {
  return randint_like_shim(self, low, high, {dtype, layout, device}, memory_format, ret0);
}

UNTORCH_SHIM aoti_torch_cpu_randperm(std::int64_t n, std::int32_t* dtype, std::int32_t* layout, std::int32_t* device,
                                     std::int32_t, std::int32_t*, AtenTensorHandle* ret0) {
  return guarded("randperm", [&] {
    check(n >= 0, "randperm: 'n' is ", n, ", expected 0 or more");
    check_factory(layout, device, "randperm");
    const DType dtype_wanted = dtype_or(dtype, DType::kInt64);
    TensorPtr wide = Tensor::empty(DimSpan(&n, 1), DType::kInt64);
    auto* order = wide->data<std::int64_t>();
    std::iota(order, order + n, std::int64_t{0});
    Generator& generator = kernels::default_generator();
    {
      const std::lock_guard lock(generator.mutex());
      for (std::int64_t i = 0; i < n - 1; ++i) {
        const auto rest = static_cast<std::uint64_t>(n - i);
        // PyTorch draws 32 bits while the modulo stays fair enough.
        const std::uint64_t draw = n < 0xffffffffLL / 20 ? generator.random() : generator.random64();
        std::swap(order[i], order[i + static_cast<std::int64_t>(draw % rest)]);
      }
    }
    give(ret0, dtype_wanted == DType::kInt64 ? std::move(wide) : to_dtype(*wide, dtype_wanted), "randperm");
  });
}

UNTORCH_SHIM aoti_torch_cpu_uniform(AtenTensorHandle self, double from, double to, AtenGeneratorHandle* generator,
                                    AtenTensorHandle* ret0) {
  return guarded("uniform", [&] {
    const Tensor& t = cpu_input(self, "uniform", "self");
    TensorPtr out = empty_like(t, t.dtype());
    fill_uniform(*out, from, to, generator_of(generator), "uniform");
    give(ret0, std::move(out), "uniform");
  });
}

UNTORCH_SHIM aoti_torch_cpu_normal_functional(AtenTensorHandle self, double mean, double std,
                                              AtenGeneratorHandle* generator, AtenTensorHandle* ret0) {
  return guarded("normal", [&] {
    const Tensor& t = cpu_input(self, "normal", "self");
    TensorPtr out = empty_like(t, t.dtype());
    fill_normal(*out, mean, std, generator_of(generator), "normal");
    give(ret0, std::move(out), "normal");
  });
}

UNTORCH_SHIM aoti_torch_cpu_exponential(AtenTensorHandle self, double lambd, AtenGeneratorHandle* handle,
                                        AtenTensorHandle* ret0) {
  return guarded("exponential", [&] {
    const Tensor& t = cpu_input(self, "exponential", "self");
    check(lambd > 0, "exponential: 'lambd' is ", lambd, ", expected more than 0");
    TensorPtr out = empty_like(t, t.dtype());
    Generator& generator = generator_of(handle);
    dispatch_floating("exponential", t.dtype(), [&]<class T>() {
      const std::lock_guard lock(generator.mutex());
      draw_each<T>(*out, [&] { return static_cast<T>(static_cast<compute_t<T>>(generator.exponential(lambd))); });
    });
    give(ret0, std::move(out), "exponential");
  });
}

UNTORCH_SHIM aoti_torch_cpu_bernoulli__Tensor(AtenTensorHandle self, AtenTensorHandle p,
                                              AtenGeneratorHandle* generator) {
  return guarded("bernoulli_", [&] {
    fill_bernoulli(cpu_input(self, "bernoulli_", "self"), cpu_input(p, "bernoulli_", "p"), generator_of(generator));
  });
}

UNTORCH_SHIM aoti_torch_cpu_bernoulli__float(AtenTensorHandle self, double p, AtenGeneratorHandle* generator) {
  return guarded("bernoulli_", [&] {
    fill_bernoulli(cpu_input(self, "bernoulli_", "self"), *scalar_tensor(p, DType::kFloat64), generator_of(generator));
  });
}
