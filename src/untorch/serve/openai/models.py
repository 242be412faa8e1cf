"""``GET /v1/models`` and ``GET /v1/models/{name}``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from untorch.serve.openai.service import Service

__all__ = ["list_models", "retrieve_model"]


async def list_models(service: Service, request: Request) -> Response:
    """All of them."""
    found = [_model(service, name) for name in service.names()]
    return JSONResponse({"object": "list", "data": [one for one in found if one is not None]})


async def retrieve_model(service: Service, request: Request) -> Response:
    """One. Raises ApiError."""
    name = request.path_params["name"]
    found = _model(service, name)
    if found is None:
        raise service.missing(name)
    return JSONResponse(found)


def _model(service: Service, name: str) -> dict[str, Any] | None:
    engine = service.find(name)
    embedder = service.embedders.get(name)
    if engine is None and embedder is None and service.transcribers.get(name) is None:
        return None
    length = {} if embedder is None else {"max_model_len": embedder.max_tokens}
    if engine is not None:
        length = {"max_model_len": engine.settings.max_positions}
    base = service.base(name)
    parent = {} if base is None else {"parent": base}
    return {"id": name, "object": "model", "created": service.created, "owned_by": "untorch", **length, **parent}
