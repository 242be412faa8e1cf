"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from untorch.runtime.errors import ClosedError, InvalidArgumentError
from untorch.serve.embedder import Embedder
from untorch.serve.errors import DeadlineError
from untorch.serve.openai.errors import context_length_exceeded, expected, from_exception
from untorch.serve.openai.fields import Fields, parse_body, read_body
from untorch.serve.openai.parameters import EMBEDDINGS, check_parameters
from untorch.serve.openai.prompts import check_prompts, read_prompts
from untorch.serve.openai.service import Service, in_thread, retried
from untorch.serve.openai.streaming import Reply, check_end

__all__ = ["embeddings"]


@dataclass(frozen=True)
class _Request:
    """embed: computes the vectors, within a time. count: of the inputs. tokens: of all of them, without the package's
    prompt.
    """

    model: str
    embed: Callable[[float | None], Awaitable[NDArray[np.float32]]]
    count: int
    tokens: int
    encoding: str
    dimensions: int | None


async def embeddings(service: Service, request: Request) -> Response:
    """The endpoint. Raises ApiError, and what the engine raises."""
    body = await read_body(request, service.options.max_body)
    job = await _read_in_thread(service, body)
    release = service.admit(job.model, job.count, "input")

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
    model, embedder = service.embedder(fields)
    encoding = fields.choice("encoding_format", ("float", "base64"), "float")
    dimensions = fields.integer("dimensions", 1)
    if embedder is not None:
        encodings, tokens = _encode_all(fields, embedder)
        embed: Any = partial(embedder.embed, encodings)
        return _Request(model, embed, len(encodings), tokens, encoding, dimensions)
    model, engine = service.engine(fields, "embed")
    prompts = read_prompts(fields, "input", engine)
    for prompt in prompts:
        service.check_length(engine, prompt, "input")
    # Texts stay texts: the engine puts the package's own prompt before them.
    inputs = _list(fields.get("input"))

    async def embed_by_engine(timeout: float | None) -> NDArray[np.float32]:
        return await engine.aembed(inputs, timeout=timeout)

    return _Request(model, embed_by_engine, len(inputs), sum(map(len, prompts)), encoding, dimensions)


def _encode_all(fields: Fields, embedder: Embedder) -> tuple[list[Any], int]:
    """By the package's front end. Raises ApiError."""
    given = fields.required("input")
    check_prompts(given, "input")
    try:
        encodings, tokens = embedder.encode(_list(given))
    except InvalidArgumentError as error:
        raise from_exception(error) from None
    for encoding in encodings:
        if len(encoding.ids) > embedder.max_tokens:
            raise context_length_exceeded("input", embedder.max_tokens, len(encoding.ids))
    return encodings, tokens


def _list(given: Any) -> list[Any]:
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


async def _embed(job: _Request, timeout: float | None) -> NDArray[np.float32]:
    try:
        vectors = await job.embed(timeout)
    except DeadlineError:
        raise
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
