"""Calls of native operators behind the proxy executor, as a model makes them: by the JSON of an extern node."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch

from tests.native.shim import ShimError, delete, handle, lib, raise_on, to_torch

lib.untorch_last_error.restype = ctypes.c_char_p


def node_of(target: str, returns: int, arguments: dict[str, Any]) -> tuple[str, list[int], list[Any]]:
    """The node with these arguments, and the flat integers and tensors that its call passes."""
    inputs: list[dict[str, Any]] = []
    ints: list[int] = []
    tensors: list[Any] = []
    for name, value in arguments.items():
        arg: dict[str, Any]
        if isinstance(value, torch.Tensor | ctypes.c_void_p):
            arg = {"as_tensor": {"name": f"buf{len(tensors)}"}}
            tensors.append(value)
        elif value is None:
            arg = {"as_none": True}
        elif isinstance(value, bool):
            arg = {"as_bool": value}
        elif isinstance(value, int):
            arg = {"as_int": value}
            ints.append(value)
        elif isinstance(value, float):
            arg = {"as_float": value}
        elif isinstance(value, str):
            arg = {"as_string": value}
        else:
            arg = {"as_ints": value}
            ints += value
        inputs.append({"name": name, "arg": arg, "kind": 1})
    outputs = [{"as_tensor": {"name": f"out{i}"}} for i in range(returns)]
    node = {"name": "buf", "node": {"target": target, "inputs": inputs, "outputs": outputs, "metadata": {}}}
    return json.dumps(node), ints, tensors


def call_native(target: str, returns: int = 1, **arguments: Any) -> Any:
    """The operator's result, or a tuple of several. Raises ShimError with the operator's message."""
    text, ints, tensors = node_of(target, returns, arguments)
    return call_node(text, ints, tensors, returns)


def call_node(text: str, ints: list[int], tensors: list[Any], returns: int = 1) -> Any:
    owned = [handle(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    made = iter(owned)
    given = [next(made) if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]
    slots = []
    for _ in range(returns):
        slot = ctypes.c_void_p()
        raise_on(lib.aoti_torch_new_uninitialized_tensor(ctypes.byref(slot)))
        slots.append(slot)
    try:
        array = (ctypes.c_void_p * (len(given) + returns))(*[h.value for h in given + slots])
        numbers = (ctypes.c_int64 * max(len(ints), 1))(*ints)
        code = lib.untorch_call_native_operator(
            text.encode(), ctypes.c_int32(len(ints)), numbers, ctypes.c_int32(len(array)), array
        )
        if code != 0:
            raise ShimError(lib.untorch_last_error().decode())
        results = [to_torch(slot) for slot in slots]
    finally:
        for h in owned + slots:
            delete(h)
    return results[0] if returns == 1 else tuple(results)
