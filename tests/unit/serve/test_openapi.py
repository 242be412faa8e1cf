"""/openapi.json: the routes of the application and no others, and schemas that are what the code asks for."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Match, Route

from tests.unit.llm.fake import TextRunner
from tests.unit.serve.openai.api import serve
from tests.unit.serve.test_app import call
from untorch.llm import Engine
from untorch.serve.app import build_app
from untorch.serve.inference.rest import NOT_SERVED_PATHS
from untorch.serve.language_model import LanguageModel
from untorch.serve.middleware import PAGE_FILES
from untorch.serve.openai.parameters import CHAT, COMPLETIONS, EMBEDDINGS, TRANSCRIPTIONS, TRANSLATIONS
from untorch.serve.openai.schemas import request_schema
from untorch.serve.options import ServeOptions
from untorch.serve.repository import Package
from untorch.serve.state import ServerState

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT_REQUEST = {"messages": [{"role": "user", "content": "hi"}]}
FRONT_END: Any = types.SimpleNamespace(
    name="eyes", task="image-classification", input="image", options=("top_k",), architecture="E", labels=["a"]
)


@pytest.fixture
def state() -> Iterator[ServerState]:
    """A model of each kind: "lm", "vectors", "ears" and "eyes"."""
    state = ServerState(ServeOptions(repository="/nowhere"))
    engine = Engine(TextRunner("hello", TEMPLATE))
    ears: Any = types.SimpleNamespace(translates=True)
    vectors: Any = types.SimpleNamespace(max_tokens=4)
    packages = [
        Package("lm", "lm.pt2", {"lm": LanguageModel("lm", engine, state.metrics)}, engine=engine),
        Package("ears", "e.pt2", {}, transcriber=ears), Package("vectors", "v.pt2", {}, embedder=vectors),
        Package("eyes", "y.pt2", {}, front_end=FRONT_END),
    ]  # fmt: skip
    for one in packages:
        entry = types.SimpleNamespace(path=one.path, package=None, state="", reason="", lock=None)
        state.repository._entries[one.name] = entry  # type: ignore[assignment]
        state.repository._exchange(entry, one)  # type: ignore[arg-type]
    state.loaded = True
    yield state
    engine.close()


def document(app: Starlette, headers: dict[str, str] | None = None) -> dict[str, Any]:
    status, _, body = call(app, "GET", "/openapi.json", headers=headers)
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def example(path: str, operation: dict[str, Any]) -> str:
    """The path with values of its parameters, which are all described."""
    for one in operation.get("parameters", []):
        if one["in"] == "path":
            assert one["required"] and "{" + one["name"] + "}" in path
            value = one["schema"].get("const", one["schema"].get("enum", ["no-package"])[0])
            path = path.replace("{" + one["name"] + "}", value)
    assert "{" not in path
    return path


def routes_of(app: Starlette, method: str, path: str) -> list[Route]:
    scope = {"type": "http", "method": method.upper(), "path": path, "root_path": "", "headers": []}
    return [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] == Match.FULL]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_routes_and_paths_are_the_same(state: ServerState) -> None:
    app = build_app(state.options, state)
    paths = document(app)["paths"]
    described = set()
    for path, operations in paths.items():
        for method, operation in operations.items():
            route = routes_of(app, method, example(path, operation))[0]
            assert route.include_in_schema
            described.add((route.path, method.upper()))
            assert {"200", "default"} <= operation["responses"].keys() and operation["summary"]
    shown = {
        (route.path, method) for route in app.routes if isinstance(route, Route) and route.include_in_schema
        for method in (route.methods or set()) - {"HEAD"}
    }  # fmt: skip
    assert described == shown and len(shown) > 25
    hidden = {route.path for route in app.routes if isinstance(route, Route) and not route.include_in_schema}
    assert hidden == {*NOT_SERVED_PATHS, *PAGE_FILES, "/v1/{path:path}"}


def test_what_is_described_is_there(state: ServerState) -> None:
    app = build_app(state.options, state)
    found = document(app)
    assert found["openapi"] == "3.1.0" and "security" not in found
    for reference in references(found):
        kind, name = reference.removeprefix("#/components/").split("/")
        assert found["components"][kind][name]
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            if path.startswith("/v2/repository/models"):  # of a package that is not known
                continue
            status, _, body = call(app, method.upper(), example(path, operation))
            assert status not in (404, 405, 500), (method, path, body)


def test_models_come_and_go(state: ServerState) -> None:
    app = build_app(state.options, state)
    paths = document(app)["paths"]
    chat = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["properties"]["model"]["enum"] == ["lm"]
    speech = paths["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert speech["properties"]["model"]["enum"] == ["ears"]
    assert paths["/v1/models/{name}"]["get"]["parameters"][0]["schema"]["enum"] == ["ears", "lm", "vectors"]
    eyes = paths["/v1/pipeline/eyes"]["post"]
    assert [one["name"] for one in eyes["parameters"]] == ["top_k"]
    assert set(eyes["requestBody"]["content"]) == {"image/*", "application/json", "multipart/form-data"}
    for name in ("lm", "ears", "vectors", "eyes"):
        state.repository._entries[name].package = None
    state.repository._models.clear()
    assert set(document(app)["paths"]) == {
        "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/repository/index",
        "/v2/repository/models/{name}/load", "/v2/repository/models/{name}/unload", "/metrics", "/openapi.json",
        "/v1/models", "/v1/pipeline",
    }  # fmt: skip


def test_keys() -> None:
    state = ServerState(ServeOptions(repository="/nowhere", api_keys=("secret",)))
    app = build_app(state.options, state)
    assert call(app, "GET", "/openapi.json")[0] == 401
    found = document(app, {"authorization": "Bearer secret"})
    assert found["security"] == [{"key": []}]
    assert found["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    open_paths = {path for path, one in found["paths"].items() if one.get("get", {}).get("security") == []}
    assert open_paths == {"/v2/health/live", "/v2/health/ready"}


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("chat", CHAT), ("completions", COMPLETIONS), ("embeddings", EMBEDDINGS), ("transcriptions", TRANSCRIPTIONS),
        ("translations", TRANSLATIONS),
    ],
)  # fmt: skip
def test_every_parameter_is_in_the_schema(kind: str, table: dict[str, Any]) -> None:
    names = {name.removesuffix("[]") for name in request_schema(kind)["properties"]}
    # In a form, an empty list cannot be sent.
    assert names == {name for name, one in table.items() if "file" not in table or one.neutral not in (([],), ())
                     or one.how != "refused"}  # fmt: skip


def wrong_values(schema: dict[str, Any]) -> Iterator[Any]:
    """Values that are not of the schema."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds:
        yield from (value for kind, value in (("string", "text"), ("object", {"a": 1}), ("number", 1.5))
                    if kind not in kinds)  # fmt: skip
    if "enum" in schema:
        yield "something else"
    for name, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
        if name in schema:
            yield schema[name] + step


