"""Calls whose arguments are trees: dicts, tuples, keywords, Python values, ``out=``, and what is refused."""

from __future__ import annotations

import gc
import pathlib
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import untorch
from untorch import _core

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def method(forms_package: pathlib.Path) -> Iterator[untorch.Method]:
    with untorch.load(forms_package) as program:
        yield program.forward


def arrays(count: int) -> list[Array]:
    return [np.arange(4, dtype=np.float32) + 10 * i for i in range(count)]


def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    a, b, c, d, e = arrays(5)
    return ({"a": a, "b": b}, [(c, d), e], True), {"scale": np.float32(3)}


def check(result: Any) -> None:
    a, b, c, d, e = arrays(5)
    assert [type(part) for part in (result, *result, result[1]["c"])] == [tuple, list, dict, tuple]
    (first, none), rest = result
    np.testing.assert_array_equal(first, a * 3)
    assert none is None
    assert list(rest) == ["b", "c"]
    np.testing.assert_array_equal(rest["b"], b * 2)
    np.testing.assert_array_equal(rest["c"][0], c + d)
    np.testing.assert_array_equal(rest["c"][1], e + 1)


@pytest.mark.slow
def test_a_tree_in_and_a_tree_out(method: untorch.Method) -> None:
    args, kwargs = arguments()
    check(method(*args, **kwargs))


def test_places_pass_for_names(method: untorch.Method) -> None:
    args, kwargs = arguments()
    check(method(*args, *kwargs.values()))
    assert kwargs.keys() == {"scale"}


@pytest.mark.parametrize("kind", [OrderedDict, UserDict, lambda pairs: defaultdict(None, pairs)])
def test_mappings_pass_for_dicts(method: untorch.Method, kind: Any) -> None:
    (named, *rest), kwargs = arguments()
    check(method(kind(reversed(named.items())), *rest, **kwargs))


@pytest.mark.parametrize("kind", [tuple, deque])
def test_sequences_pass_for_lists(method: untorch.Method, kind: Any) -> None:
    (named, items, flag), kwargs = arguments()
    check(method(named, kind(items), flag, **kwargs))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a, k: (a[:2], k), "expected 3 positional arguments, got 2; it takes ("),
        (lambda a, k: ((*a, 1), k), "got two values for argument 'scale'; it takes ("),
        (lambda a, k: ((*a, 1, 2), k), "expected 3 positional arguments, got 5; it takes ("),
        (lambda a, k: (a, {}), "missing keyword arguments scale; it takes ("),
        (lambda a, k: (a, {"size": 1, "other": 2}), "method 'forward': unknown arguments 'size', 'other'. The arguments "
         "are ("),
        (lambda a, k: (a, {"scal": 1}), "method 'forward': unknown argument 'scal'; did you mean 'scale'? The arguments "
         "are ("),
        (lambda a, k: ((), {"scalé": 1, "scale": 2}), "unknown argument 'scalé'; did you mean 'scale'? The arguments "
         "are ("),
        (lambda a, k: (([], *a[1:]), k), "method 'forward', args[0]: expected a dict with 'a', 'b', got list"),
        (lambda a, k: (({"a": 1}, *a[1:]), k), "args[0]: expected a dict with 'a', 'b'; missing 'b'"),
        (lambda a, k: (({"a": 1, "b": 2, "z": 3, 4: 5}, *a[1:]), k),
         "args[0]: expected a dict with 'a', 'b'; unknown 4, 'z'"),
        (lambda a, k: (({"a": 1, "c": 2}, *a[1:]), k), "args[0]: expected a dict with 'a', 'b'; missing 'b'; unknown 'c'"),
        (lambda a, k: ((a[0], {"x": 1}, a[2]), k), "method 'forward', args[1]: expected a list of 2, got dict"),
        (lambda a, k: ((a[0], a[1][:1], a[2]), k), "args[1]: expected a list of 2, got list of 1"),
        (lambda a, k: ((a[0], [[1, 2], 3], a[2]), k), "args[1][0]: expected a tuple of 2, got list"),
        (lambda a, k: ((a[0], [np.zeros(2), 3], a[2]), k), "args[1][0]: expected a tuple of 2, got ndarray"),
        (lambda a, k: ((a[0], a[1], False), k), "method 'forward', args[2]: the model was exported with the value True, "
         "got False; export it again for another value"),
        (lambda a, k: ((a[0], a[1], 1), k), "args[2]: the model was exported with the value True, got 1; export"),
        (lambda a, k: ((a[0], a[1], np.ones(3)), k), "args[2]: the model was exported with the value True, got array("),
        (lambda a, k: (({"a": 3.5, "b": 1}, *a[1:]), k),
         "method 'forward', argument 0: expected an array (numpy, or anything with __dlpack__), got float"),
        (lambda a, k: (a, {"scale": np.zeros(2, np.float32)}), "input 'scale': expected float32[], got float32[2]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(method: untorch.Method, change: Any, text: str) -> None:
    args, kwargs = change(*arguments())
    with pytest.raises(untorch.InvalidArgumentError) as caught:
        method(*args, **kwargs)
    assert text in str(caught.value)


def test_another_form_is_a_type_error(method: untorch.Method) -> None:
    args, kwargs = arguments()
    calls: list[Any] = [
        lambda: method(*args),
        lambda: method(*args[:2], **kwargs),
        lambda: method([], *args[1:], **kwargs),
        lambda: method(args[0], [[], 3], True, **kwargs),
        lambda: method({"a": 3.5, "b": 1}, *args[1:], **kwargs),
        lambda: method(*args, **kwargs, out=5),
        lambda: method(*args, **kwargs, out=([None, None], {"b": [], "c": (None, None)})),
        lambda: method.run(3),
    ]
    for call in calls:
        with pytest.raises(untorch.ArgumentTypeError) as caught:
            call()
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, untorch.InvalidArgumentError)


