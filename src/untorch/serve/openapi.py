"""``/openapi.json``: an OpenAPI 3.1 document of the routes that this server has, for the models that are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route

from untorch.serve.front_end import IMAGE_TASKS, FrontEnd
from untorch.serve.inference.binary import HEADER_LENGTH
from untorch.serve.inference.infer import REFUSED
from untorch.serve.inference.tensors import DATATYPES
from untorch.serve.openai.schemas import ANSWERS, request_schema
from untorch.serve.repository import VERSION, Embedders, Transcribers

if TYPE_CHECKING:
    from untorch.serve.state import ServerState

__all__ = ["openapi_document"]

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_OPEN = ("/v2/health/live", "/v2/health/ready")


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _of(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_SHAPE = _array(_INTEGER)
_PARAMETERS: Schema = {"type": ["object", "null"]}
_PORT = _of({"name": _STRING, "datatype": _STRING, "shape": _SHAPE})
_CONFIG_PORT = _of({"name": _STRING, "data_type": _STRING, "dims": _SHAPE})
_DATATYPE: Schema = {"enum": [*DATATYPES, "BYTES"]}


def _inference_schemas() -> dict[str, Schema]:
    own = {name: {"enum": [0, False, "", None], "description": text} for name, text in REFUSED.items()}
    return {
        "Error": _of({"error": _STRING}),
        "ServerMetadata": _of({"name": _STRING, "version": _STRING, "extensions": _array(_STRING)}),
        "ModelMetadata": _of(
            {"name": _STRING, "versions": _array(_STRING), "platform": _STRING, "inputs": _array(_PORT),
             "outputs": _array(_PORT)}, untorch=_OBJECT,
        ),
        "ModelConfig": _of({
            "name": _STRING, "platform": _STRING, "backend": _STRING, "max_batch_size": _INTEGER,
            "input": _array(_CONFIG_PORT), "output": _array(_CONFIG_PORT),
        }),
        "ModelStatistics": _of({
            "model_stats": _array(_of({
                "name": _STRING, "version": _STRING, "last_inference": _INTEGER, "inference_count": _INTEGER,
                "execution_count": _INTEGER, "inference_stats": _OBJECT, "batch_stats": _array(_OBJECT),
            }))
        }),
        "RepositoryIndex": _array(_of({"name": _STRING, "version": _STRING, "state": _STRING, "reason": _STRING})),
        "InferRequest": _of(
            {"inputs": _array(_of({"name": _STRING, "datatype": _DATATYPE, "shape": _SHAPE},
                                  data={"type": "array"}, parameters={"type": ["object", "null"], "properties": {
                                      "binary_data_size": {"type": "integer", "minimum": 0}}}))},
            id={"type": ["string", "null"]},
            outputs={"type": ["array", "null"], "items": _of({"name": _STRING}, parameters=_PARAMETERS)},
            parameters={"type": ["object", "null"], "properties": {
                "timeout": {"type": "integer", "minimum": 0, "description": "microseconds"},
                "binary_data_output": _BOOLEAN, **own,
            }},
        ),
        "InferResponse": _of(
            {"model_name": _STRING, "model_version": _STRING,
             "outputs": _array(_of({"name": _STRING, "datatype": _DATATYPE, "shape": _SHAPE}, data={"type": "array"},
                                   parameters=_OBJECT))}, id=_STRING,
        ),
        "Pipeline": _of(
            {"id": _STRING, "object": {"const": "pipeline"}, "task": _STRING, "architecture": _STRING, "input": _STRING,
             "options": _array(_STRING)}, labels={},
        ),
    }  # fmt: skip


class _Document:
    """Operations by method and the path of a route. None: no model that is loaded has it."""

    def __init__(self, server: ServerState) -> None:
        repository = server.repository
        self._models = sorted(repository.models)
        self._front_ends = [one.front_end for one in repository.packages if one.front_end is not None]
        engines = {name: engine for name in server.engines.names() if (engine := server.engines.get(name)) is not None}
        transcribers, embedders = Transcribers(repository), Embedders(repository)
        speech = {name: one for name in transcribers.names() if (one := transcribers.get(name)) is not None}
        texts = {name: one for name, one in engines.items() if one.settings.task == "generate"}
        chats = {name: one for name, one in texts.items() if one.chat_template is not None}
        embeds = [name for name, one in engines.items() if one.settings.task == "embed"]
        self._names = sorted({*_with_loras(engines), *speech, *embedders.names()})
        self._known: dict[str, list[str]] = {
            "chat": _with_loras(chats), "completions": _with_loras(texts), "embeddings": [*embeds, *embedders.names()],
            "transcriptions": list(speech), "translations": [name for name, one in speech.items() if one.translates],
        }  # fmt: skip
        self._version: Schema = {"name": "version", "in": "path", "required": True, "schema": {"const": VERSION}}
        self.table: dict[tuple[str, str], Callable[[], Schema | None]] = {
            ("GET", "/v2"): lambda: _get("Name, version and extensions", _ref("ServerMetadata")),
            ("GET", "/v2/health/live"): lambda: _get("Whether the process answers", _of({"live": _BOOLEAN})),
            ("GET", "/v2/health/ready"): lambda: _ready("Whether all packages are loaded", _of({"ready": _BOOLEAN})),
            ("GET", "/v2/models/stats"): lambda: _get("Statistics of all models", _ref("ModelStatistics")),
            ("POST", "/v2/repository/index"): lambda: _post(
                "Packages and their states", _json(_of({}, ready=_BOOLEAN)), _json(_ref("RepositoryIndex")),
            ),
            ("POST", "/v2/repository/models/{name}/load"): lambda: _change("Load a package, or load it again"),
            ("POST", "/v2/repository/models/{name}/unload"): lambda: _change("Unload a package"),
            ("GET", "/metrics"): lambda: _get("Metrics for Prometheus", _STRING, "text/plain"),
            ("GET", "/openapi.json"): lambda: _get("This document", _OBJECT),
            ("GET", "/v1/models"): lambda: _get("Models of the OpenAI API", _ref("Models"), api=True),
            ("GET", "/v1/models/{name:path}"): self._model,
            ("GET", "/v1/pipeline"): lambda: _get(
                "Packages with a front end",
                _of({"object": {"const": "list"}, "data": _array(_ref("Pipeline"))}),
                api=True,
            ),
            ("POST", "/v1/chat/completions"): lambda: self._text("chat", "An answer of a chat", "ChatCompletion"),
            ("POST", "/v1/completions"): lambda: self._text("completions", "Go on from a text", "Completion"),
            ("POST", "/v1/embeddings"): lambda: self._text("embeddings", "Embeddings of texts", "Embeddings"),
            ("POST", "/v1/audio/transcriptions"): lambda: self._speech("transcriptions", "Speech to text"),
            ("POST", "/v1/audio/translations"): lambda: self._speech("translations", "Speech to English text"),
        }  # fmt: skip
        for version in ("", "/versions/{version}"):
            path = f"/v2/models/{{name}}{version}"
            self.table |= {
                ("GET", path): self._of_model("A model's inputs and outputs", _ref("ModelMetadata"), version),
                ("GET", f"{path}/config"): self._of_model("Its configuration", _ref("ModelConfig"), version),
                ("GET", f"{path}/stats"): self._of_model("Its statistics", _ref("ModelStatistics"), version),
                ("GET", f"{path}/ready"): self._of_model(
                    "Whether it can be called", _of({"name": _STRING, "ready": _BOOLEAN}), version, ready=True
                ),
                ("POST", f"{path}/infer"): lambda version=version: self._infer(version),  # type: ignore[misc]
            }  # fmt: skip

    def paths(self, method: str, path: str) -> dict[str, Schema]:
        """The operations of a route, by their paths: a front end has one of its own."""
        if path == "/v1/pipeline/{name}":
            return {f"/v1/pipeline/{one.name}": _front_end(one, method) for one in self._front_ends}
        operation = self.table[method, path]()
        return {} if operation is None else {_PARAMETER.sub(r"{\1}", path): operation}

    def _named(self, version: str = "") -> list[Schema]:
        schema = {"enum": self._models} if self._models else _STRING
        name: Schema = {"name": "name", "in": "path", "required": True, "schema": schema}
        return [name, self._version] if version else [name]

    def _of_model(self, text: str, schema: Schema, version: str, ready: bool = False) -> Callable[[], Schema | None]:
        def make() -> Schema | None:
            if not self._models:
                return None
            return {**(_ready(text, schema) if ready else _get(text, schema)), "parameters": self._named(version)}

        return make

    def _infer(self, version: str) -> Schema | None:
        if not self._models:
            return None
        binary: Schema = {"application/octet-stream": {}}
        operation = _post(
            "Call a model", {**_json(_ref("InferRequest")), **binary}, {**_json(_ref("InferResponse")), **binary}
        )
        length = {
            "name": HEADER_LENGTH, "in": "header", "schema": {"type": "integer", "minimum": 0},
            "description": "Of a body of the binary tensor extension: the bytes of its JSON header.",
        }  # fmt: skip
        return {**operation, "parameters": [*self._named(version), length]}

    def _model(self) -> Schema | None:
        if not self._names:
            return None
        name = {"name": "name", "in": "path", "required": True, "schema": {"enum": self._names}}
        return {**_get("A model of the OpenAI API", _ref("Model"), api=True), "parameters": [name]}

    def _schema(self, kind: str) -> Schema | None:
        names = self._known[kind]
        if not names:
            return None
        schema = request_schema(kind)
        schema["properties"]["model"] = {"type": "string", "enum": names}
        return schema

    def _text(self, kind: str, text: str, answer: str) -> Schema | None:
        schema = self._schema(kind)
        if schema is None:
            return None
        events = {} if kind == "embeddings" else {"text/event-stream": {"schema": _STRING}}
        return _post(text, _json(schema), {**_json(_ref(answer)), **events}, api=True)

    def _speech(self, kind: str, text: str) -> Schema | None:
        schema = self._schema(kind)
        if schema is None:
            return None
        answers = {**_json(_ref("Transcription")), "text/plain": {"schema": _STRING}, "text/vtt": {"schema": _STRING}}
        if kind == "transcriptions":
            answers["text/event-stream"] = {"schema": _STRING}
        return _post(text, {"multipart/form-data": {"schema": schema}}, answers, api=True)


def _with_loras(engines: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*engines, *(lora for engine in engines.values() for lora in engine.loras)]))


def _responses(content: Schema, api: bool) -> Schema:
    error = {"description": "An error", "content": _json(_ref("ApiError" if api else "Error"))}
    return {"200": {"description": "The answer", "content": content}, "default": error}


def _get(text: str, schema: Schema, kind: str = "application/json", api: bool = False) -> Schema:
    return {"summary": text, "responses": _responses({kind: {"schema": schema}}, api)}


def _ready(text: str, schema: Schema) -> Schema:
    operation = _get(text, schema)
    operation["responses"]["503"] = {"description": "It is not", "content": _json(schema)}
    return operation


def _post(text: str, content: Schema, answer: Schema, api: bool = False) -> Schema:
    body = {"content": content, "required": text != "Packages and their states"}
    return {"summary": text, "requestBody": body, "responses": _responses(answer, api)}


def _change(text: str) -> Schema:
    name = {"name": "name", "in": "path", "required": True, "schema": _STRING, "description": "Of a package."}
    return {"summary": text, "parameters": [name], "responses": _responses(_json(_OBJECT), False)}


def _front_end(one: FrontEnd, method: str) -> Schema:
    if method == "GET":
        return _get(f"What {one.name} takes: {one.task}", _ref("Pipeline"), api=True)
    options: Schema = {
        "type": "object",
        "properties": {name: {} for name in one.options},
        "additionalProperties": False,
    }
    inputs: Schema = {"description": "A file as base64 or a data URL, or a list of these."}
    if one.input == "text":
        inputs = {"description": "A text, an object of texts, or a list of these."}
    form = {"type": "object", "properties": {"file": {}, "inputs": {}, **options["properties"]}}
    own: Schema = {"text/plain": {"schema": _STRING}} if one.input == "text" else {f"{one.input}/*": {}}
    document = _of({"inputs": inputs}, parameters={**options, "type": ["object", "null"]})
    content = {**own, **_json({**document, "additionalProperties": False}), "multipart/form-data": {"schema": form}}
    answer = {**_json({}), **({"image/png": {}} if one.task in IMAGE_TASKS else {})}
    query = [{"name": name, "in": "query", "schema": {}} for name in one.options]
    return {**_post(f"{one.name}: {one.task}", content, answer, api=True), "parameters": query}


def openapi_document(routes: Sequence[BaseRoute], server: ServerState) -> Schema:
    """Of the routes that are for a schema: all but the page's files, and those that only refuse."""
    made = _Document(server)
    paths: dict[str, Schema] = {}
    for route in _shown(routes):
        for method in sorted((route.methods or set()) - {"HEAD"}):
            for path, operation in made.paths(method, route.path).items():
                if path in _OPEN and server.options.api_keys:
                    operation = {**operation, "security": []}
                paths.setdefault(path, {})[method.lower()] = operation
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "untorch", "version": server.version},
        "paths": paths,
        "components": {"schemas": {**_inference_schemas(), **ANSWERS}},
    }
    if server.options.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _shown(routes: Iterable[BaseRoute]) -> list[Route]:
    return [route for route in routes if isinstance(route, Route) and route.include_in_schema]
