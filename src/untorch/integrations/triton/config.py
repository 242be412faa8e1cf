"""config.pbtxt of a Triton model, from what the manifest says of a method."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from untorch.integrations.sharing import check_shareable
from untorch.runtime.columns import batch_dim
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError
from untorch.runtime.method import Method
from untorch.runtime.spec import TensorSpec

__all__ = ["DEFAULT_BATCH", "check_servable", "config_text", "max_batch_size"]

DEFAULT_BATCH = 64  # where the manifest has no maximum

_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
    "bfloat16": "BF16",
}  # fmt: skip


def check_servable(method: Method) -> None:
    """Raises UnsupportedError with the reason if Triton cannot serve the method."""
    check_shareable(method)
    if not method.inputs:
        raise UnsupportedError(f"method '{method.name}' has no tensor inputs, and Triton needs one")
    outputs = [spec for spec in method.outputs if spec is not None]
    if not outputs:
        raise UnsupportedError(f"method '{method.name}' has no tensor outputs, and Triton needs one")
    for kind, specs in (("input", method.inputs), ("output", outputs)):
        for spec in specs:
            if spec.dtype not in _TYPES:
                raise UnsupportedError(
                    f"method '{method.name}', {kind} '{spec.name}': Triton has no data type for {spec.dtype}"
                )


def max_batch_size(method: Method, wanted: int | None) -> int:
    """Rows that Triton may join for a call; 0 if it must not join.

    Raises InvalidArgumentError if the method does not take that many.
    """
    batch = batch_dim(method)
    if wanted is None:
        return 0 if batch is None else batch.max or DEFAULT_BATCH
    if wanted and batch is None:
        raise InvalidArgumentError(
            f"method '{method.name}': max_batch_size: expected 0, as its inputs and outputs do not all begin with the "
            f"same dynamic dimension, got {wanted}"
        )
    if wanted and batch is not None and not max(batch.min, 1) <= wanted <= (batch.max or wanted):
        limit = f"from {max(batch.min, 1)} to {batch.max}" if batch.max else f"{max(batch.min, 1)} or more"
        raise InvalidArgumentError(
            f"method '{method.name}': max_batch_size: expected 0 or a number {limit}, got {wanted}"
        )
    return wanted


def config_text(name: str, method: Method, batch: int, parameters: Mapping[str, Any]) -> str:
    """The text of config.pbtxt. ``batch`` is max_batch_size; ``parameters`` become strings."""
    gpu = method.device != "cpu"
    lines = [f"name: {_quoted(name)}", 'backend: "python"', f"max_batch_size: {batch}"]
    lines += [_tensor("input", spec, batch) for spec in method.inputs]
    lines += [_tensor("output", spec, batch) for spec in method.outputs if spec is not None]
    if batch:
        lines.append("dynamic_batching { }")
    lines.append(f"instance_group [ {{ kind: {'KIND_GPU' if gpu else 'KIND_CPU'} count: 1 }} ]")
    strings = {key: str(value) for key, value in parameters.items()}
    if gpu:
        strings["FORCE_CPU_ONLY_INPUT_TENSORS"] = "no"
    for key, value in strings.items():
        lines.append(f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}")
    return "\n".join(lines) + "\n"


def _tensor(kind: str, spec: TensorSpec, batch: int) -> str:
    """With batching, the batch dimension is not among the dims. Triton's tensors have one dimension at least."""
    sizes = [size if isinstance(size, int) and size > 0 else -1 for size in spec.shape]
    dims = sizes[1:] if batch else sizes
    shape = ", ".join(map(str, dims or [1]))
    reshape = "" if dims else " reshape { shape: [ ] }"
    return (
        f"{kind} [ {{ name: {_quoted(spec.name)} data_type: TYPE_{_TYPES[spec.dtype]} dims: [ {shape} ]{reshape} }} ]"
    )


def _quoted(text: str) -> str:
    """A string of protobuf's text format. Its escapes are those of JSON, but for characters beyond ASCII."""
    return json.dumps(text, ensure_ascii=False)