def test_what_a_mapping_raises_passes_through(method: untorch.Method) -> None:
    class Broken(UserDict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise OSError("not today")

    (named, *rest), kwargs = arguments()
    with pytest.raises(OSError, match="not today"):
        method(Broken(named), *rest, **kwargs)


def test_out_takes_a_tree_like_the_result(method: untorch.Method) -> None:
    args, kwargs = arguments()
    first, second = np.empty(4, np.float32), np.empty(8, np.float32)[::2]
    out = ([first, None], {"b": None, "c": (second, None)})
    result = method(*args, **kwargs, out=out)
    check(result)
    assert result[0][0] is first
    assert result[1]["c"][0] is second
    check(method(*args, **kwargs, out=None))
    wrong = [
        (([first, None],), "method 'forward', out: expected a tuple of 2, got tuple of 1"),
        (([first], {"b": None, "c": (None, None)}), "method 'forward', out[0]: expected a list of 2, got list of 1"),
        (([first, first], {"b": None, "c": (None, None)}),
         "method 'forward', out[1]: expected None, as the output is, got an array"),
        (([None, None], {"b": [1], "c": (None, None)}),
         "method 'forward', out[2]: expected a numpy array to write to, got list"),
        (([None, None], {"b": np.empty((2, 2), np.float32), "c": (None, None)}),
         "method 'forward', out[2]: expected float32[4], got float32[2, 2]"),
        (([None, None], {"b": np.empty(4, np.int32), "c": (None, None)}),
         "method 'forward', out[2]: expected float32[4], got int32[4]"),
    ]  # fmt: skip
    for tree, text in wrong:
        with pytest.raises(untorch.InvalidArgumentError) as caught:
            method(*args, **kwargs, out=tree)
        assert str(caught.value) == text


def test_arguments_may_be_given_by_name(own_package: pathlib.Path) -> None:
    x = np.ones((2, 4), np.float32)
    with untorch.load(own_package) as program:
        given = {"x": x}
        np.testing.assert_array_equal(program.linear(**given), program.linear(x))
        assert list(given) == ["x"]
        with pytest.raises(untorch.InvalidArgumentError) as caught:
            program.linear(x=x, y=x)
        assert str(caught.value) == ("method 'linear': unknown argument 'y'. The arguments are (x: float32[batch, 4])")
        with pytest.raises(TypeError) as caught:
            program.linear(x, x=x)
        assert str(caught.value) == "method 'linear': got two values for argument 'x'; it takes (x: float32[batch, 4])"


@pytest.mark.slow
def test_nothing_is_left_of_calls(method: untorch.Method) -> None:
    def calls(count: int) -> None:
        for _ in range(count):
            args, kwargs = arguments()
            method(*args, **kwargs, out=([np.empty(4, np.float32), None], {"b": None, "c": (None, None)}))
            method(*args, **kwargs)
            with pytest.raises(untorch.InvalidArgumentError):
                method(*args)
            with pytest.raises(untorch.InvalidArgumentError):
                method({"a": args[0]["a"]}, *args[1:], **kwargs)

    key = arrays(1)[0]
    (named, *rest), kwargs = arguments()
    named["a"] = key
    calls(20)
    gc.collect()
    references, tensors, blocks = sys.getrefcount(key), _core.live_tensors(), sys.getallocatedblocks()
    for _ in range(50):
        method(named, *rest, **kwargs)
    calls(50)
    gc.collect()
    assert (sys.getrefcount(key), _core.live_tensors()) == (references, tensors)
    assert sys.getallocatedblocks() - blocks < 200


def test_more_arrays_than_a_call_has_room_for_inline(own_package: pathlib.Path) -> None:
    with untorch.load(own_package) as program:
        types = program["types"]
        values = [
            np.ones((2, 3), spec.dtype) for spec in types.inputs if len(spec.shape) == 2 and "bf" not in spec.dtype
        ]
        ml_dtypes = pytest.importorskip("ml_dtypes")
        values.insert(3, np.ones((2, 3), ml_dtypes.bfloat16))
        assert len(values) == 12
        out = types(values, np.float32(2))
        assert [value.dtype for value in out["same"]] == [value.dtype for value in values]
        with pytest.raises(untorch.InvalidArgumentError, match=r"args\[0\]: expected a list of 12, got list of 11"):
            types(values[1:], np.float32(2))


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {"y": 3}, "unknown argument 'y'. The arguments are (ids: "),
        (
            (),
            {"id": 1, "scales": 2},
            "unknown arguments 'id', 'scales'; did you mean 'ids', 'scale'? The arguments are (",
        ),
        ((1,), {"scales": 2}, "unknown argument 'scales'; did you mean 'scale'? The arguments are (ids: "),
        ((), {"ids": 1, "scales": 2}, "unknown argument 'scales'; did you mean 'scale'? The arguments are (ids: "),
        ((1, 2), {"scales": 2}, "unknown argument 'scales'; did you mean 'scale'? The arguments are (ids: "),
        ((1, 2, 3), {"scales": 2}, "unknown argument 'scales'; did you mean 'scale'? The arguments are (ids: "),
        ((), {"scale": 2}, "missing argument 'ids'; it takes (ids: "),
        ((1, 2), {"scale": 2}, "got two values for argument 'scale'; it takes (ids: "),
    ],
)
def test_unknown_names_are_told_first(
    rows_package: pathlib.Path, args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with untorch.load(rows_package) as program, pytest.raises(TypeError) as caught:
        program.rows(*args, **kwargs)
    assert str(caught.value).startswith(f"method 'rows': {text}")
