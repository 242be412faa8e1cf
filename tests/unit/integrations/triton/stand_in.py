"""What model.py sees of Triton: ``triton_python_backend_utils`` with the names and the refusals of the server's own.

The server's module is half Python and half the stub process; tests/integrations/triton runs with that one.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np

import untorch

__all__ = ["InferenceRequest", "InferenceResponse", "Tensor", "TritonError", "TritonModelException", "install"]


class TritonModelException(Exception):
    """Raised by a model to fail its load."""


class TritonError:
    """An error of one response, with its gRPC-like code."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        assert isinstance(message, str) and code in range(8)
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named tensor on the CPU. bfloat16 is exchanged by DLPack alone."""

    def __init__(self, name: str, array: Any) -> None:
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            raise TypeError(f"unsupported array for {name}: {array!r}")
        self._name, self._array, self._held = name, array, None

    @classmethod
    def of_bfloat16(cls, name: str, array: Any) -> Tensor:
        """An input as the server makes it."""
        made = cls.__new__(cls)
        made._name, made._array, made._held = name, None, array
        return made

    @classmethod
    def from_dlpack(cls, name: str, value: Any) -> Tensor:
        if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
            raise TypeError("Tensor must be a DLPack capsule or have `__dlpack__` and `__dlpack_device__` attributes")
        assert value.__dlpack_device__()[0] == 1
        strides, expected = list(value.strides), 1
        for size, stride in zip(reversed(value.shape), reversed(strides), strict=True):
            if size > 1 and stride != expected:
                raise ValueError("DLPack tensor is not contiguous")
            expected *= size
        assert value.__dlpack__() is not None
        made = cls.__new__(cls)
        made._name, made._array, made._held = name, None, value
        return made

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return list(self.values().shape)

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> Any:
        if self._array is None:
            raise TypeError("Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack()")
        return self._array

    def to_dlpack(self) -> Any:
        """At an address that is a multiple of nothing, as in the server's shared memory."""
        data = self.values().tobytes()
        memory = np.zeros(len(data) + 1, np.uint8)
        memory[1:] = np.frombuffer(data, np.uint8)
        return memory[1:].__dlpack__()

    def values(self) -> Any:
        """For the test."""
        if self._array is not None:
            return self._array
        return self._held.numpy() if isinstance(self._held, untorch.Tensor) else self._held


class InferenceRequest:
    """What ``execute`` is given."""

    def __init__(self, inputs: list[Tensor], outputs: list[str] | None = None, cancelled: bool = False) -> None:
        self._inputs, self._outputs, self._cancelled = inputs, outputs or [], cancelled

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def is_cancelled(self) -> bool:
        return self._cancelled


class InferenceResponse:
    """What ``execute`` gives back: tensors, or an error."""

    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        assert (output_tensors is None) != (error is None)
        assert error is None or isinstance(error, TritonError)
        self._tensors, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError:
        assert self._error is not None
        return self._error

    def values(self) -> dict[str, Any]:
        """For the test."""
        return {tensor.name(): tensor.values() for tensor in self._tensors}


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def install(monkeypatch: Any) -> None:
    """As the server does for the model's process."""
    module = types.ModuleType("triton_python_backend_utils")
    for name in ("TritonModelException", "TritonError", "Tensor", "InferenceRequest", "InferenceResponse"):
        setattr(module, name, globals()[name])
    module.get_input_tensor_by_name = get_input_tensor_by_name  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
