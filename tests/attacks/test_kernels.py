"""Python kernels that return something else than they promised, keep what they were given, or call their caller."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import untorch
from untorch.runtime import registry

Array = np.ndarray[Any, np.dtype[Any]]
X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers ends with it."""
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture(scope="module")
def program(kernel_package: pathlib.Path) -> Iterator[untorch.Program]:
    """Shared: calls fail, and it goes on."""
    with untorch.load(kernel_package) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def stock(stock_kernel_package: pathlib.Path) -> Iterator[untorch.Program]:
    """PyTorch's own package."""
    with untorch.load(stock_kernel_package) as loaded:
        yield loaded


def clip(x: Array, factor: float) -> Array:
    """What the operator promises."""
    return np.clip(x, -1, 1) * np.float32(factor)


def misaligned(x: Array) -> Array:
    """The same values with strides that are no multiples of the item size."""
    records = np.zeros(x.shape, [("pad", "i1"), ("value", "f4")])
    records["value"] = x
    values: Array = records["value"]
    return values


def expected(x: Array) -> Array:
    """Of the method clip."""
    return np.sin(clip(x, 3.0)) + 1


WRONG = {
    "float64": lambda x, _: np.clip(x, -1, 1).astype(np.float64),
    "float16": lambda x, _: x.astype(np.float16),
    "int64": lambda x, _: x.astype(np.int64),
    "one element": lambda x, _: x[:1, :1].copy(),
    "no element": lambda x, _: x[:0].copy(),
    "larger": lambda x, _: np.zeros((100, 100), np.float32),
    "other rank": lambda x, _: x.reshape(-1).copy(),
    "same size": lambda x, _: x.reshape(4, 3).copy(),
    "scalar": lambda x, _: np.float32(1),
}


@pytest.mark.parametrize("kind", WRONG)
def test_another_dtype_or_shape_is_an_error(program: untorch.Program, kind: str) -> None:
    untorch.register_kernel("attack::clip_scale", WRONG[kind])
    form = np.asarray(WRONG[kind](X, 3.0))
    with pytest.raises(untorch.ModelError) as caught:
        program.clip(X)
    text = str(caught.value)
    assert "kernel of `attack::clip_scale`" in text and "result 0: expected " in text
    assert f"got {form.dtype.name}{list(form.shape)}" in text
    if form.dtype != np.float32:
        assert "expected the dtype float32, which the operator's fake implementation declares" in text
        assert "convert it in the kernel, or register the kernel with cast=True" in text
    else:
        assert "expected float32[3, 4]" in text
        assert "return the dtype and shape that the operator's fake implementation declares" in text
    untorch.register_kernel("attack::clip_scale", clip)
    np.testing.assert_allclose(program.clip(X), expected(X), rtol=1e-6)


@pytest.mark.parametrize("kind", WRONG)
def test_a_stock_package_refuses_them_too(stock: untorch.Program, kind: str) -> None:
    untorch.register_kernel("attack::clip_scale", WRONG[kind])
    with pytest.raises(untorch.ModelError, match="attack.*clip_scale"):
        stock(X)
    untorch.register_kernel("attack::clip_scale", clip)
    np.testing.assert_allclose(stock(X), expected(X), rtol=1e-6)


