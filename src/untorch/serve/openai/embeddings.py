"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from untorch.llm import Engine
from untorch.runtime.errors import ClosedError, InvalidArgumentError
from untorch.serve.openai.errors import expected, from_exception
from untorch.serve.openai.fields import Fields, parse_body, read_body
from untorch.serve.openai.parameters import EMBEDDINGS, check_parameters
from untorch.serve.openai.prompts import read_prompts
from untorch.serve.openai.service import Service, in_thread, retried
from untorch.serve.openai.streaming import Reply, check_end

__all__ = ["embeddings"]


@dataclass(frozen=True)
class _Request:
    """tokens: of all inputs, without what the package puts before them."""

    model: str
    engine: Engine
    inputs: list[str | list[int]]
    encoding: str
    dimensions: int | None
    tokens: int


async def embeddings(service: Service, request: Request) -> Response:
    """The endpoint. Raises ApiError, and what the engine raises."""
    body = await read_body(request, service.options.max_body)
    job = await _read_in_thread(service, body)
    release = service.admit(job.model, len(job.inputs), "input")

    async def embed() -> NDArray[np.float32]:
        nonlocal job
        try:
            return await _embed(job, service.options.timeout)
        except ClosedError:
            job = await _read_in_thread(service, body)
            raise

    async def answer() -> Response:
        return JSONResponse(_answer(job, await retried(embed)))

    return Reply(answer, release)


async def _read_in_thread(service: Service, body: bytes) -> _Request:
    return await in_thread(lambda: _read(service, parse_body(body)), lambda _: None)


def _read(service: Service, fields: Fields) -> _Request:
    check_parameters(fields, EMBEDDINGS)
    model, engine = service.engine(fields, "embed")
    encoding = fields.choice("encoding_format", ("float", "base64"), "float")
    dimensions = fields.integer("dimensions", 1)
    prompts = read_prompts(fields, "input", engine)
    for prompt in prompts:
        service.check_length(engine, prompt, "input")
    # Texts stay texts: the engine puts the package's own prompt before them.
    given = fields.get("input")
    whole = isinstance(given, str) or isinstance(given[0], int)
    return _Request(model, engine, [given] if whole else given, encoding, dimensions, sum(map(len, prompts)))


async def _embed(job: _Request, timeout: float | None) -> NDArray[np.float32]:
    try:
        vectors = await job.engine.aembed(job.inputs, timeout=timeout)
    except TimeoutError:
        check_end("timeout")
        raise
    except InvalidArgumentError as error:
        raise from_exception(error, {"prompts": "input", "prompt": "input"}) from None
    return np.asarray(vectors, np.float32)


def _answer(job: _Request, vectors: NDArray[np.float32]) -> dict[str, Any]:
    if job.dimensions is not None:
        vectors = _shorten(vectors, job.dimensions)
    data = [
        {"object": "embedding", "index": at, "embedding": _encode(vector, job.encoding)}
        for at, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": job.tokens, "total_tokens": job.tokens}
    return {"object": "list", "data": data, "model": job.model, "usage": usage}


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
