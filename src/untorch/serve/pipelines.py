"""``/v1/pipeline/{name}``: a package by its front end. Files, forms or JSON in, labels out."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from untorch.serve.admission import Admission
from untorch.serve.front_end import FrontEnd, to_png
from untorch.serve.inference.binary import decompress
from untorch.serve.openai.answers import guarded
from untorch.serve.openai.errors import ApiError, expected, from_exception, invalid, model_not_found, not_loaded
from untorch.serve.openai.fields import parse_body
from untorch.serve.openai.forms import read_form
from untorch.serve.openai.service import retried
from untorch.serve.openai.streaming import Reply
from untorch.validation import hint

if TYPE_CHECKING:
    from untorch.serve.repository import Package
    from untorch.serve.state import ServerState

__all__ = ["pipeline_routes"]

_PATH = "/v1/pipeline"
_DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w.+=-]+)*?(;base64)?,")
# Options of a query or a form that are not texts: as JSON has them.
_JSON_OPTIONS = frozenset({
    "top_k", "threshold", "truncation", "ignore_labels", "num_inference_steps", "guidance_scale", "seed",
    "temperature", "return_timestamps",
})  # fmt: skip
# What curl sends if it is not told otherwise, and what says nothing: the body itself decides.
_UNKNOWN_TYPES = ("", "application/x-www-form-urlencoded", "application/octet-stream")
_MOST_FILES = 256


@dataclass(frozen=True)
class _Call:
    inputs: list[Any]
    options: dict[str, Any]
    is_list: bool


def pipeline_routes(server: ServerState) -> list[Route]:
    """The routes, which stand before the ones of OpenAI's API."""
    service = _Pipelines(server)
    return [
        Route(_PATH, guarded(service.list), methods=["GET"]),
        Route(f"{_PATH}/{{name}}", guarded(service.describe), methods=["GET"]),
        Route(f"{_PATH}/{{name}}", guarded(service.run), methods=["POST"]),
    ]


class _Pipelines:
    def __init__(self, server: ServerState) -> None:
        self._server = server
        self._admission = Admission(server.options.max_queue, "inputs")

    async def list(self, request: Request) -> Response:
        """All packages that have a front end."""
        found = [package.front_end for package in self._server.repository.packages]
        return JSONResponse({"object": "list", "data": [_described(one) for one in found if one is not None]})

    async def describe(self, request: Request) -> Response:
        """One, with its labels."""
        front_end = self._find(request.path_params["name"])
        return JSONResponse({**_described(front_end), "labels": front_end.labels})

    async def run(self, request: Request) -> Response:
        """A call."""
        name = request.path_params["name"]
        front_end = self._find(name)
        call = await _read(request, front_end, self._server.options.max_body)
        # Speech models count what comes to /v1/audio, too.
        is_speech = front_end.task == "automatic-speech-recognition"
        admission = self._server.repository.admission if is_speech else self._admission
        release = admission.enter(name, max(1, len(call.inputs)))

        async def begin() -> Any:
            return await self._find(name).run(call.inputs, call.options, call.is_list)

        async def answer() -> Response:
            try:
                with self._server.metrics.request("pipeline") as watch:
                    watch.model = name
                    found = await retried(begin)
                return await self._server.call(_answer, found)
            except Exception as error:
                raise from_exception(error, {"audio": "inputs"}) from error

        return Reply(answer, release)

    def _find(self, name: str) -> FrontEnd:
        """Raises ApiError."""
        repository = self._server.repository
        package = next((one for one in repository.packages if one.name == name), None)
        if package is not None:
            if package.front_end is None:
                raise invalid("model", _without(package), "unsupported")
            return package.front_end
        if (reason := repository.unavailable(name)) is not None:
            raise not_loaded(name, reason)
        names = sorted(one.name for one in repository.packages if one.front_end is not None)
        raise model_not_found(name, names)


def _without(package: Package) -> str:
    if package.engine is not None:
        return f"{package.name!r} is a language model: use /v1/chat/completions or /v1/completions"
    return f"{package.name!r} has no front end here: send tensors to /v2/models/{package.name}/infer"


def _described(one: FrontEnd) -> dict[str, Any]:
    return {
        "id": one.name, "object": "pipeline", "task": one.task, "architecture": one.architecture, "input": one.input,
        "options": list(one.options),
    }  # fmt: skip


