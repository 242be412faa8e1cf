"""The JSON headers of calls over HTTP, in front of the tensors' bytes; a body without binary tensors is a header alone.

A client sends the same header with each call of the same sizes: the last ones are kept with what they were parsed to,
and those of responses with what they were made of.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from untorch.runtime.errors import InvalidArgumentError
from untorch.serve.inference.binary import Reader, parse_json
from untorch.serve.inference.infer import InferResponse, check_tensor_parameters
from untorch.serve.inference.tensors import (
    check_shape,
    datatype_of,
    dtype_name,
    from_json,
    from_raw,
    to_json,
    to_raw,
)

__all__ = ["RequestHeader", "encode_response", "parse_header"]

Array = NDArray[Any]

_encode = json.JSONEncoder(separators=(",", ":")).encode
_KEPT = 256
_KEPT_BYTES = 4096
# Name, dtype, shape, and the bytes behind the header; -1: none, the elements are in it.
_Output: TypeAlias = "tuple[str, numpy.dtype[Any], tuple[int, ...], int]"


@dataclass(frozen=True)
class _Input:
    """A tensor of a request: ``size`` bytes behind the header if ``is_binary``, else the elements in ``data``."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_binary: bool
    size: Any
    data: Any

    def read(self, reader: Reader) -> Array:
        what = f"input '{self.name:.80}'"
        if self.is_binary:
            return from_raw(reader.take(self.size, what), self.datatype, self.shape, what)
        return from_json(self.data, self.datatype, self.shape, what)


@dataclass(frozen=True)
class RequestHeader:
    """What a request asks for.

    Attributes:
        outputs: Names that are wanted, in order; empty: all.
        binary: Whether each is wanted in binary, if the request says so.
    """

    id: str
    inputs: tuple[_Input, ...]
    outputs: tuple[str, ...]
    binary: Mapping[str, bool]
    parameters: Mapping[str, Any]

    def read(self, reader: Reader) -> dict[str, Array]:
        """The inputs. Raises InvalidArgumentError."""
        inputs = {one.name: one.read(reader) for one in self.inputs}
        reader.finish()
        return inputs


def parse_header(header: bytes | memoryview, has_bytes: bool) -> RequestHeader:
    """The header of a request. ``has_bytes``: others follow. Raises InvalidArgumentError."""
    if not has_bytes or len(header) > _KEPT_BYTES:
        return _parse(header)
    return _parse_or_find(bytes(header))


def encode_response(response: InferResponse, header: RequestHeader) -> tuple[bytes, list[bytes]]:
    """The header of a response, and the bytes of each tensor that the request wants in binary."""
    by_default = bool(header.parameters.get("binary_data_output"))
    parts: list[bytes] = []
    described: list[_Output] = []
    in_json: dict[str, list[Any]] = {}
    for name, array in response.outputs.items():
        size = -1
        if header.binary.get(name, by_default):
            parts.append(to_raw(array))
            size = len(parts[-1])
        else:
            in_json[name] = to_json(array)
        described.append((name, array.dtype, array.shape, size))
    if in_json or response.id:
        return _write(response.model, response.version, response.id, described, in_json), parts
    return _write_or_find(response.model, response.version, tuple(described)), parts


def _write(
    model: str, version: str, identifier: str, outputs: Iterable[_Output], in_json: Mapping[str, list[Any]]
) -> bytes:
    items = []
    for name, dtype, shape, size in outputs:
        item: dict[str, Any] = {"name": name, "datatype": datatype_of(dtype_name(dtype)), "shape": list(shape)}
        if size >= 0:
            item["parameters"] = {"binary_data_size": size}
        else:
            item["data"] = in_json[name]
        items.append(item)
    document: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": items}
    if identifier:
        document["id"] = identifier
    return _encode(document).encode()


@functools.lru_cache(_KEPT)
def _write_or_find(model: str, version: str, outputs: tuple[_Output, ...]) -> bytes:
    return _write(model, version, "", outputs, {})


def _parse(header: bytes | memoryview) -> RequestHeader:
    document = parse_json(header)
    outputs, binary = _requested_outputs(document)
    identifier, inputs = _text(document, "id"), _inputs(document)
    return RequestHeader(identifier, inputs, outputs, binary, _parameters(document, "the request"))


_parse_or_find = functools.lru_cache(_KEPT)(_parse)


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{key}: expected a string, got {value!r:.80}")
    return value


def _parameters(document: Mapping[str, Any], what: str) -> dict[str, Any]:
    value = document.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{what}: parameters: expected an object, got {value!r:.80}")
    return value


def _items(document: Mapping[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    value = document.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidArgumentError(f"{key}: expected a list, got {value!r:.80}")
    found: dict[str, dict[str, Any]] = {}
    for item in value:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise InvalidArgumentError(f"{key}: expected objects with a name, got {item!r:.80}")
        if item["name"] in found:
            raise InvalidArgumentError(f"{key}: '{item['name']:.80}' is given twice")
        found[item["name"]] = item
    return list(found.items())


def _inputs(document: Mapping[str, Any]) -> tuple[_Input, ...]:
    if document.get("inputs") is None:
        raise InvalidArgumentError("inputs: expected a list of tensors, got none")
    inputs = []
    for name, item in _items(document, "inputs"):
        what = f"input '{name:.80}'"
        parameters = _parameters(item, what)
        check_tensor_parameters(parameters, what)
        datatype, shape = _text(item, "datatype"), check_shape(item.get("shape"), what)
        is_binary = "binary_data_size" in parameters
        size, data = parameters.get("binary_data_size"), None if is_binary else item.get("data")
        inputs.append(_Input(name, datatype, shape, is_binary, size, data))
    return tuple(inputs)


def _requested_outputs(document: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, bool]]:
    """Names in order; whether each is wanted in binary, if the request says so."""
    names, binary = [], {}
    for name, item in _items(document, "outputs"):
        parameters = _parameters(item, f"output '{name:.80}'")
        check_tensor_parameters(parameters, f"output '{name:.80}'")
        names.append(name)
        if "binary_data" in parameters:
            binary[name] = bool(parameters["binary_data"])
    return tuple(names), binary
