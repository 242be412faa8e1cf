"""Arrays made for a method."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.cli.inputs import Recipe, evaluate, make_array, make_inputs, parse_inputs, symbols_of
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from untorch.runtime.spec import SymbolicDim, TensorSpec, parse_specs


def spec(dtype: str, shape: list[Any], **more: Any) -> TensorSpec:
    (made,) = parse_specs([{"name": "x", "dtype": dtype, "shape": shape, "contiguous": True, **more}])
    assert made is not None
    return made


def expression(text: str, rpn: list[Any] | None) -> SymbolicDim:
    return SymbolicDim(text, is_expression=True, rpn=None if rpn is None else tuple(rpn))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["float16", "float32", "float64", "int8", "uint8", "int64", "bool", "complex64"]),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["random", "zeros", "ones"]),
)
def test_dtype_and_shape(dtype: str, shape: list[int], fill: str) -> None:
    (array,) = make_inputs([spec(dtype, shape)], 1, [f"x={fill}"])
    assert (array.dtype.name, list(array.shape)) == (dtype, shape)
    assert array.flags.c_contiguous
    if fill != "random":
        assert (array == (fill == "ones")).all()


def test_bounds_of_integers() -> None:
    array = make_array(Recipe("random", low=-3, high=7), "int64", (2000,), numpy.random.default_rng(0))
    assert (array.min(), array.max()) == (-3, 7)


def test_bfloat16_comes_as_float32_or_as_bits(tmp_path: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = numpy.array([1.5, -2.0], numpy.float32)
    numpy.save(tmp_path / "values.npy", values)
    numpy.save(tmp_path / "bits.npy", values.astype(ml_dtypes.bfloat16).view(numpy.uint16))
    numpy.save(tmp_path / "wrong.npy", values.astype(numpy.int64))
    for name in ("values", "bits"):
        (array,) = make_inputs([spec("bfloat16", [2])], 1, [f"x={tmp_path}/{name}.npy"])
        assert array.dtype == ml_dtypes.bfloat16
        numpy.testing.assert_array_equal(array.astype(numpy.float32), values)
    with pytest.raises(InvalidArgumentError, match="expected bfloat16 as float32, or as its bits in uint16, got int64"):
        make_inputs([spec("bfloat16", [2])], 1, [f"x={tmp_path}/wrong.npy"])


def test_memory_layout_of_the_method() -> None:
    (array,) = make_inputs([spec("float32", [3, 5], contiguous=False, strides=[1, 3])], 1, ["x=random"])
    assert array.strides == (4, 12)
    assert len(numpy.unique(array)) == 15


def test_sizes_that_depend_on_each_other() -> None:
    shape = [{"symbol": "s0", "min": 1, "max": None}, {"expr": "2*s0 + 1", "rpn": ["s0", 2, "*", 1, "+"]}]
    (array,) = make_inputs([spec("float32", shape)], 1, [], ["s0=3"], fill_missing=True)
    assert array.shape == (3, 7)


@pytest.mark.parametrize(
    ("rpn", "size"),
    [([7, "s", "-"], 2), (["s", 2, "//"], 2), (["s", 3, "%"], 2), (["s", 2, "ceildiv"], 3), (["s", 2, "**"], 25),
     (["s", 2, "min"], 2), (["s", 9, "max"], 9)],
)  # fmt: skip
def test_every_operator(rpn: list[Any], size: int) -> None:
    assert evaluate(expression("…", rpn), {"s": 5}) == size


@pytest.mark.parametrize("rpn", [["+"], ["s", "t"], ["s", "u", "+"], [1, 0, "//"]])
def test_damaged_expression(rpn: list[Any]) -> None:
    with pytest.raises(InvalidFileError, match="is damaged"):
        evaluate(expression("?", rpn), {"s": 5, "t": 1})


def test_expression_without_postfix_form() -> None:
    with pytest.raises(UnsupportedError, match="give the input with --input"):
        evaluate(expression("sqrt(s0)", None), {"s0": 4})


def test_default_size_keeps_the_limits() -> None:
    shape = [{"symbol": "a", "min": 20, "max": 30}, {"symbol": "b", "min": 1, "max": 3}]
    (array,) = make_inputs([spec("float32", shape)], 1, fill_missing=True)
    assert array.shape == (20, 3)
    assert symbols_of([spec("float32", shape)]) == {"a": (20, 30), "b": (1, 3)}


def test_stock_packages_have_numbers_as_names() -> None:
    arrays = make_inputs([], 2, ["1=ones:int64[2]", "0=zeros:float32[]"])
    assert [array.dtype.name for array in arrays] == ["float32", "int64"]
    with pytest.raises(InvalidArgumentError, match="a stock package does not tell dtype and shape; give them"):
        make_inputs([], 1, ["random"])
    with pytest.raises(
        InvalidArgumentError, match=r"1 not given; pass --input 1=FILE.npy or --input '1=random:float32"
    ):
        make_inputs([], 2, ["zeros:float32[2]"], fill_missing=True)


def test_npz_with_a_name_must_hold_one_array(tmp_path: Any) -> None:
    numpy.savez(tmp_path / "two.npz", a=numpy.zeros(1), b=numpy.zeros(1))
    with pytest.raises(InvalidArgumentError, match=r"holds 2 arrays \(a, b\), expected one"):
        parse_inputs([f"x={tmp_path}/two.npz"])
