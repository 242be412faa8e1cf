"""Ray Serve applications of a language model: one of its own with streaming, and OpenAI's API."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from untorch.integrations.ray.serving import import_serve, read_json
from untorch.llm import Chunk, Engine, RequestOutput, SamplingParams
from untorch.llm.vision.messages import refuse_files
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["LanguageModelServer", "language_model", "openai"]

_ONGOING = 256  # the engine schedules them


def language_model(
    path: str | os.PathLike[str], *, deployment: Mapping[str, Any] | None = None, **engine_options: Any
) -> Application:
    """An application for ``serve.run`` of a package of ``untorch.export.causal_lm``.

    HTTP: ``POST {"prompt": "Once", "params": {"max_tokens": 8}}``, or ``"messages"`` in place of ``"prompt"``, gives
    the completions; with ``"stream": true`` server-sent events, one a chunk. A client that leaves cancels its request.
    Handles: ``await handle.generate.remote("Once", {"max_tokens": 8})``, and ``handle.options(stream=True)
    .stream.remote(…)`` for chunks as they come.

    Args:
        path: The package, on every node that has a replica.
        deployment: Options of the deployment: ``num_replicas``, ``ray_actor_options`` …
        **engine_options: As for ``untorch.llm.Engine``.

    Raises:
        UnsupportedError: Ray is not installed.
    """
    serve = import_serve()
    options = {"name": "LanguageModel", "max_ongoing_requests": _ONGOING, **(deployment or {})}
    made: Application = (
        serve.deployment(LanguageModelServer).options(**options).bind(os.path.abspath(path), engine_options)
    )
    return made


def openai(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    api_options: Mapping[str, Any] | None = None,
    deployment: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> Application:
    """An application for ``serve.run`` with OpenAI's API, ``untorch.serve.openai``: ``/v1/chat/completions`` …

    Args:
        path: The package, on every node that has a replica.
        name: The model's name for clients. Default: the file's name without its suffix.
        api_options: Fields of ``untorch.serve.openai.Options``.
        deployment: Options of the deployment: ``num_replicas``, ``ray_actor_options`` …
        **engine_options: As for ``untorch.llm.Engine``.

    Raises:
        UnsupportedError: Ray, or ``untorch.serve.openai``, is not installed.
    """
    serve = import_serve()
    if not _has_openai():
        raise UnsupportedError("openai: this untorch has no OpenAI API, which needs pip install 'untorch[ray,serve]'")
    package = os.path.abspath(path)
    model = os.path.splitext(os.path.basename(package))[0] if name is None else name
    given, options = dict(engine_options), dict(api_options or {})

    def build() -> Any:  # in the replica: an engine cannot be sent there
        return openai_app(package, model, given, options)

    settings = {"name": "OpenAI", "max_ongoing_requests": _ONGOING, **(deployment or {})}
    made: Application = serve.deployment(serve.ingress(build)()).options(**settings).bind()
    return made


def openai_app(path: str, name: str, engine_options: Mapping[str, Any], api_options: Mapping[str, Any]) -> Any:
    """The ASGI application of a replica: one engine, closed with it."""
    from starlette.applications import Starlette

    api: Any = importlib.import_module("untorch.serve.openai")
    engine = Engine(path, **engine_options)

    class Engines:
        """One of them."""

        def names(self) -> list[str]:
            return [name]

        def get(self, wanted: str) -> Engine | None:
            return engine if wanted == name else None

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        engine.close()

    return Starlette(routes=api.routes(Engines(), api.Options(**api_options)), lifespan=lifespan)


def _has_openai() -> bool:
    try:
        return importlib.util.find_spec("untorch.serve.openai") is not None
    except ImportError:  # untorch.serve itself
        return False


class LanguageModelServer:
    """A replica. Its engine batches the requests."""

    def __init__(self, path: str, engine_options: Mapping[str, Any]) -> None:
        self._engine = Engine(path, **engine_options)

    async def generate(self, prompt: Any, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The completions of a prompt: text, token ids, or a list of messages."""
        handle = self._engine.submit(self._prompt(prompt), self._params(params))
        try:
            async for _ in handle:
                pass
        except BaseException:
            handle.cancel()
            raise
        return _output(handle.result())

    async def stream(
        self, prompt: Any, params: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks as they come. Leaving the loop cancels the request."""
        chunks: Any = self._engine.stream(self._prompt(prompt), self._params(params))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield _chunk(chunk)

    async def __call__(self, request: Request) -> Response:
        """HTTP: JSON in, JSON or server-sent events out."""
        from starlette.responses import JSONResponse, StreamingResponse

        if request.method != "POST":
            return JSONResponse({"error": f"expected POST, got {request.method}"}, 405)
        try:
            document = await read_json(request, {"prompt", "messages", "params", "stream"})
            if ("prompt" in document) == ("messages" in document):
                raise InvalidArgumentError("expected prompt or messages, one of them")
            prompt = document.get("prompt", document.get("messages"))
            refuse_files(prompt)
            streamed = document.get("stream", False)
            if not isinstance(streamed, bool):
                raise ArgumentTypeError(f"stream: expected true or false, got {streamed!r}")
            if not streamed:
                return JSONResponse(await self.generate(prompt, document.get("params")))
            chunks = self.stream(prompt, document.get("params"))
            chunk = await anext(chunks, None)  # an error of the prompt has a status of its own
        except InvalidArgumentError as error:
            return JSONResponse({"error": str(error)}, 400)

        return StreamingResponse(_events(chunk, chunks), media_type="text/event-stream")

    def _prompt(self, given: Any) -> Any:
        """Text and token ids as they are; messages as the chat template writes them."""
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        return self._engine.chat_prompt(given) if is_list and given and isinstance(given[0], Mapping) else given

    def _params(self, given: Mapping[str, Any] | None) -> SamplingParams | None:
        if given is None or isinstance(given, SamplingParams):
            return given
        if not isinstance(given, Mapping):
            raise ArgumentTypeError(f"params: expected an object, got {type(given).__name__}")
        known = list(SamplingParams.__dataclass_fields__)
        if unknown := [str(key) for key in given if key not in known]:
            raise InvalidArgumentError(f"params: expected {', '.join(known)}, got {', '.join(unknown)}")
        return SamplingParams(**given)


async def _events(chunk: dict[str, Any] | None, chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[str]:
    """Server-sent events. When the client leaves, the generator is closed, and with it the request."""
    async with contextlib.aclosing(chunks):
        while chunk is not None:
            yield f"data: {json.dumps(chunk)}\n\n"
            chunk = await anext(chunks, None)
        yield "data: [DONE]\n\n"


def _output(output: RequestOutput) -> dict[str, Any]:
    if output.error is not None:
        raise output.error
    return {
        "completions": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
            for completion in output.completions
        ],
        "usage": asdict(output.usage),
    }


def _chunk(chunk: Chunk) -> dict[str, Any]:
    shown: dict[str, Any] = {"index": chunk.index, "text": chunk.text, "token_ids": chunk.token_ids}
    if chunk.finish_reason is not None:
        shown["finish_reason"] = chunk.finish_reason
    if chunk.usage is not None:
        shown["usage"] = asdict(chunk.usage)
    return shown
