"""The application: protocol endpoints, OpenAI's API, front ends, metrics, and the page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from untorch.serve import openai
from untorch.serve.endpoint import endpoint, error_document
from untorch.serve.inference import rest
from untorch.serve.inference.binary import HEADER_LENGTH
from untorch.serve.inference.http_infer import Infer, InferFirst
from untorch.serve.metrics import CONTENT_TYPE
from untorch.serve.middleware import PAGE_FILES, Access, Authorize, LimitBody
from untorch.serve.openapi import openapi_document
from untorch.serve.options import ServeOptions
from untorch.serve.pipelines import pipeline_routes
from untorch.serve.repository import Embedders, Transcribers
from untorch.serve.state import ServerState

__all__ = ["build_app"]

_FOLDER = Path(__file__).with_name("page")


class _Application(Starlette):
    """Starlette without its outermost middleware, which answers exceptions: Access has answered them."""

    def build_middleware_stack(self) -> ASGIApp:
        """What requests pass."""
        stack = super().build_middleware_stack()
        return stack.app if isinstance(stack, ServerErrorMiddleware) else stack


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

    async def openapi(request: Request) -> Response:
        return JSONResponse(openapi_document(routes, server))

    infer = Infer(server)
    routes: list[BaseRoute] = [*infer.routes, *rest.routes(server), Route("/metrics", endpoint(metrics))]
    routes += [Route("/openapi.json", endpoint(openapi)), *pipeline_routes(server), *_openai_routes(server)]
    if options.page:
        files = PAGE_FILES.items()
        routes += [Route(path, endpoint(_page_file(name)), include_in_schema=False) for path, name in files]
    app = _Application(
        routes=routes,
        middleware=[
            Middleware(Access, state=server),
            *_cors(options),
            Middleware(Authorize, keys=options.api_keys, origins=options.cors_origins),
            Middleware(LimitBody, limit=options.max_body),
            Middleware(InferFirst, infer=infer),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    app.state.server = server
    return app


def _cors(options: ServeOptions) -> list[Middleware]:
    """Before keys are asked for: a browser's preflight request carries none."""
    if not options.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=["x-request-id", HEADER_LENGTH, "retry-after"],
        )
    ]  # fmt: skip


def _page_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        # The page talks to its own server alone, and runs nothing that came with an answer.
        headers = {
            "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; form-action 'none'; "
            "frame-ancestors 'none'; base-uri 'none'",
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
        }
        return FileResponse(_FOLDER / name, headers=headers)

    return send


def _openai_routes(server: ServerState) -> list[BaseRoute]:
    options = server.options
    return list(
        openai.routes(
            server.engines,
            openai.Options(
                max_requests=options.max_queue,
                timeout=options.llm_timeout or None,
                tool_format=options.tool_format,
                metrics=server.metrics,
                admission=server.repository.admission,
                unavailable=server.repository.unavailable,
                max_body=options.max_body,
            ),
            Transcribers(server.repository),
            Embedders(server.repository),
        )
    )  # fmt: skip


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    document = error_document(request.url.path, error.status_code, error.detail)
    return JSONResponse(document, status_code=error.status_code, headers=error.headers)
