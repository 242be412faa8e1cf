"""Serves a package by the OpenAI API alone: ``python server.py PACKAGE``; prints the port."""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from untorch.llm import Engine
from untorch.serve.openai import Options, routes

MOST_REQUESTS = 70
PACE = 0.002  # seconds that a step takes at least, so that requests can be cancelled


class Vectors:
    """A model that only embeds: the numbers of a prompt's first three tokens."""

    def __init__(self, engine: Engine) -> None:
        self.settings = dataclasses.replace(engine.settings, task="embed", width=3)
        self.tokenizer = engine.tokenizer
        self.max_prompt_tokens, self.chat_template = engine.max_prompt_tokens, None
        self.loras: list[str] = []

    async def aembed(self, prompts: list[Any], timeout: float | None) -> np.ndarray:
        assert self.tokenizer is not None
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return np.array([[*one, 0, 0, 0][:3] for one in ids], np.float32)


class Models:
    def __init__(self, engine: Engine) -> None:
        self.models: dict[str, Any] = {"tiny": engine, "org/vectors": Vectors(engine)}

    def names(self) -> list[str]:
        return list(self.models)

    def get(self, name: str) -> Any:
        return self.models.get(name)


def main(path: str) -> None:
    with Engine(path, max_batch_tokens=256, max_sequences=64, kv_memory="64MiB") as engine:
        run = engine._runner.run
        engine._runner.run = lambda *args: (time.sleep(PACE), run(*args))[1]  # type: ignore[method-assign]

        async def stats(request: Request) -> JSONResponse:
            modules = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})
            return JSONResponse({**dataclasses.asdict(engine.stats()), "modules": modules})

        own = Route("/stats", stats)
        app = Starlette(routes=[own, *routes(Models(engine), Options(max_requests=MOST_REQUESTS))])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
            server.run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1])
