"""A Ray Serve application of a package with a front end: pictures, sound and texts over HTTP, labels out."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from untorch.integrations.ray.serving import import_serve
from untorch.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["pipeline"]

_ONGOING = 256  # more than a batch: they are joined in the replica


def pipeline(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    deployment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """An application for ``serve.run`` with ``/v1/pipeline/NAME`` of ``untorch serve``.

    Args:
        path: The package, on every node that has a replica.
        name: The model's name for clients. Default: the file's name without its suffix.
        deployment: Options of the deployment: ``num_replicas``, ``ray_actor_options`` …
        **options: Fields of ``untorch.serve.options.ServeOptions``: ``max_batch_size``, ``max_pixels`` …

    Raises:
        UnsupportedError: Ray, or what ``untorch.serve`` needs, is not installed.
        InvalidArgumentError: An option is wrong.
    """
    serve = import_serve()
    package = os.path.abspath(path)
    model = os.path.splitext(os.path.basename(package))[0] if name is None else name
    given = dict(options)
    _server_options(package, model, given)  # a wrong option is an error here, not in a replica

    def build() -> Any:  # in the replica: a loaded package cannot be sent there
        return pipeline_app(package, model, given)

    settings = {"name": "Pipeline", "max_ongoing_requests": _ONGOING, **(deployment or {})}
    made: Application = serve.deployment(serve.ingress(build)()).options(**settings).bind()
    return made


def pipeline_app(path: str, name: str, options: Mapping[str, Any]) -> Any:
    """The ASGI application of a replica: one package, closed with it."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware

    from untorch.serve.middleware import LimitBody
    from untorch.serve.pipelines import pipeline_routes
    from untorch.serve.state import ServerState

    state = ServerState(_server_options(path, name, options))
    state.repository.load_all()
    state.loaded = True

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await state.close()

    limit = Middleware(LimitBody, limit=state.options.max_body)
    return Starlette(routes=pipeline_routes(state), middleware=[limit], lifespan=lifespan)


def _server_options(path: str, name: str, options: Mapping[str, Any]) -> Any:
    try:
        module: Any = importlib.import_module("untorch.serve.options")
        importlib.import_module("untorch.serve.pipelines")
    except ImportError as error:
        raise UnsupportedError(f"pipeline: it needs pip install 'untorch[ray,serve,pipeline]': {error}") from None
    return module.ServeOptions(models={name: path}, page=False, **options)
