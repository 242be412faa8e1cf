"""The application: protocol endpoints, metrics, the page, and the OpenAI API if it is there."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from untorch.serve.endpoint import endpoint
from untorch.serve.inference import rest
from untorch.serve.metrics import CONTENT_TYPE
from untorch.serve.middleware import Access, Authorize, LimitBody
from untorch.serve.options import ServeOptions
from untorch.serve.state import ServerState

__all__ = ["build_app"]

_PAGE = Path(__file__).with_name("page") / "index.html"


def build_app(options: ServeOptions, state: ServerState | None = None) -> Starlette:
    """The ASGI application of a server.

    Packages are not loaded here: ``await app.state.server.load_all()`` does it, ``await app.state.server.close()``
    unloads them.

    Args:
        options: What is served.
        state: Of a server that has more than this application.
    """
    server = state if state is not None else ServerState(options)

    async def metrics(request: Request) -> Response:
        await server.call(server.metrics.refresh, server.repository)
        return Response(await server.call(server.metrics.render), headers={"content-type": CONTENT_TYPE})

    async def page(request: Request) -> Response:
        return FileResponse(_PAGE, media_type="text/html", headers={"content-security-policy": _POLICY})

    routes: list[BaseRoute] = [*rest.routes(server), Route("/metrics", endpoint(metrics))]
    routes += _openai_routes(server)
    if options.page and _PAGE.exists():
        routes.append(Route("/", endpoint(page)))
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Access, state=server),
            Middleware(Authorize, keys=options.api_keys),
            Middleware(LimitBody, limit=options.max_body),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    app.state.server = server
    return app


# The page is one file, and talks to its own server alone.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' "
    "blob: data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)


def _openai_routes(server: ServerState) -> list[BaseRoute]:
    if importlib.util.find_spec("untorch.serve.openai") is None:
        return []
    module = importlib.import_module("untorch.serve.openai")
    return list(module.routes(server.engines))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)
