"""The model that Triton's python backend runs: requests are joined to one call, on CPUs and on GPUs."""

from __future__ import annotations

import ctypes
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from untorch._core import Tensor
from untorch.integrations.joining import groups, join, split
from untorch.runtime.arrays import empty
from untorch.runtime.columns import batch_dim, output_names
from untorch.runtime.errors import InvalidArgumentError, UntorchError
from untorch.runtime.program import load

__all__ = ["TritonPythonModel"]

PACKAGE = "model.pt2"
_OPTIONS = (
    "device", "num_runners", "num_threads", "spin_us", "cuda_graphs", "dequantize_weights", "tf32", "verify", "copy",
    "trust",
)  # fmt: skip
_KNOWN = ("method", *_OPTIONS)


@dataclass
class _Item:
    """A request: its inputs, and where its response goes."""

    place: int
    request: Any
    inputs: list[Any]


class TritonPythonModel:
    """Serves one method of the package beside model.py.

    Parameters in config.pbtxt: ``method``, and the options of ``untorch.load`` as JSON (``num_threads``: ``"2"``).
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the package and open the method. Raises TritonModelException with the reason."""
        import triton_python_backend_utils as backend

        self._backend: Any = backend
        try:
            self._load(args)
        except (UntorchError, OSError) as error:
            raise backend.TritonModelException(f"model '{args['model_name']}': {error}") from error

    def _load(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        given = {key: str(value["string_value"]) for key, value in (config.get("parameters") or {}).items()}
        options: dict[str, Any] = {}
        for key, value in given.items():
            if key in _OPTIONS:
                options[key] = _option(value)
            elif key not in _KNOWN and not key.isupper():  # those in capitals are the server's
                near = difflib.get_close_matches(key, _KNOWN, 1)
                raise InvalidArgumentError(
                    f"config.pbtxt: expected the parameters {', '.join(_KNOWN)}, got {key!r}"
                    + (f": did you mean {near[0]!r}?" if near else "")
                )
        if args["model_instance_kind"] == "GPU":
            options.setdefault("device", f"cuda:{args['model_instance_device_id']}")
        self._program = load(Path(args["model_repository"]) / args["model_version"] / PACKAGE, **options)
        self._method = self._program[given["method"]] if "method" in given else self._program.forward
        self._specs = {spec.name: spec for spec in self._method.outputs if spec is not None}
        for kind, names in (("input", {spec.name for spec in self._method.inputs}), ("output", set(self._specs))):
            configured = {item["name"] for item in config[kind]}
            if configured != names:
                raise InvalidArgumentError(
                    f"config.pbtxt: {kind}: expected {', '.join(sorted(names))}, got {', '.join(sorted(configured))}"
                )
        self._batch = batch_dim(self._method) if int(config.get("max_batch_size") or 0) else None
        self._method.open()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request, in their order. A request that fails does not touch the others."""
        responses: list[Any] = [None] * len(requests)
        items = []
        for place, request in enumerate(requests):
            if request.is_cancelled():
                error = self._backend.TritonError("the request was cancelled", self._backend.TritonError.CANCELLED)
                responses[place] = self._backend.InferenceResponse(error=error)
                continue
            try:
                items.append(_Item(place, request, self._inputs(request)))
            except Exception as error:
                responses[place] = self._failed(error)
        for places in groups(self._batch, [item.inputs for item in items]):
            self._run([items[place] for place in places], responses)
        return responses

    def finalize(self) -> None:
        """Free the program. Triton calls it when the model is unloaded."""
        self._program.close()

    def _inputs(self, request: Any) -> list[Any]:
        """Arrays, or on a GPU the tensors themselves, which have DLPack."""
        import numpy

        inputs: list[Any] = []
        for spec in self._method.inputs:
            tensor = self._backend.get_input_tensor_by_name(request, spec.name)
            if tensor is None:
                raise InvalidArgumentError(f"method '{self._method.name}': the input '{spec.name}' is missing")
            if not tensor.is_cpu():
                inputs.append(tensor)
            elif spec.dtype == "bfloat16":
                inputs.append(_bfloat16(tensor))
            else:  # in shared memory, where a tensor lies at any address
                inputs.append(numpy.require(tensor.as_numpy(), requirements=["C", "A"]))
        return inputs

    def _run(self, group: list[_Item], responses: list[Any]) -> None:
        try:
            flat = self._method.run(join([item.inputs for item in group]))
            if len(group) > 1:
                flat = [value.numpy() if isinstance(value, Tensor) else value for value in flat]
            parts = split(flat, [len(item.inputs[0]) if len(group) > 1 else 0 for item in group])
            for item, part in zip(group, parts, strict=True):
                responses[item.place] = self._response(item.request, part)
        except Exception as error:
            if len(group) == 1:
                responses[group[0].place] = self._failed(error)
                return
            for item in group:  # each with its own error, or its own result
                self._run([item], responses)

    def _response(self, request: Any, flat: list[Any]) -> Any:
        wanted = set(request.requested_output_names()) or set(self._specs)
        outputs = zip(output_names(self._method, len(flat)), flat, strict=True)
        tensors = [self._tensor(name, value) for name, value in outputs if name in self._specs and name in wanted]
        return self._backend.InferenceResponse(output_tensors=tensors)

    def _tensor(self, name: str, value: Any) -> Any:
        import numpy

        if isinstance(value, Tensor) and value.device != "cpu":
            return self._backend.Tensor.from_dlpack(name, value)
        array = value.numpy() if isinstance(value, Tensor) else value
        if array.dtype.name == "bfloat16":
            held = empty(array.shape, "bfloat16")
            held.numpy()[...] = array
            return self._backend.Tensor.from_dlpack(name, held)
        return self._backend.Tensor(name, numpy.ascontiguousarray(array).reshape(array.shape))

    def _failed(self, error: Exception) -> Any:
        codes = self._backend.TritonError
        code = codes.INVALID_ARG if isinstance(error, InvalidArgumentError) else codes.INTERNAL
        text = str(error) if isinstance(error, UntorchError) else f"{type(error).__name__}: {error}"
        return self._backend.InferenceResponse(error=self._backend.TritonError(text, code))


class _DLTensor(ctypes.Structure):
    """DLPack's description of a tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


def _bfloat16(tensor: Any) -> Any:
    """A tensor on the CPU as an array. Triton has no NumPy array of it, and its memory need not be aligned."""
    array = empty(tensor.shape(), "bfloat16").numpy()
    capsule = tensor.to_dlpack()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    source = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    ctypes.memmove(array.ctypes.data, source.data + source.byte_offset, array.nbytes)
    return array


def _option(text: str) -> Any:
    """A value as JSON; what is none is text, such as a device's name."""
    try:
        return json.loads(text)
    except ValueError:
        return text
