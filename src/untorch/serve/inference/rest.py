"""The protocol's HTTP endpoints, but for calls of models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from untorch.runtime.errors import InvalidArgumentError
from untorch.serve.endpoint import endpoint
from untorch.serve.inference.binary import parse_json
from untorch.serve.inference.infer import EXTENSIONS, config, metadata, not_served, statistics

if TYPE_CHECKING:
    from untorch.serve.state import ServerState

__all__ = ["check_load_parameters", "routes"]

# Of Triton's extensions that are not served.
NOT_SERVED_PATHS = {
    "/v2/systemsharedmemory/{path:path}": "shared memory", "/v2/cudasharedmemory/{path:path}": "shared memory",
    "/v2/trace/setting": "trace settings", "/v2/models/{name}/trace/setting": "trace settings",
    "/v2/logging": "log settings",
}  # fmt: skip


def routes(state: ServerState) -> list[Route]:
    """All of these endpoints, for a Starlette application."""
    server = _Server(state)
    found: list[Route] = []
    for path, method, function in (
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


def check_load_parameters(parameters: Any) -> None:
    """Refuses a configuration or files in the request: packages describe themselves. Raises InvalidArgumentError."""
    if parameters:
        names = ", ".join(map(str, parameters)) if isinstance(parameters, dict) else repr(parameters)
        raise InvalidArgumentError(f"parameters: expected none, as a package is loaded as it is, got {names:.80}")


def _name_and_version(request: Request) -> tuple[str, str]:
    return request.path_params.get("name", ""), request.path_params.get("version", "")
