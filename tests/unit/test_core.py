"""Arrays in and out of a method: memory, dtypes, layouts, ownership, DLPack."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import untorch
from untorch import _core

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = [
    np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.int64, np.uint8, np.bool_,
    np.complex64, np.complex128,
]  # fmt: skip


@pytest.fixture(scope="module")
def program(own_package: pathlib.Path) -> Iterator[untorch.Program]:
    with untorch.load(own_package) as loaded:
        yield loaded


@pytest.fixture
def x() -> np.ndarray[Any, Any]:
    return np.arange(4, dtype=np.float32)


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


class Producer:
    """An object that is known by its DLPack methods only."""

    def __init__(self, array: np.ndarray[Any, Any], old: bool = False) -> None:
        self.array = array
        if old:
            self.__class__ = OldProducer

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class OldProducer(Producer):
    """A producer from before DLPack 1.0: no max_version."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.array.__dlpack__()


def test_every_dtype_passes_without_a_copy(program: untorch.Program) -> None:
    arrays = [np.ones((2, 3), dtype) for dtype in DTYPES]
    out = program["types"](arrays, np.float32(3))
    for given, got in zip(arrays, out["same"], strict=True):
        assert got.dtype == given.dtype
        assert address(got) == address(given)
        np.testing.assert_array_equal(got, given)
    assert out["scaled"].shape == ()
    assert out["scaled"] == 6
    assert out["pair"][1] is None
    np.testing.assert_array_equal(out["pair"][0], np.full((2, 3), 2, np.float32))


@pytest.mark.slow
def test_an_alias_of_an_input_keeps_it_and_its_rights(program: untorch.Program, x: np.ndarray[Any, Any]) -> None:
    same, _, doubled = program["alias"](x)
    assert address(same) == address(x)
    assert same.flags.writeable
    same[0] = 7
    assert x[0] == 7
    assert doubled.flags.writeable
    x.setflags(write=False)
    assert not program["alias"](x)[0].flags.writeable
    del x
    gc.collect()
    np.testing.assert_array_equal(same, [7, 1, 2, 3])


@pytest.mark.slow
def test_a_part_of_a_weight_outlives_the_program(own_package: pathlib.Path, x: np.ndarray[Any, Any]) -> None:
    program = untorch.load(own_package)
    _, row, _ = program["alias"](x)
    program.close()
    del program
    gc.collect()
    np.testing.assert_array_equal(row, [3, 4, 5])


def test_layouts_that_do_not_fit_are_refused(program: untorch.Program) -> None:
    method = program["linear"]
    wide = np.zeros((2, 8), np.float32)
    with pytest.raises(untorch.InvalidArgumentError) as caught:
        method(wide[:, ::2])
    assert str(caught.value) == (
        "method 'linear', input 'x': expected float32[batch, 4], got float32[2, 4] with strides [8, 2]: it must be "
        "contiguous (numpy.ascontiguousarray makes it so)"
    )
    with pytest.raises(untorch.InvalidArgumentError, match=r"has negative strides \[-4, 1\]: pass a contiguous copy"):
        method(np.zeros((2, 4), np.float32)[::-1])
    with pytest.raises(
        untorch.InvalidArgumentError, match=r"method 'linear', argument 0: the array's bytes are swapped"
    ):
        method(np.zeros((2, 4), ">f4"))
    unaligned = np.zeros(33, np.uint8)[1:].view(np.float32).reshape(2, 4)
    with pytest.raises(
        untorch.InvalidArgumentError, match="argument 0: the array's memory is not aligned to its dtype"
    ):
        method(unaligned)
    odd = np.zeros((2, 4), [("a", "f4"), ("b", "u1")])["a"]
    with pytest.raises(untorch.InvalidArgumentError, match="argument 0"):
        method(odd)


def test_a_dimension_of_one_may_have_any_stride(program: untorch.Program) -> None:
    row = np.zeros((5, 4), np.float32)[::5]
    assert row.shape == (1, 4)
    np.testing.assert_array_equal(program["linear"](row), [[10, 20, 30]])


def test_what_is_no_array_is_refused(program: untorch.Program) -> None:
    with pytest.raises(untorch.InvalidArgumentError) as caught:
        program["linear"](3.5)
    assert "argument 0: expected an array (numpy, or anything with __dlpack__), got float" in str(caught.value)
    with pytest.raises(untorch.InvalidArgumentError, match="numpy dtype datetime64"):
        program["linear"](np.zeros((2, 4), "M8[s]"))
    with pytest.raises(untorch.InvalidArgumentError, match="numpy dtype object"):
        program["linear"](np.zeros((2, 4), object))


