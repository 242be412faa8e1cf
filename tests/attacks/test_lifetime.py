"""Outputs that are weights of the file: they must not be written, and must stay valid."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

import numpy as np
import pytest
from craft import Package

import untorch
from untorch import _core


class Producer:
    """An array that is no numpy array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.fixture
def path(weight_library: bytes, package: Package, tmp_path: pathlib.Path) -> pathlib.Path:
    """A package whose output is its weight."""
    target = tmp_path / "model.pt2"
    target.write_bytes(Package(weight_library, package.manifest).bytes())
    return target


@pytest.mark.slow
def test_a_weight_is_read_only_and_outlives_the_program(path: pathlib.Path) -> None:
    before = _core.live_tensors()
    x = np.zeros(4, np.float32)
    program = untorch.load(path)
    weight = program.forward(x)
    exported = np.from_dlpack(program.forward(Producer(x)))
    program.close()
    del program
    path.unlink()
    gc.collect()
    for array in (weight, exported):
        np.testing.assert_array_equal(array, [1, 2, 3, 4])
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    del weight, exported, array
    gc.collect()
    assert _core.live_tensors() == before


def test_a_changed_buffer_may_be_written(package: Package, path: pathlib.Path) -> None:
    library = package.library
    weight_library = path.read_bytes()
    assert library not in weight_library
    from zipfile import ZipFile

    with ZipFile(path) as archive:
        own = archive.read("model/data/aotinductor/forward/model.wrapper.so")
    changed = Package(own, package.manifest).with_manifest(("methods", "forward", "constants", 0, "mutated"), True)
    path.write_bytes(changed.bytes())
    x = np.zeros(4, np.float32)
    with untorch.load(path) as program:
        buffer = program.forward(x)
        assert buffer.flags.writeable
        buffer[0] = 9
        np.testing.assert_array_equal(program.forward(x), [9, 2, 3, 4])
    np.testing.assert_array_equal(buffer, [9, 2, 3, 4])


def test_a_weight_that_is_read_only_says_so_through_dlpack(path: pathlib.Path) -> None:
    with untorch.load(path) as program:
        tensor = program.forward(Producer(np.zeros(4, np.float32)))
        with pytest.raises(BufferError, match="the tensor is read-only, which only DLPack 1.0 can say"):
            tensor.__dlpack__()
