"""The protocol's HTTP endpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from untorch.runtime.errors import InvalidArgumentError
from untorch.serve.endpoint import endpoint
from untorch.serve.inference.binary import HEADER_LENGTH, decompress, parse_json, split
from untorch.serve.inference.infer import (
    EXTENSIONS,
    InferRequest,
    InferResponse,
    check_tensor_parameters,
    config,
    infer,
    metadata,
    not_served,
    statistics,
)
from untorch.serve.inference.tensors import (
    check_shape,
    datatype_of,
    dtype_name,
    from_json,
    from_raw,
    to_json,
    to_raw,
)

if TYPE_CHECKING:
    from untorch.serve.state import ServerState

__all__ = ["check_load_parameters", "routes"]

_encode = json.JSONEncoder(separators=(",", ":")).encode
# Of Triton's extensions that are not served.
NOT_SERVED_PATHS = {
    "/v2/systemsharedmemory/{path:path}": "shared memory", "/v2/cudasharedmemory/{path:path}": "shared memory",
    "/v2/trace/setting": "trace settings", "/v2/models/{name}/trace/setting": "trace settings",
    "/v2/logging": "log settings",
}  # fmt: skip


def routes(state: ServerState) -> list[Route]:
    """All endpoints, for a Starlette application."""
    server = _Server(state)
    found: list[Route] = []
    # A path is looked for from the first on: calls before all else.
    for path, method, function in (
        ("/v2/models/{name}/infer", "POST", server.infer),
        ("/v2/models/{name}/versions/{version}/infer", "POST", server.infer),
        ("/v2", "GET", server.metadata),
        ("/v2/health/live", "GET", server.live),
        ("/v2/health/ready", "GET", server.ready),
        ("/v2/models/stats", "GET", server.statistics),
        ("/v2/repository/index", "POST", server.index),
        ("/v2/repository/models/{name}/load", "POST", server.load),
        ("/v2/repository/models/{name}/unload", "POST", server.unload),
        *(
            (f"/v2/models/{{name}}{version}{action}", method, function)
            for version in ("", "/versions/{version}")
            for action, method, function in (
                ("", "GET", server.model_metadata),
                ("/ready", "GET", server.model_ready),
                ("/config", "GET", server.config),
                ("/stats", "GET", server.statistics),
            )
        ),
    ):
        found.append(Route(path, endpoint(function), methods=[method]))
    for path, extension in NOT_SERVED_PATHS.items():
        refuse = endpoint(partial(_refuse, extension))
        found.append(Route(path, refuse, methods=["GET", "POST"], include_in_schema=False))
    return found


async def _refuse(extension: str, request: Request) -> Response:
    raise not_served(extension)


class _Server:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        ready = self._state.ready
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    async def metadata(self, request: Request) -> Response:
        return JSONResponse({"name": "untorch", "version": self._state.version, "extensions": EXTENSIONS})

    async def model_metadata(self, request: Request) -> Response:
        document = metadata(self._state, *_name_and_version(request))
        model = self._state.repository.get(*_name_and_version(request))
        return JSONResponse({**document, "untorch": model.describe()})

    async def config(self, request: Request) -> Response:
        return JSONResponse(config(self._state, *_name_and_version(request)))

    async def statistics(self, request: Request) -> Response:
        return JSONResponse(statistics(self._state, *_name_and_version(request)))

    async def model_ready(self, request: Request) -> Response:
        name, version = _name_and_version(request)
        ready = self._state.repository.is_ready(name, version) and self._state.ready
        return JSONResponse({"name": name, "ready": ready}, status_code=200 if ready else 503)

    async def index(self, request: Request) -> Response:
        body = await request.body()
        only_ready = bool(parse_json(body).get("ready")) if body else False
        rows = await self._state.call(self._state.repository.index)
        return JSONResponse([row for row in rows if row["state"] == "READY" or not only_ready])

    async def load(self, request: Request) -> Response:
        body = await request.body()
        check_load_parameters(parse_json(body).get("parameters") if body else None)
        await self._state.change("load", request.path_params["name"])
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        await request.body()
        await self._state.change("unload", request.path_params["name"])
        return JSONResponse({})

    async def infer(self, request: Request) -> Response:
        name, version = _name_and_version(request)
        headers = request.headers
        body = decompress(
            await request.body(), headers.get("content-encoding", "").lower(), self._state.options.max_body
        )
        header_length = headers.get(HEADER_LENGTH)
        document, reader = split(body, header_length)
        wanted, binary = _requested_outputs(document)
        parsed = InferRequest(
            name, version, _text(document, "id"), _inputs(document, reader), wanted,
            _parameters(document, "the request"),
        )  # fmt: skip
        response = await infer(self._state, parsed, "http")
        return _answer(response, binary, bool(parsed.parameters.get("binary_data_output")))


def check_load_parameters(parameters: Any) -> None:
    """Refuses a configuration or files in the request: packages describe themselves. Raises InvalidArgumentError."""
    if parameters:
        names = ", ".join(map(str, parameters)) if isinstance(parameters, dict) else repr(parameters)
        raise InvalidArgumentError(f"parameters: expected none, as a package is loaded as it is, got {names:.80}")


def _name_and_version(request: Request) -> tuple[str, str]:
    return request.path_params.get("name", ""), request.path_params.get("version", "")


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


def _answer(response: InferResponse, binary: Mapping[str, bool], by_default: bool) -> Response:
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
        return Response(header, media_type="application/json")
    return Response(
        b"".join((header, *parts)),
        media_type="application/octet-stream",
        headers={HEADER_LENGTH: str(len(header))},
    )
