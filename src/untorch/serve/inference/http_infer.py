"""Calls of models over HTTP.

They are an ASGI application of their own: Starlette's router, request and response take as long as all else that the
server does for a call of a small model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from untorch.runtime.errors import InvalidArgumentError
from untorch.serve.endpoint import error_response
from untorch.serve.errors import BodyTooLargeError
from untorch.serve.inference.binary import HEADER_LENGTH, decompress, split
from untorch.serve.inference.infer import InferRequest, InferResponse, check_tensor_parameters, infer
from untorch.serve.inference.tensors import check_shape, datatype_of, dtype_name, from_json, from_raw, to_json, to_raw

if TYPE_CHECKING:
    from untorch.serve.state import ServerState

__all__ = ["Infer", "InferFirst"]

_encode = json.JSONEncoder(separators=(",", ":")).encode
_HEADER_LENGTH = HEADER_LENGTH.encode()
_PATH = re.compile("/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")


class Infer:
    """The endpoint of calls. In its scope, ``path_params`` has a name and, perhaps, a version.

    Attributes:
        routes: For the router, which answers other methods, and for ``/openapi.json``; the second is with a version.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        paths = ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer")
        self.routes = [Route(path, self, methods=["POST"]) for path in paths]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        try:
            headers, body = await self._answer(scope, receive)
        except (BodyTooLargeError, ClientDisconnect):
            raise  # the middleware answers
        except Exception as error:
            await error_response(error, scope)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[list[tuple[bytes, bytes]], bytes]:
        encoding, header_length = "", None
        for key, value in scope["headers"]:
            if key == b"content-encoding":
                encoding = value.decode("latin-1").lower()
            elif key == _HEADER_LENGTH:
                header_length = value.decode("latin-1")
        body = decompress(await _body(receive), encoding, self._state.options.max_body)
        document, reader = split(body, header_length)
        wanted, binary = _requested_outputs(document)
        parameters = scope["path_params"]
        request = InferRequest(
            parameters["name"], parameters.get("version") or "", _text(document, "id"), _inputs(document, reader),
            wanted, _parameters(document, "the request"),
        )  # fmt: skip
        response = await infer(self._state, request, "http")
        return _encoded(response, binary, bool(request.parameters.get("binary_data_output")))


class InferFirst:
    """Middleware: takes calls of models past the router, which tries one path after the other."""

    def __init__(self, app: ASGIApp, infer: Infer) -> None:
        self._app = app
        self._infer = infer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        # Below another application's path the router takes that off.
        match = _PATH.fullmatch(scope["path"]) if is_post and not scope.get("root_path") else None
        if match is None:
            await self._app(scope, receive, send)
            return
        scope["path_params"] = match.groupdict()
        scope["route"] = self._infer.routes[match["version"] is not None]
        await self._infer(scope, receive, send)


async def _body(receive: Receive) -> bytes:
    """All of it. Raises ClientDisconnect."""
    parts: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
    raise ClientDisconnect()


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


def _inputs(document: Mapping[str, Any], reader: Any) -> dict[str, Any]:
    if document.get("inputs") is None:
        raise InvalidArgumentError("inputs: expected a list of tensors, got none")
    inputs = {}
    for name, item in _items(document, "inputs"):
        what = f"input '{name:.80}'"
        parameters = _parameters(item, what)
        check_tensor_parameters(parameters, what)
        datatype, shape = _text(item, "datatype"), check_shape(item.get("shape"), what)
        if "binary_data_size" in parameters:
            inputs[name] = from_raw(reader.take(parameters["binary_data_size"], what), datatype, shape, what)
        else:
            inputs[name] = from_json(item.get("data"), datatype, shape, what)
    reader.finish()
    return inputs


def _requested_outputs(document: Mapping[str, Any]) -> tuple[list[str], dict[str, bool]]:
    """Names in order; whether each is wanted in binary, if the request says so."""
    names, binary = [], {}
    for name, item in _items(document, "outputs"):
        parameters = _parameters(item, f"output '{name:.80}'")
        check_tensor_parameters(parameters, f"output '{name:.80}'")
        names.append(name)
        if "binary_data" in parameters:
            binary[name] = bool(parameters["binary_data"])
    return names, binary


def _encoded(
    response: InferResponse, binary: Mapping[str, bool], by_default: bool
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body."""
    outputs, parts = [], []
    for name, array in response.outputs.items():
        item: dict[str, Any] = {
            "name": name, "datatype": datatype_of(dtype_name(array.dtype)), "shape": list(array.shape)
        }  # fmt: skip
        if binary.get(name, by_default):
            raw = to_raw(array)
            parts.append(raw)
            item["parameters"] = {"binary_data_size": len(raw)}
        else:
            item["data"] = to_json(array)
        outputs.append(item)
    document: dict[str, Any] = {
        "model_name": response.model, "model_version": response.version, "outputs": outputs
    }  # fmt: skip
    if response.id:
        document["id"] = response.id
    header = _encode(document).encode()
    if not parts:
        return [(b"content-length", b"%d" % len(header)), (b"content-type", b"application/json")], header
    body = b"".join((header, *parts))
    return [
        (_HEADER_LENGTH, b"%d" % len(header)), (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/octet-stream"),
    ], body  # fmt: skip