def test_shapes_and_dtypes_are_checked_by_name(program: untorch.Program) -> None:
    with pytest.raises(
        untorch.InvalidArgumentError, match=r"input 'x': expected float32\[batch, 4\], got float64\[2, 4\]"
    ):
        program["linear"](np.zeros((2, 4)))
    with pytest.raises(untorch.InvalidArgumentError, match=r"dimension 1 must be 4"):
        program["linear"](np.zeros((2, 5), np.float32))
    with pytest.raises(untorch.InvalidArgumentError, match=r"\(batch\) must be from 1 to 64"):
        program["linear"](np.zeros((65, 4), np.float32))
    with pytest.raises(untorch.InvalidArgumentError, match=r"\(1-D instead of 2-D\)"):
        program["linear"](np.zeros(4, np.float32))


def test_numpy_scalars_are_arrays_of_no_dimension(program: untorch.Program) -> None:
    arrays = [np.ones((2, 3), dtype) for dtype in DTYPES]
    assert program["types"](arrays, np.float32(1.5))["scaled"] == 3
    assert program["types"](arrays, np.array(1.5, np.float32))["scaled"] == 3


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_in_gives_dlpack_out(program: untorch.Program, x: np.ndarray[Any, Any], old: bool) -> None:
    same, row, doubled = program["alias"](Producer(x, old))
    assert isinstance(same, untorch.Tensor)
    assert (doubled.shape, doubled.strides, doubled.dtype, doubled.defined) == ((4,), (1,), "float32", True)
    assert doubled.__dlpack_device__() == (1, 0)
    out = np.from_dlpack(doubled)
    np.testing.assert_array_equal(out, x * 2)
    assert address(np.from_dlpack(same)) == address(x)
    assert address(same.numpy()) == address(x)
    np.testing.assert_array_equal(np.from_dlpack(row), [3, 4, 5])


def test_an_alias_of_a_read_only_input_is_read_only(program: untorch.Program, x: np.ndarray[Any, Any]) -> None:
    x.setflags(write=False)
    same = program["alias"](Producer(x))[0]
    assert not np.from_dlpack(same).flags.writeable
    assert not same.numpy().flags.writeable
    with pytest.raises(BufferError, match="the tensor is read-only, which only DLPack 1.0 can say"):
        same.__dlpack__()


@pytest.mark.slow
def test_an_exported_alias_keeps_the_input(program: untorch.Program) -> None:
    x = np.full(4, 5, np.float32)
    same, _, _ = program["alias"](Producer(x))
    out = np.from_dlpack(same)
    array = same.numpy()
    before = address(x)
    del x, same
    gc.collect()
    others = [np.zeros(4, np.float32) for _ in range(100)]
    assert address(out) == address(array) == before
    assert all(address(other) != before for other in others)
    np.testing.assert_array_equal(out, [5, 5, 5, 5])


def test_dlpack_requests_that_cannot_be_met(program: untorch.Program, x: np.ndarray[Any, Any]) -> None:
    tensor = program["alias"](Producer(x))[2]
    with pytest.raises(BufferError, match="a CPU tensor has no stream"):
        tensor.__dlpack__(stream=1)
    with pytest.raises(BufferError, match="copy=True is not supported"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError, match=r"dl_device must be \(1, 0\)"):
        tensor.__dlpack__(dl_device=(2, 0))
    capsule = tensor.__dlpack__(max_version=(1, 0))
    assert "dltensor_versioned" in repr(capsule)
    assert "dltensor_versioned" not in repr(tensor.__dlpack__())


def test_a_producer_that_gives_no_capsule(program: untorch.Program) -> None:
    class Wrong:
        def __dlpack__(self, **_: Any) -> Any:
            return 5

    class Raises:
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(untorch.InvalidArgumentError, match="__dlpack__ of .*Wrong gave no DLPack capsule"):
        program["alias"](Wrong())
    with pytest.raises(untorch.ArgumentTypeError, match="__dlpack__ of Raises raised BufferError: not today") as caught:
        program["alias"](Raises())
    assert isinstance(caught.value.__cause__, BufferError)


