"""A language model by the Open Inference Protocol: text in, text out, as BYTES."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from untorch.runtime.errors import InvalidArgumentError
from untorch.serve.admission import Admission
from untorch.serve.errors import DeadlineError, NotReadyError
from untorch.serve.model import Port

if TYPE_CHECKING:
    from untorch.llm import Engine, Generation, RequestOutput
    from untorch.serve.metrics import Metrics

__all__ = ["LanguageModel"]

Array = NDArray[Any]

# Request parameters that are fields of SamplingParams, and their types.
_PARAMETERS: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,), "min_tokens": (int,), "temperature": (int, float), "top_p": (int, float), "top_k": (int,),
    "min_p": (int, float), "seed": (int,), "repetition_penalty": (int, float), "presence_penalty": (int, float),
    "frequency_penalty": (int, float), "stop": (str,), "json_schema": (str,), "regex": (str,), "ignore_eos": (bool,),
}  # fmt: skip


class LanguageModel:
    """``text_input`` (BYTES[n]) gives ``text_output`` (BYTES[n]); sampling by the request's parameters.

    Models that embed give ``embedding`` (FP32[n, width]), those that classify ``scores`` (FP32[n, labels]).
    """

    platform = "untorch_llm"
    inputs: tuple[Port, ...] = (Port("text_input", "BYTES", (-1,)),)
    outputs: tuple[Port, ...] = (Port("text_output", "BYTES", (-1,)),)

    def __init__(
        self,
        name: str,
        engine: Engine,
        metrics: Metrics | None = None,
        *,
        timeout: float = 0.0,
        admission: Admission | None = None,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self._admission = Admission(None) if admission is None else admission
        self._engine = engine
        self._metrics = metrics
        settings = engine.settings
        if settings.task != "generate":
            port = "embedding" if settings.task == "embed" else "scores"
            self.outputs = (Port(port, "FP32", (-1, settings.width)),)

    async def infer(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, Any], timeout: float | None
    ) -> dict[str, Array]:
        """Goes on from each of the texts."""
        texts = inputs.get("text_input")
        if texts is None or len(inputs) != 1 or texts.dtype != object:
            raise InvalidArgumentError(f"model '{self.name}': expected the input text_input: BYTES[-1]")
        prompts = [self._text(item) for item in texts.reshape(-1)]
        leave = self._admission.enter(self.name, len(prompts))
        begin = time.perf_counter()
        try:
            if self._engine.settings.task != "generate":
                return {self.outputs[0].name: await self._pool(prompts, parameters, timeout)}
            outputs = numpy.empty(len(prompts), dtype=object)
            outputs[:] = await self._generate(prompts, parameters, timeout)
            return {"text_output": outputs.reshape(texts.shape)}
        finally:
            leave()
            if self._metrics is not None:
                seconds = time.perf_counter() - begin
                self._metrics.statistics(self.name).executed(1, len(prompts), seconds, time.time())

    async def _generate(
        self, prompts: list[str], parameters: Mapping[str, Any], timeout: float | None
    ) -> list[str]:  # fmt: skip
        lora = parameters.get("lora")
        if lora is not None and not isinstance(lora, str):
            raise InvalidArgumentError(f"model '{self.name}': parameter 'lora': expected str, got {lora!r:.80}")
        others = {name: value for name, value in parameters.items() if name != "lora"}
        params = dataclasses.replace(self._engine.default_params, **self._fields(others))
        handles = []
        try:
            for prompt in prompts:
                handles.append(self._engine.submit(prompt, params, lora=lora, timeout=timeout))
            results = await asyncio.gather(*(self._result(handle) for handle in handles))
        finally:
            for handle in handles:
                handle.cancel()
        for result in results:
            self._check_end(result.finish_reason, timeout)
        return [result.text for result in results]

    async def _pool(self, prompts: list[str], parameters: Mapping[str, Any], timeout: float | None) -> Array:
        if parameters:
            name = next(iter(parameters))
            raise InvalidArgumentError(f"model '{self.name}': parameter '{name:.80}': expected none")
        call = self._engine.aembed if self._engine.settings.task == "embed" else self._engine.aclassify
        try:
            return await call(prompts, timeout=timeout)
        except TimeoutError:
            raise DeadlineError(f"model '{self.name}': it was not computed within {timeout:.3g} s") from None
        except CancelledError:
            raise NotReadyError(f"model '{self.name}' was unloaded before it was computed") from None

    def describe(self) -> dict[str, Any]:
        """Architecture, task and lengths."""
        settings = self._engine.settings
        return {
            "architecture": settings.architecture, "task": settings.task, "max_positions": settings.max_positions,
        }  # fmt: skip

    async def _result(self, handle: Generation) -> RequestOutput:
        """Waits without blocking the event loop, and measures when tokens come."""
        begin, first, last, count = time.perf_counter(), 0.0, 0.0, 0
        async for chunk in handle:
            if chunk.token_ids:
                last = time.perf_counter()
                first = first or last
                count += len(chunk.token_ids)
        if self._metrics is not None and count:
            self._metrics.first_token(self.name, first - begin)
            if count > 1:
                self._metrics.output_token(self.name, (last - first) / (count - 1))
        return handle.result()

    def _check_end(self, reason: str | None, timeout: float | None) -> None:
        """Raises an error if it was not the model, nor a limit of the request, that ended a text: it is a part then."""
        if reason == "timeout":
            raise DeadlineError(f"model '{self.name}': the text was not generated within {timeout:.3g} s")
        if reason not in ("stop", "length"):
            raise NotReadyError(f"model '{self.name}' was unloaded before the text was generated")

    def _fields(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in parameters.items():
            kinds = _PARAMETERS.get(name)
            if kinds is None:
                raise InvalidArgumentError(
                    f"model '{self.name}': parameter '{name:.80}': expected one of {', '.join(_PARAMETERS)}, lora"
                )
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise InvalidArgumentError(
                    f"model '{self.name}': parameter '{name}': expected {kinds[-1].__name__}, got {value!r:.80}"
                )
            fields[name] = [value] if name == "stop" else value
        return fields

    def _text(self, item: Any) -> str:
        try:
            return bytes(item).decode()
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"model '{self.name}': text_input: expected UTF-8") from None
