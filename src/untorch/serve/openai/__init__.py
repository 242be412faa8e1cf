"""OpenAI's API for language and speech models: chats, completions, embeddings, transcriptions and models.

``routes`` makes it for Starlette.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from untorch.serve.openai.answers import guarded
from untorch.serve.openai.chat import chat_completions
from untorch.serve.openai.completions import completions
from untorch.serve.openai.embeddings import embeddings
from untorch.serve.openai.errors import ApiError
from untorch.serve.openai.models import list_models, retrieve_model
from untorch.serve.openai.service import Embedders, Engines, Options, Service, Transcribers
from untorch.serve.openai.transcriptions import transcriptions, translations

__all__ = ["Embedders", "Engines", "Options", "Transcribers", "routes"]

Endpoint = Callable[[Service, Request], Awaitable[Response]]

_ENDPOINTS: list[tuple[str, str, Endpoint]] = [
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", retrieve_model),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/audio/transcriptions", transcriptions),
    ("POST", "/v1/audio/translations", translations),
]


def routes(
    engines: Engines,
    options: Options | None = None,
    transcribers: Transcribers | None = None,
    embedders: Embedders | None = None,
) -> list[Route]:
    """The API's routes, for a Starlette application.

    The last one answers other paths below /v1 with a 404 in OpenAI's envelope: put routes of your own before it.

    Args:
        engines: The language models by name; they may come and go.
        options: Default: ``Options()``.
        transcribers: The speech models by name. Default: none.
        embedders: What else embeds text, by name: ``untorch.serve.embedder.Embedder``. Default: none.
    """
    service = Service(engines, options or Options(), transcribers, embedders)

    def route(method: str, path: str, endpoint: Endpoint) -> Route:
        async def run(request: Request) -> Response:
            return await endpoint(service, request)

        return Route(path, guarded(run), methods=[method])

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    other = Route("/v1/{path:path}", guarded(_unknown), methods=methods, include_in_schema=False)
    return [*(route(*one) for one in _ENDPOINTS), other]


async def _unknown(request: Request) -> Response:
    path = request.url.path
    allowed = [method for method, known, _ in _ENDPOINTS if path == known]
    if path.startswith("/v1/models/"):
        allowed = ["GET"]
    if allowed:
        raise ApiError(
            405, f"expected {allowed[0]} for {path}, got {request.method}", code="method_not_allowed",
            headers={"Allow": allowed[0]},
        )  # fmt: skip
    raise ApiError(404, f"there is no {request.method} {path}", code="unknown_url")