@pytest.mark.slow
def test_torch_tensors_in_and_out(program: untorch.Program) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(4.0)
    same, _, doubled = program["alias"](x)
    assert torch.from_dlpack(same).data_ptr() == x.data_ptr()
    assert torch.equal(torch.from_dlpack(doubled), x * 2)
    keep = torch.from_dlpack(same)
    del same
    gc.collect()
    assert torch.equal(keep, x)


def test_flat_runs(program: untorch.Program, x: np.ndarray[Any, Any]) -> None:
    out = program["alias"].run([x])
    assert [type(item) for item in out] == [np.ndarray] * 3
    assert [type(item) for item in program["alias"].run((x,))] == [np.ndarray] * 3
    np.testing.assert_array_equal(program["alias"].run({"x": x})[2], x * 2)
    for wrong, text in (({"y": x}, "got y"), ({}, "got none"), ({1: x, "x": x}, "got 1, x")):
        with pytest.raises(untorch.InvalidArgumentError) as caught:
            program["alias"].run(wrong)
        assert str(caught.value) == f"method 'alias': expected the inputs x, {text}"
    with pytest.raises(untorch.InvalidArgumentError, match="method 'alias': expected 1 tensors, got 2"):
        program["alias"].run([x, x])
    for value, name in ((x, "ndarray"), (3, "int"), ("x", "str"), (iter([x]), "list_iterator")):
        with pytest.raises(untorch.InvalidArgumentError) as caught:
            program["alias"].run(value)
        assert str(caught.value) == (
            "method 'alias': run takes a list of arrays in the file's order, or a dict of arrays by input name, "
            f"got {name}"
        )


def test_the_module_tells_about_itself() -> None:
    assert _core.version()
    assert "x86_64" in _core.cpu_architecture() or "aarch64" in _core.cpu_architecture()
    assert _core.cpu_features()
    assert _core.has_symbol("aoti_torch_empty_strided")
    assert not _core.has_symbol("printf")
    assert not _core.has_symbol("aoti_torch_cpu_future")
    untorch.manual_seed(17)
    assert untorch.initial_seed() == 17


def test_a_cpu_tensor_says_where_it_is(program: untorch.Program, x: np.ndarray[Any, Any]) -> None:
    _same, _row, doubled = program["alias"](Producer(x))
    assert doubled.device == program.device == "cpu"
    assert not hasattr(doubled, "__cuda_array_interface__")
    assert address(np.asarray(doubled)) == doubled.numpy().ctypes.data
    np.testing.assert_array_equal(np.asarray(doubled, dtype=np.float64), x * 2.0)
    copied = np.array(doubled, copy=True)
    assert address(copied) != address(np.asarray(doubled))
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(ValueError, match="another dtype needs a copy"):
            np.array(doubled, dtype=np.float64, copy=False)
    out = np.empty(4, np.float32)
    doubled.copy_to(out)
    np.testing.assert_array_equal(out, x * 2)
    with pytest.raises(untorch.InvalidArgumentError, match="the destination is float64, the source float32"):
        doubled.copy_to(np.empty(4))
    with pytest.raises(untorch.InvalidArgumentError, match="the destination's shape is not the source's"):
        doubled.copy_to(np.empty(3, np.float32))
    out.flags.writeable = False
    with pytest.raises(untorch.InvalidArgumentError, match="the destination is read-only"):
        doubled.copy_to(out)


def test_what_only_a_gpu_has(program: untorch.Program, x: np.ndarray[Any, Any]) -> None:
    method = program[program.methods[0]]
    assert method.device == "cpu"
    with pytest.raises(untorch.InvalidArgumentError, match="a CUDA graph needs a method compiled for CUDA"):
        method.graph(x)
    memory = program.memory()
    assert set(memory) == {"mapped", "weights", "state"}
    assert memory["mapped"] > memory["weights"] >= 0
    with pytest.raises(
        untorch.InvalidArgumentError, match="argument 0: the array is on cuda:0, the method runs on the"
    ):
        method(type("Gpu", (Producer,), {"__dlpack_device__": lambda self: (2, 0)})(x))


def test_the_libraries_carry_no_paths_of_the_build_machine() -> None:
    module = pathlib.Path(_core.__file__).resolve()
    if "build" in module.parts:
        pytest.skip("a build tree has its own paths as run paths")
    root = str(pathlib.Path(__file__).resolve().parents[2]).encode()
    for library in (module, module.with_name("libuntorch.so"), module.with_name("libuntorch_stream.so")):
        assert root not in library.read_bytes(), library.name