async def _read(request: Request, front_end: FrontEnd, limit: int) -> _Call:
    """Inputs and options, however they came. Raises ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    options = {key: _typed(key, value) for key, value in _once(request.query_params.multi_items()).items()}
    if kind == "multipart/form-data":
        return await _read_form(request, front_end, options)
    body = decompress(await request.body(), request.headers.get("content-encoding", "").lower(), limit)
    if kind in _UNKNOWN_TYPES:
        kind = "application/json" if body.lstrip()[:1] == b"{" else _own_type(front_end)
    if kind == "application/json" or kind.endswith("+json"):
        return _read_json(body, front_end, options)
    _check_options(front_end, options)
    if kind.startswith("text/") and front_end.input == "text":
        return _Call([_decoded(body)], options, False)
    if kind.partition("/")[0] not in ("image", "audio", "video") or front_end.input == "text":
        raise ApiError(
            415, f"Content-Type: expected {_own_type(front_end)}, application/json or multipart/form-data for "
            f"{front_end.task}, got {kind[:80]!r}", code="unsupported_media_type",
        )  # fmt: skip
    return _Call([_file(body)], options, False)


def _own_type(front_end: FrontEnd) -> str:
    return "text/plain" if front_end.input == "text" else f"{front_end.input}/*"


def _read_json(body: bytes, front_end: FrontEnd, options: Mapping[str, Any]) -> _Call:
    document = parse_body(body).values
    if unknown := sorted(document.keys() - {"inputs", "parameters"}):
        raise invalid(unknown[0], "unknown: expected inputs and parameters", "unknown_parameter")
    given, parameters = document.get("inputs"), document.get("parameters")
    if given is None:
        raise ApiError(400, "inputs: expected an input, or a list of them, got none", param="inputs", code="missing")
    if not isinstance(parameters, dict | None):
        raise expected("parameters", "an object", parameters, "invalid_type")
    given_options = {name: value for name, value in (parameters or {}).items() if value is not None}
    if twice := sorted(options.keys() & given_options.keys()):
        raise invalid(twice[0], "expected it once, in the query or in parameters")
    merged = {**options, **given_options}
    _check_options(front_end, merged)
    is_list = isinstance(given, list)
    inputs = given if is_list else [given]
    if front_end.input != "text":
        inputs = [_from_base64(one, f"inputs[{at}]" if is_list else "inputs") for at, one in enumerate(inputs)]
    return _Call(inputs, merged, is_list)


async def _read_form(request: Request, front_end: FrontEnd, options: dict[str, Any]) -> _Call:
    """Fields "file" or "inputs", once or several times; others are options."""
    inputs: list[Any] = []
    fields: list[tuple[str, str]] = []
    for key, data in await read_form(request, _MOST_FILES):
        if key.removesuffix("[]") in ("file", "inputs"):
            inputs.append(_form_input(data, front_end))
        elif isinstance(data, str):
            fields.append((key, data))
        else:
            raise invalid(key, "expected files in the field file", "unknown_parameter")
    if not inputs:
        raise ApiError(400, "file: expected a file, or a field inputs, got none", param="file", code="missing")
    found = {**options, **{key: _typed(key, value) for key, value in _once([*options.items(), *fields]).items()}}
    _check_options(front_end, found)
    return _Call(inputs, found, len(inputs) > 1)


def _form_input(data: str | bytes, front_end: FrontEnd) -> Any:
    if front_end.input == "text":
        return data if isinstance(data, str) else _decoded(data)
    return _file(data) if isinstance(data, bytes) else _from_base64(data, "inputs")


def _once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in items:
        if key in found:
            raise invalid(key, "expected it once, got several")
        found[key] = value
    return found


def _typed(name: str, text: Any) -> Any:
    """An option's value of a query or a form."""
    if name in _JSON_OPTIONS and isinstance(text, str):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text  # the pipeline says what it expects
    return text


def _check_options(front_end: FrontEnd, options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in front_end.options:
            raise invalid(
                name[:80], f"unknown option of {front_end.task}: {hint(name, front_end.options)}", "unknown_parameter"
            )


def _decoded(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise invalid("inputs", f"expected UTF-8: {error}") from None


def _file(data: bytes) -> bytes:
    if not data:
        raise invalid("inputs", "expected a file, got no bytes")
    return data


def _from_base64(given: Any, where: str) -> bytes:
    """The bytes of base64 or of a data URL. Nothing else is fetched or opened. Raises ApiError."""
    if not isinstance(given, str):
        raise expected(where, "a file as base64 or a data URL", given, "invalid_type")
    text = given
    if (match := _DATA_URL.match(given[:200])) is not None:
        if match[1] is None:
            raise invalid(where, "expected a data URL with ;base64")
        text = given[match.end() :]
    elif re.match(r"[a-z][a-z0-9+.-]*:", given[:40], re.I):
        raise invalid(where, f"URLs are not fetched: send the file itself, as base64 or a data URL, got {given[:80]!r}")
    try:
        return _file(base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError) as error:
        raise invalid(where, f"expected a file as base64 or a data URL: {error}") from None


def _answer(found: Any) -> Response:
    if hasattr(found, "save"):  # an image
        return Response(to_png(found), media_type="image/png")
    body = json.dumps(_plain(found), ensure_ascii=False, separators=(",", ":"))
    return Response(body.encode(), media_type="application/json")


def _plain(value: Any) -> Any:
    """As JSON has it: files as base64."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return base64.b64encode(to_png(value)).decode() if hasattr(value, "save") else value
