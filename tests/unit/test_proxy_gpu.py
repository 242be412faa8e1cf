"""Calls of kernels for CUDA as the proxy handler makes them, with slots that only record: no GPU is needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from untorch.runtime import registry
from untorch.runtime.errors import InvalidArgumentError, ModelError, UnsupportedError
from untorch.runtime.proxy import ExternNode, parse_extern_nodes
from untorch.runtime.registry import register_kernel


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


class OnGpu:
    """An array that says it lies on a GPU."""

    def __init__(self, dtype: str = "float32", shape: tuple[int, ...] = (2, 3)) -> None:
        self.dtype, self.shape = dtype, shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class Slot:
    """What of untorch.Tensor a call uses."""

    defined = True
    strides: tuple[int, ...] = (3, 1)

    def __init__(self) -> None:
        self.dtype, self.shape, self.done = "", (), list[Any]()

    def assign(self, value: Any, gpu: int) -> None:
        self.dtype, self.shape = value.dtype, value.shape
        self.done.append(("assign", gpu))

    def convert(self, dtype: str, strides: Sequence[int] | None = None) -> None:
        self.dtype = dtype
        self.done.append(("convert", dtype, strides))


def node(dtypes: str | None = "float32") -> ExternNode:
    metadata = {} if dtypes is None else {"untorch_dtypes": dtypes}
    inputs = [
        {"name": "x", "arg": {"as_tensor": {"name": "buf0"}}, "kind": 1},
        {"name": "factor", "arg": {"as_float": 0.5}, "kind": 1},
    ]
    inner = {"target": "mine::op", "inputs": inputs, "outputs": [{"as_tensor": {"name": "buf2"}}], "metadata": metadata}
    return parse_extern_nodes(json.dumps({"nodes": [{"name": "buf1", "node": inner}]}))[0]


def call(result: Any, of: ExternNode, source: Any = None, **options: Any) -> Slot:
    register_kernel("mine::op", lambda x, factor: result, device="cuda", **options)
    slot = Slot()
    of.call_on_gpu([], [Slot()], [slot], 0, source)  # type: ignore[list-item]
    return slot


def test_results_go_into_their_slots() -> None:
    assert call(OnGpu(), node()).done == [("assign", 0)]
    assert call((OnGpu(),), node()).done == [("assign", 0)]


def test_a_dtype_is_converted_where_that_was_asked_for() -> None:
    with pytest.raises(ModelError) as caught:
        call(OnGpu("float64"), node())
    assert str(caught.value) == (
        "kernel of `mine::op` (node `buf1`), result 0: expected the dtype float32, which the operator's fake "
        "implementation declares, got float64[2, 3]: convert it in the kernel, or register the kernel with cast=True"
    )
    slot = call(OnGpu("float64"), node(), cast=True)
    assert slot.done == [("assign", 0), ("convert", "float32", None)]
    assert call(OnGpu("bfloat16"), node(), cast=True).dtype == "float32"
    with pytest.raises(ModelError, match="got complex64.*convert it in the kernel$"):
        call(OnGpu("complex64"), node(), cast=True)


@pytest.mark.parametrize("result", [np.zeros((2, 3), np.float32), None, 3.0, [1, 2]])
def test_what_is_no_array_on_a_gpu(result: Any) -> None:
    with pytest.raises(
        ModelError, match=r"expected an array on cuda:0 \(DLPack or __cuda_array_interface__\) as resul"
    ):
        call(result, node())


def test_errors_of_an_array_name_the_result() -> None:
    class Odd(Slot):
        def assign(self, value: Any, gpu: int) -> None:
            raise InvalidArgumentError("method 'proxy', argument 0: DLPack type (code 9, 3 bits) is not supported")

    register_kernel("mine::op", lambda x, factor: OnGpu(), device="cuda")
    with pytest.raises(ModelError) as caught:
        node().call_on_gpu([], [Slot()], [Odd()], 0)  # type: ignore[list-item]
    assert str(caught.value) == (
        "kernel of `mine::op` (node `buf1`), result 0: DLPack type (code 9, 3 bits) is not supported"
    )


def test_stock_packages() -> None:
    typed = "assert_size_stride(buf2, {2L, 3L}, {1L, 2L}); auto p = (float*)(buf2.data_ptr());"
    slot = call(OnGpu(), node(None), lambda: typed)
    assert slot.done == [("assign", 0), ("convert", "float32", [1, 2])]
    with pytest.raises(ModelError, match=r"expected the shape \[2, 3\], .* got float32\[3, 2\]: return that shape"):
        call(OnGpu(shape=(3, 2)), node(None), lambda: typed)
    with pytest.raises(UnsupportedError, match="the package does not tell the dtypes of its results"):
        call(OnGpu(), node(None), lambda: "assert_size_stride(buf2, {2L, 3L}, {3L, 1L});")
    with pytest.raises(UnsupportedError, match="the package does not tell the shapes of its results"):
        call(OnGpu(), node(None), lambda: "")
    assert call(OnGpu("float16"), node(None), lambda: "", unchecked=True).done == [("assign", 0)]