def right_values(schema: dict[str, Any]) -> Iterator[Any]:
    """The ends of the schema's range, and its values."""
    yield from (schema[name] for name in ("minimum", "maximum") if name in schema)
    yield from schema.get("enum", ())
    yield from ((True, False) if "boolean" in schema.get("type", ()) else ())


@pytest.mark.parametrize(
    ("kind", "path", "request_fields"),
    [
        ("chat", "chat/completions", CHAT_REQUEST), ("completions", "completions", {"prompt": "a"}),
        ("embeddings", "embeddings", {"input": "a"}),
    ],
)  # fmt: skip
def test_schemas_are_what_the_code_asks_for(kind: str, path: str, request_fields: dict[str, Any]) -> None:
    """What a schema excludes is refused by the parameter's name, and the ends of what it allows are not."""
    with serve("a") as client:
        for name, schema in request_schema(kind)["properties"].items():
            if schema.get("description") == "accepted without effect":
                continue
            for value in wrong_values(schema):
                body = {"model": "m", **request_fields, name: value}
                answer = client.post(f"/v1/{path}", json=body)
                assert answer.status_code in (400, 404), (name, value, answer.text)
                if kind != "embeddings":  # the model has none
                    assert answer.json()["error"]["param"].startswith(name), (name, value, answer.text)
            for value in right_values(schema):
                answer = client.post(f"/v1/{path}", json={"model": "m", **request_fields, name: value})
                if answer.status_code != 200:  # another reason, such as a model that has no embeddings
                    error = answer.json()["error"]
                    assert error["code"] not in ("invalid_type", "unknown_parameter"), (name, value, error)
                    text = error["message"].replace(", as there is no echo", "")  # 0 needs one
                    is_range = re.search("(number|integer) (from|above|of) ", error["message"])
                    assert not is_range or text != error["message"], (name, value, error)
