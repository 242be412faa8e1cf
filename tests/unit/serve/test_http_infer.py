"""Calls over HTTP as an ASGI application: with and without the router, bodies in parts, clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from untorch.serve.app import build_app
from untorch.serve.state import ServerState

BODY = json.dumps(
    {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hi"]}]}
).encode()  # fmt: skip


@pytest.fixture
def app(state: ServerState) -> Starlette:
    """Serves "lm", which says "hello" to everything."""
    return build_app(state.options, state)


def send(app: Any, path: str, parts: list[bytes], *, method: str = "POST", leaves: bool = False, root: str = "") -> Any:
    """Status and body of a request whose body comes in parts. leaves: the client goes before the last one."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": leaves or i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]
    messages += [{"type": "http.disconnect"}] if leaves else []
    sent: list[Any] = []
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": root, "scheme": "http", "client": ("here", 1), "server": ("here", 2),
        "headers": [],
    }  # fmt: skip

    async def receive() -> Any:
        return messages.pop(0)

    async def keep(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, keep))
    if not sent:
        return None
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def says_hello(answer: Any) -> bool:
    status, document = answer
    return bool(status == 200 and document["outputs"][0]["data"] == ["hello"])


@pytest.mark.parametrize("path", ["/v2/models/lm/infer", "/v2/models/lm/versions/1/infer"])
def test_a_call(app: Starlette, path: str) -> None:
    assert says_hello(send(app, path, [BODY]))
    assert f'route="{"/v2/models/{name}" + path[13:].replace("/1/", "/{version}/")}"' in metrics(app)


def metrics(app: Starlette) -> str:
    text: str = app.state.server.metrics.render().decode()
    return text


def test_a_body_in_parts(app: Starlette) -> None:
    assert says_hello(send(app, "/v2/models/lm/infer", [BODY[:5], b"", BODY[5:60], BODY[60:]]))


def test_a_client_that_leaves_within_its_body(app: Starlette) -> None:
    assert send(app, "/v2/models/lm/infer", [BODY[:20]], leaves=True) is None
    assert 'code="499",method="POST",route="/v2/models/{name}/infer"} 1.0' in metrics(app)


def test_another_method_is_the_routers_to_answer(app: Starlette) -> None:
    status, document = send(app, "/v2/models/lm/infer", [b""], method="GET")
    assert (status, document) == (405, {"error": "Method Not Allowed"})


def test_below_another_application(app: Starlette) -> None:
    outer = Starlette(routes=[Mount("/models", app)])
    assert says_hello(send(outer, "/models/v2/models/lm/infer", [BODY]))
    assert says_hello(send(app, "/models/v2/models/lm/versions/1/infer", [BODY], root="/models"))


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/v2/models/none/infer", 404, "no model is named 'none'"),
        ("/v2/models/lm/versions/7/infer", 404, "version"),
        ("/v2/models//infer", 404, "Not Found"),
        ("/v2/models/lm/versions/infer", 405, "Method Not Allowed"),  # a version's metadata
        ("/v2/models/a/b/infer", 404, "Not Found"),
    ],
)
def test_paths_of_no_model(app: Starlette, path: str, status: int, error: str) -> None:
    got, document = send(app, path, [BODY])
    assert got == status
    assert error in document["error"]
