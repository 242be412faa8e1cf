"""Random sampling. Draws from the generator of untorch.runtime.registry, so the numbers are not PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels.arrays import Array, kernel, promoted
from untorch.runtime.registry import random_generator

KERNELS: dict[str, Callable[..., Any]] = {}


def _like(self: Array, values: Any, dtype: Any = None) -> Array:
    """``values`` in the dtype and the memory order of ``self``."""
    result = numpy.empty_like(self, dtype=dtype, order="K", subok=False)
    result[...] = numpy.asarray(values).astype(result.dtype)
    return result


def _probabilities(operator: str, name: str, p: Any) -> Array:
    values = promoted(numpy.asarray(p))
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise InvalidArgumentError(f"{operator}: argument `{name}`: expected probabilities from 0 to 1")
    return values


def _check_positive(operator: str, name: str, value: float) -> None:
    if not value > 0:
        raise InvalidArgumentError(f"{operator}: argument `{name}`: expected a value above 0, got {value}")


@kernel(KERNELS, "multinomial")
def multinomial(self: Array, num_samples: int, replacement: bool = False, *, generator: None = None) -> Array:
    """Indices (…, num_samples) drawn with the weights (…, categories)."""
    del generator
    if self.ndim not in (1, 2) or num_samples < 1:
        raise InvalidArgumentError(
            f"multinomial: expected 1 or 2 dimensions and at least 1 sample, got the shape {self.shape} and "
            f"{num_samples}"
        )
    weights = promoted(self).astype(numpy.float64)
    if not bool((numpy.isfinite(weights) & (weights >= 0)).all()):
        raise InvalidArgumentError("multinomial: argument `self`: expected finite weights that are not negative")
    if not bool((weights.sum(axis=-1) > 0).all()):
        raise InvalidArgumentError("multinomial: argument `self`: expected weights with a sum above 0")
    if replacement:
        bounds = numpy.cumsum(weights, axis=-1)
        draws = random_generator().random((*self.shape[:-1], num_samples)) * bounds[..., -1:]
        rows = zip(bounds.reshape(-1, self.shape[-1]), draws.reshape(-1, num_samples), strict=True)
        found = [numpy.searchsorted(bound, draw, side="right") for bound, draw in rows]
        return numpy.asarray(found, numpy.int64).reshape(draws.shape)
    if not bool(((weights > 0).sum(axis=-1) >= num_samples).all()):
        raise InvalidArgumentError(
            f"multinomial: argument `num_samples`: expected no more than there are weights above 0, got {num_samples}"
        )
    # Exponential clocks: the first num_samples to ring, each with its weight as rate, are the sample in order.
    clocks = random_generator().standard_exponential(weights.shape) / weights
    return numpy.array(numpy.argsort(clocks, axis=-1)[..., :num_samples], numpy.int64, order="C")


@kernel(KERNELS, "bernoulli")
def bernoulli(self: Array, *, generator: None = None) -> Array:
    del generator
    draws = random_generator().random(self.shape) < _probabilities("bernoulli", "self", self)
    return numpy.asarray(draws, self.dtype, order="C")


@kernel(KERNELS, "bernoulli.p")
def bernoulli_p(self: Array, p: float, *, generator: None = None) -> Array:
    """``self`` gives the shape and dtype, ``p`` the probability."""
    return numpy.array(bernoulli_tensor(self, p, generator=generator), order="C")


@kernel(KERNELS, "bernoulli.Tensor")
def bernoulli_tensor(self: Array, p: Any, *, generator: None = None) -> Array:
    """``self`` gives the shape, dtype and memory order, ``p`` the probabilities."""
    del generator
    return _like(self, random_generator().random(self.shape) < _probabilities("bernoulli", "p", p))


@kernel(KERNELS, "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def normal(mean: Any, std: Any = 1.0, *, generator: None = None) -> Array:
    del generator
    dtype = next(value.dtype for value in (mean, std) if isinstance(value, numpy.ndarray))
    mean, std = promoted(numpy.asarray(mean)), promoted(numpy.asarray(std))
    if not bool((std >= 0).all()):
        raise InvalidArgumentError("normal: argument `std`: expected values that are not negative")
    shape = numpy.broadcast_shapes(mean.shape, std.shape)
    return numpy.asarray(random_generator().standard_normal(shape) * std + mean).astype(dtype, order="C")


@kernel(KERNELS, "normal.float_float")
def normal_of_size(
    mean: float, std: float, size: Sequence[int], *, generator: None = None, dtype: Any = None, **_: Any
) -> Array:
    del generator
    return random_generator().normal(mean, std, tuple(size)).astype(dtype or numpy.float32)


@kernel(KERNELS, "prims::normal")
def prims_normal(
    shape: Sequence[int], *, mean: float, std: float, dtype: Any, generator: None = None, **_: Any
) -> Array:
    return normal_of_size(mean, std, shape, generator=generator, dtype=dtype)


@kernel(KERNELS, "normal_functional")
def normal_functional(self: Array, mean: float = 0.0, std: float = 1.0, *, generator: None = None) -> Array:
    del generator
    return _like(self, random_generator().normal(mean, std, self.shape))


@kernel(KERNELS, "uniform")
def uniform(self: Array, from_: float = 0.0, to: float = 1.0, *, generator: None = None) -> Array:
    del generator
    return _like(self, random_generator().random(self.shape) * (to - from_) + from_)


@kernel(KERNELS, "exponential")
def exponential(self: Array, lambd: float = 1.0, *, generator: None = None) -> Array:
    del generator
    _check_positive("exponential", "lambd", lambd)
    return _like(self, random_generator().standard_exponential(self.shape) / lambd)


@kernel(KERNELS, "geometric")
def geometric(self: Array, p: float, *, generator: None = None) -> Array:
    del generator
    if not 0 < p < 1:
        raise InvalidArgumentError(f"geometric: argument `p`: expected a value between 0 and 1, got {p}")
    return _like(self, random_generator().geometric(p, self.shape))


@kernel(KERNELS, "cauchy")
def cauchy(self: Array, median: float = 0.0, sigma: float = 1.0, *, generator: None = None) -> Array:
    del generator
    _check_positive("cauchy", "sigma", sigma)
    return _like(self, random_generator().standard_cauchy(self.shape) * sigma + median)


@kernel(KERNELS, "log_normal")
def log_normal(self: Array, mean: float = 1.0, std: float = 2.0, *, generator: None = None) -> Array:
    """``mean`` and ``std`` are those of the logarithm."""
    del generator
    _check_positive("log_normal", "std", std)
    return _like(self, random_generator().lognormal(mean, std, self.shape))


@kernel(KERNELS, "poisson")
def poisson(self: Array, generator: None = None) -> Array:
    del generator
    rate = promoted(self)
    if not bool((rate >= 0).all()):
        raise InvalidArgumentError("poisson: argument `self`: expected rates that are not negative")
    return numpy.asarray(random_generator().poisson(rate)).astype(self.dtype)


@kernel(KERNELS, "binomial")
def binomial(count: Array, prob: Array, generator: None = None) -> Array:
    del generator
    trials, chance = promoted(count), _probabilities("binomial", "prob", prob)
    if not bool((trials >= 0).all()):
        raise InvalidArgumentError("binomial: argument `count`: expected counts that are not negative")
    return numpy.asarray(random_generator().binomial(trials.astype(numpy.int64), chance)).astype(count.dtype)


@kernel(KERNELS, "_standard_gamma")
def standard_gamma(self: Array, generator: None = None) -> Array:
    del generator
    return numpy.asarray(random_generator().standard_gamma(promoted(self))).astype(self.dtype)


@kernel(KERNELS, "_sample_dirichlet")
def sample_dirichlet(self: Array, generator: None = None) -> Array:
    del generator
    draws = numpy.asarray(random_generator().standard_gamma(promoted(self)))
    return numpy.asarray(draws / draws.sum(axis=-1, keepdims=True), self.dtype)


@kernel(KERNELS, "randperm", "randperm.generator")
def randperm(n: int, *, generator: None = None, dtype: Any = None, **_: Any) -> Array:
    del generator
    return random_generator().permutation(n).astype(dtype or numpy.int64)


@kernel(KERNELS, "randint", "randint.generator")
def randint(high: int, size: Sequence[int], *, generator: None = None, dtype: Any = None, **_: Any) -> Array:
    return randint_low(0, high, size, generator=generator, dtype=dtype)


@kernel(KERNELS, "randint.low", "randint.low_generator")
def randint_low(
    low: int, high: int, size: Sequence[int], *, generator: None = None, dtype: Any = None, **_: Any
) -> Array:
    del generator
    if low >= high:
        raise InvalidArgumentError(f"randint: expected `low` below `high`, got {low} and {high}")
    return random_generator().integers(low, high, tuple(size)).astype(dtype or numpy.int64)


@kernel(KERNELS, "randint_like", "randint_like.generator", "randint_like.Tensor", "randint_like.Tensor_generator")
def randint_like(self: Array, high: Any, *, generator: None = None, dtype: Any = None, **_: Any) -> Array:
    return randint_like_low(self, 0, int(high), generator=generator, dtype=dtype)


@kernel(KERNELS, "randint_like.low_dtype", "randint_like.low_generator_dtype")
def randint_like_low(self: Array, low: int, high: int, *, generator: None = None, dtype: Any = None, **_: Any) -> Array:
    return _like(self, randint_low(low, high, self.shape, generator=generator), dtype or self.dtype)


@kernel(KERNELS, "random.from")
def random_from(self: Array, from_: int, to: int | None, *, generator: None = None) -> Array:
    del generator
    if to is None:
        return _like(self, random_generator().integers(from_, _largest(self.dtype), self.shape, endpoint=True))
    if from_ >= to:
        raise InvalidArgumentError(f"random: expected `from` below `to`, got {from_} and {to}")
    return _like(self, random_generator().integers(from_, to, self.shape))


@kernel(KERNELS, "random.to")
def random_to(self: Array, to: int, *, generator: None = None) -> Array:
    return random_from(self, 0, to, generator=generator)


@kernel(KERNELS, "random")
def random(self: Array, *, generator: None = None) -> Array:
    """Integers from 0 to the largest that the dtype holds exactly."""
    return random_from(self, 0, None, generator=generator)


def _largest(dtype: numpy.dtype[Any]) -> int:
    if dtype.kind in "iu":
        return min(int(numpy.iinfo(dtype).max), int(numpy.iinfo(numpy.int64).max))
    digits = {"bool": 1, "bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}[dtype.name]
    return 1 if digits == 1 else 2**digits
