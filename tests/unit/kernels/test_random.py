"""Sampling: the form of PyTorch's results, their support, and their averages under a fixed seed."""

import numpy
import pytest
import torch
from oracle import as_list, check_form, operator, to_numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.registry import find_kernel, manual_seed

WIDE = torch.full((40, 500), 0.25).mT


@pytest.fixture(autouse=True)
def seed():
    manual_seed(0)


# name, arguments, expected mean and standard deviation
CASES = [
    ("bernoulli", (WIDE,), 0.25, 0.433),
    ("bernoulli.p", (WIDE, 0.5), 0.5, 0.5),
    ("bernoulli.Tensor", (WIDE, WIDE), 0.25, 0.433),
    ("normal.Tensor_float", (WIDE, 2.0), 0.25, 2.0),
    ("normal.float_Tensor", (1.0, WIDE), 1.0, 0.25),
    ("normal.Tensor_Tensor", (WIDE, WIDE), 0.25, 0.25),
    ("normal.float_float", (1.0, 2.0, [200, 100]), 1.0, 2.0),
    ("normal_functional", (WIDE, 1.0, 2.0), 1.0, 2.0),
    ("uniform", (WIDE, -1.0, 3.0), 1.0, 1.1547),
    ("exponential", (WIDE, 2.0), 0.5, 0.5),
    ("geometric", (WIDE, 0.5), 2.0, 1.414),
    ("log_normal", (WIDE, 0.0, 0.25), 1.0317, 0.262),
    ("poisson", (WIDE,), 0.25, 0.5),
    ("binomial", (WIDE * 0 + 8, WIDE), 2.0, 1.2247),
    ("_standard_gamma", (WIDE,), 0.25, 0.5),
    ("randint", (5, [200, 100]), 2.0, 1.414),
    ("randint.low", (1, 6, [200, 100]), 3.0, 1.414),
    ("randint_like", (WIDE, 5), 2.0, 1.414),
    ("randint_like.Tensor", (WIDE, torch.tensor(5)), 2.0, 1.414),
    ("randint_like.low_dtype", (WIDE, 1, 6), 3.0, 1.414),
    ("random.from", (WIDE, 1, 6), 3.0, 1.414),
    ("random.to", (WIDE, 5), 2.0, 1.414),
]


@pytest.mark.parametrize(("name", "arguments", "mean", "deviation"), CASES, ids=[case[0] for case in CASES])
def test_distribution(name, arguments, mean, deviation):
    actual = find_kernel(f"aten::{name}")(*[to_numpy(a) for a in arguments])
    # PyTorch leaves these two without a fixed layout of their own
    check_form([actual], as_list(operator(name)(*arguments)), strides=name not in ("poisson", "binomial"))
    assert actual.mean() == pytest.approx(mean, abs=0.03 * max(abs(mean), deviation) + 0.01)
    assert actual.std() == pytest.approx(deviation, rel=0.05)
    again = find_kernel(f"aten::{name}")(*[to_numpy(a) for a in arguments])
    assert not numpy.array_equal(actual, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["bernoulli", "poisson", "exponential", "normal_functional"])
def test_dtypes(name, dtype):
    x = torch.full((4, 3), 0.5, dtype=dtype)
    check_form([find_kernel(f"aten::{name}")(to_numpy(x))], [operator(name)(x)])


def test_cauchy():
    actual = find_kernel("aten::cauchy")(WIDE.numpy(), 1.0, 2.0)
    assert numpy.median(actual) == pytest.approx(1.0, abs=0.1)
    assert numpy.quantile(actual, 0.75) == pytest.approx(3.0, abs=0.2)


def test_random_integers_fill_what_the_dtype_holds():
    assert find_kernel("aten::random")(numpy.zeros(500, numpy.uint8)).max() > 240
    assert find_kernel("aten::random")(numpy.zeros(500, numpy.float32)).max() <= 2**24
    assert set(find_kernel("aten::random")(numpy.zeros(500, numpy.bool_)).tolist()) == {False, True}


def test_dirichlet():
    actual = find_kernel("aten::_sample_dirichlet")(numpy.full((100, 4), 0.5, numpy.float32))
    numpy.testing.assert_allclose(actual.sum(axis=-1), 1, rtol=1e-5)


def test_permutation():
    assert sorted(find_kernel("aten::randperm")(9).tolist()) == list(range(9))
    assert find_kernel("aten::randperm")(9, dtype=numpy.dtype("int32")).dtype == numpy.int32


def test_prims_normal():
    actual = find_kernel("prims::normal")(
        [100, 100], mean=1, std=2.0, dtype=numpy.dtype("float32"), device="cpu", requires_grad=False, generator=None
    )
    assert actual.dtype == numpy.float32
    assert actual.mean() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_multinomial(replacement, dtype):
    weights = torch.tensor([[0.0, 1.0, 3.0, 4.0]] * 4000, dtype=dtype)
    actual = find_kernel("aten::multinomial")(to_numpy(weights), 2, replacement)
    check_form([actual], [torch.multinomial(weights, 2, replacement)])
    first = numpy.bincount(actual[:, 0], minlength=4) / 4000
    numpy.testing.assert_allclose(first, [0, 0.125, 0.375, 0.5], atol=0.03)
    assert replacement == bool((actual[:, 0] == actual[:, 1]).any())
    assert find_kernel("aten::multinomial")(to_numpy(weights[0]), 1).shape == (1,)


def test_the_seed_decides():
    draws = []
    for value in (7, 7, 8):
        manual_seed(value)
        draws.append(find_kernel("aten::multinomial")(numpy.ones(50), 50).tolist())
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("multinomial", (numpy.array([1.0, 0.0]), 2), "no more than there are weights above 0, got 2"),
        ("multinomial", (numpy.array([-1.0, 2.0]), 1), "expected finite weights that are not negative"),
        ("multinomial", (numpy.zeros(2), 1), "expected weights with a sum above 0"),
        ("multinomial", (numpy.ones((2, 2, 2)), 1), "expected 1 or 2 dimensions and at least 1 sample"),
        ("bernoulli", (numpy.array([2.0]),), "argument `self`: expected probabilities from 0 to 1"),
        ("normal.Tensor_float", (numpy.zeros(2), -1.0), "argument `std`: expected values that are not negative"),
        ("exponential", (numpy.zeros(2), 0.0), "argument `lambd`: expected a value above 0, got 0.0"),
        ("geometric", (numpy.zeros(2), 1.0), "argument `p`: expected a value between 0 and 1, got 1.0"),
        ("poisson", (-numpy.ones(2),), "expected rates that are not negative"),
        ("binomial", (-numpy.ones(2), numpy.ones(2)), "expected counts that are not negative"),
        ("randint", (0, [3]), "randint: expected `low` below `high`, got 0 and 0"),
        ("random.from", (numpy.zeros(3), 4, 2), "random: expected `from` below `to`, got 4 and 2"),
    ],
)
def test_wrong_arguments(name, arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        find_kernel(f"aten::{name}")(*arguments)