@pytest.mark.parametrize("which", ["program", "stock"])
def test_a_dtype_is_converted_where_that_was_asked_for(which: str, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(which)
    method = loaded.clip if which == "program" else loaded.forward
    untorch.register_kernel("attack::clip_scale", lambda x, f: clip(x, f).astype(np.float64), cast=True)
    np.testing.assert_allclose(method(X), expected(X), rtol=1e-6)
    untorch.register_kernel("attack::clip_scale", lambda x, f: clip(x, f) * 1j, cast=True)
    with pytest.raises(untorch.ModelError, match=r"got complex64\[3, 4\]: convert it in the kernel$"):
        method(X)


@pytest.mark.parametrize("which", ["program", "stock"])
def test_another_layout_is_copied(which: str, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(which)
    method = loaded.clip if which == "program" else loaded.forward
    for layout in (
        lambda x, f: np.asfortranarray(clip(x, f)),
        lambda x, f: np.ascontiguousarray(clip(x, f)[::-1])[::-1],
        lambda x, f: np.repeat(clip(x, f), 2, axis=1)[:, ::2],
        lambda x, f: misaligned(clip(x, f)),
    ):
        untorch.register_kernel("attack::clip_scale", layout)
        np.testing.assert_allclose(method(X), expected(X), rtol=1e-6)


@pytest.mark.parametrize("which", ["program", "stock"])
def test_a_result_whose_elements_share_memory(which: str, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(which)
    method = loaded.clip if which == "program" else loaded.forward
    untorch.register_kernel("attack::clip_scale", lambda x, f: np.broadcast_to(np.float32(2), x.shape))
    np.testing.assert_allclose(method(X), np.full((3, 4), np.sin(2.0) + 1), rtol=1e-6)


def test_several_results_are_checked_by_their_position(program: untorch.Program) -> None:
    right = (X.sum(0), [X, X + 1], np.argwhere(X))
    untorch.register_kernel("attack::parts", lambda x: right)
    total, product, indices = program.parts(X)
    np.testing.assert_allclose(total, np.sin(right[0]), atol=1e-6)
    np.testing.assert_allclose(product, X * (X + 1))
    np.testing.assert_array_equal(indices, right[2])
    wrong = [
        ((right[0], [X, X[:1]], right[2]), r"result 2: expected float32\[3, 4\], got float32\[1, 4\]"),
        ((right[0], [X[:, :2], X], right[2]), r"result 1: expected float32\[3, 4\], got float32\[3, 2\]"),
        ((right[0], right[1], right[2][:, :1]), r"result 3: expected int64\[12, 2\], got int64\[12, 1\]"),
        ((right[0], right[1], right[2].astype(np.int32)), r"result 3: expected the dtype int64, .* got int32\[12, 2\]"),
        ((np.float32(1), right[1], right[2]), r"result 0: expected float32\[4\], got float32\[\]"),
    ]
    for result, text in wrong:
        untorch.register_kernel("attack::parts", lambda x, result=result: result)
        with pytest.raises(untorch.ModelError, match=text):
            program.parts(X)


def test_what_a_kernel_raises_is_the_cause(program: untorch.Program) -> None:
    error = ZeroDivisionError("mine")

    @untorch.register_kernel("attack::clip_scale")
    def kernel(x: Array, factor: float) -> Array:
        raise error

    with pytest.raises(untorch.ModelError, match="ZeroDivisionError: mine") as caught:
        program.clip(X)
    assert caught.value.__cause__ is error
    untorch.register_kernel("attack::clip_scale", lambda x, f: bytearray(1 << 62))
    with pytest.raises(untorch.OutOfMemoryError, match="MemoryError"):
        program.clip(X)


@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), SystemExit(3), GeneratorExit()])
def test_what_is_no_exception_passes_through(program: untorch.Program, error: BaseException) -> None:
    @untorch.register_kernel("attack::clip_scale")
    def kernel(x: Array, factor: float) -> Array:
        raise error

    for call in (program.clip, lambda x: program.clip.run([x]), lambda x: program.counted(x[0])):
        with pytest.raises(type(error)) as caught:
            call(X)
        assert caught.value is error
    untorch.register_kernel("attack::clip_scale", clip)
    np.testing.assert_allclose(program.clip(X), expected(X), rtol=1e-6)


@pytest.mark.slow
def test_a_kernel_may_keep_its_input(program: untorch.Program) -> None:
    """The first kernel's input and its result are memory of the model, which uses it again."""
    kept: list[Array] = []
    values: list[Array] = []

    @untorch.register_kernel("attack::clip_scale")
    def kernel(x: Array, factor: float) -> Array:
        kept.extend((x, x[1:, ::2]))
        values.extend((x.copy(), x[1:, ::2].copy()))
        return clip(x, factor)

    before = untorch._core.live_tensors()
    for _ in range(50):
        np.testing.assert_allclose(program.twice(X), np.clip(np.clip(X * 2, -1, 1) * 2, -1, 1) + 1)
    gc.collect()
    for array, value in zip(kept, values, strict=True):
        np.testing.assert_array_equal(array, value)
    kept.clear()
    del array
    gc.collect()
    assert untorch._core.live_tensors() == before


