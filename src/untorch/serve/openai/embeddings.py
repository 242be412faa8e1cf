"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from untorch.serve.openai.errors import expected, invalid
from untorch.serve.openai.fields import Fields, parse_body
from untorch.serve.openai.parameters import EMBEDDINGS, check_parameters
from untorch.serve.openai.prompts import read_prompts
from untorch.serve.openai.service import Service, in_thread

__all__ = ["embeddings"]


async def embeddings(service: Service, request: Request) -> Response:
    """The endpoint. Raises ApiError, and what the engine raises."""
    body = await request.body()
    return JSONResponse(await in_thread(lambda: _embed(service, parse_body(body)), lambda _: None))


def _embed(service: Service, fields: Fields) -> dict[str, Any]:
    check_parameters(fields, EMBEDDINGS)
    model, engine = service.engine(fields)
    embed = getattr(engine, "embed", None)
    if embed is None:
        raise invalid("model", "it has no embeddings", "unsupported")
    encoding = fields.choice("encoding_format", ("float", "base64"), "float")
    dimensions = fields.integer("dimensions", 1)
    prompts = read_prompts(fields, "input", engine)
    for prompt in prompts:
        service.check_length(engine, prompt, "input")
    with service.room(model, len(prompts), "input"):
        vectors = np.asarray(embed(prompts), np.float32)
    if dimensions is not None:
        vectors = _shorten(vectors, dimensions)
    data = [
        {"object": "embedding", "index": at, "embedding": _encode(vector, encoding)}
        for at, vector in enumerate(vectors)
    ]
    tokens = sum(map(len, prompts))
    return {
        "object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }  # fmt: skip


def _shorten(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first ones, with length 1 again."""
    width = vectors.shape[1]
    if dimensions > width:
        raise expected("dimensions", f"an integer from 1 to {width}, the model's width", dimensions)
    short = vectors[:, :dimensions]
    lengths = np.linalg.norm(short, axis=1, keepdims=True)
    return np.divide(short, np.where(lengths > 0, lengths, 1), dtype=np.float32)


def _encode(vector: NDArray[np.float32], encoding: str) -> Any:
    """base64: of little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