@pytest.mark.slow
def test_a_kernel_that_keeps_an_input_of_the_call_keeps_the_callers_array(program: untorch.Program) -> None:
    kept: list[Array] = []

    @untorch.register_kernel("attack::clip_scale")
    def kernel(x: Array, factor: float) -> Array:
        kept.append(x)
        return clip(x, factor)

    x = X.copy()
    program.clip(x)
    assert kept[0].base is x
    del x
    gc.collect()
    filler = [np.full_like(X, 9) for _ in range(100)]
    np.testing.assert_array_equal(kept[0], X)
    assert len(filler) == 100


def test_a_kernel_may_not_call_the_method_that_runs_it(program: untorch.Program) -> None:
    seen: list[str] = []

    @untorch.register_kernel("attack::clip_scale")
    def kernel(x: Array, factor: float) -> Array:
        try:
            program.clip(X)
        except untorch.InvalidArgumentError as error:
            seen.append(str(error))
        return clip(x, factor)

    np.testing.assert_allclose(program.clip(X), expected(X), rtol=1e-6)
    assert seen == [
        "method 'clip': a Python kernel calls the method that runs it, or another that writes the same buffers: the "
        "call would wait for itself. Call another session, or another program"
    ]


def test_nor_use_the_buffers_of_its_own_call(program: untorch.Program) -> None:
    session = program.session()
    tried = {
        "reset": lambda: session.reset(),
        "fork": lambda: session.fork(),
        "counted": lambda: session.counted(X[0]),
    }
    for name, attempt in tried.items():
        seen: list[str] = []

        @untorch.register_kernel("attack::clip_scale")
        def kernel(x: Array, factor: float) -> Array:
            try:
                attempt()  # noqa: B023
            except untorch.InvalidArgumentError as error:
                seen.append(str(error))  # noqa: B023
            return clip(x, factor)

        session.counted(X[0])
        assert len(seen) == 1 and "Python kernel" in seen[0], (name, seen)


def test_but_other_methods_sessions_and_programs(program: untorch.Program, kernel_package: pathlib.Path) -> None:
    session, other = program.session(), untorch.load(kernel_package)
    results: list[Array] = []
    depth = 0

    @untorch.register_kernel("attack::clip_scale")
    def kernel(x: Array, factor: float) -> Array:
        nonlocal depth
        depth += 1
        if depth == 1:
            results.extend((program.twice(X), session.counted(X[0]), other.clip(X)))
        return clip(x, factor)

    np.testing.assert_allclose(program.clip(X), expected(X), rtol=1e-6)
    assert len(results) == 3
    np.testing.assert_allclose(results[2], expected(X), rtol=1e-6)
    other.close()


def test_an_error_in_a_nested_call_does_not_leave_the_outer_one(program: untorch.Program) -> None:
    calls = 0

    @untorch.register_kernel("attack::clip_scale")
    def kernel(x: Array, factor: float) -> Array:
        nonlocal calls
        calls += 1
        if calls == 1:
            with pytest.raises(KeyboardInterrupt):
                program.twice(X)
        elif calls == 2:
            raise KeyboardInterrupt
        return clip(x, factor)

    np.testing.assert_allclose(program.clip(X), expected(X), rtol=1e-6)


@pytest.mark.slow
def test_a_closed_program_is_freed(kernel_package: pathlib.Path) -> None:
    """A method and what serves its operators do not hold each other."""

    def handlers() -> int:
        gc.collect()
        return sum(type(thing).__name__ == "_ProxyHandler" for thing in gc.get_objects())

    untorch.register_kernel("attack::clip_scale", clip)
    before = handlers()
    with untorch.load(kernel_package) as loaded:
        np.testing.assert_allclose(loaded.clip(X), expected(X), rtol=1e-6)
        assert handlers() > before
    del loaded
    assert handlers() == before
