"""The engine's methods for packages that embed or classify: embed, classify, score, and their asynchronous forms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from untorch.llm.core import Core
from untorch.llm.pooling import PooledRequest, Pooling
from untorch.llm.prompt import Prompt, is_prompt
from untorch.llm.sequence import Sequence as TokenSequence
from untorch.llm.settings import Settings
from untorch.llm.tokenizer import Tokenizer
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["PooledMethods"]

_CALLS = {"generate": "generates text: call generate", "embed": "makes embeddings: call embed",
          "classify": "makes scores: call classify or score"}  # fmt: skip

PromptLike = str | Sequence[int] | Prompt


class PooledMethods:
    """What Engine inherits. Each method may be called from any thread."""

    _settings: Settings
    _core: Core
    _tokenizer: Tokenizer | None

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        prompt_name: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """The embeddings [n, width] of n prompts, texts or token ids; of a single one [1, width].

        Args:
            prompts: Texts, token ids, or Prompts.
            prompt_name: Which of the package's prompts (``settings.prompts``) is put before each text. Default: the
                one that the model's authors chose, if any.
            priority, timeout: As for ``submit``.

        Raises:
            InvalidArgumentError: A prompt does not fit the model, or the package makes no embeddings.
            TimeoutError: The timeout passed.
        """
        return self._wait(self._start("embed", prompts, priority, timeout, self._prefix(prompt_name)))

    async def aembed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        prompt_name: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """As ``embed``, for asyncio. Cancelling the task cancels the requests."""
        return await self._gather(self._start("embed", prompts, priority, timeout, self._prefix(prompt_name)))

    def classify(
        self, prompts: PromptLike | Sequence[PromptLike], *, priority: int = 0, timeout: float | None = None
    ) -> NDArray[np.float32]:
        """The model's scores [n, labels] of n prompts, as its last layer gives them; ``settings.labels`` are the names.

        Raises as ``embed``.
        """
        return self._wait(self._start("classify", prompts, priority, timeout))

    async def aclassify(
        self, prompts: PromptLike | Sequence[PromptLike], *, priority: int = 0, timeout: float | None = None
    ) -> NDArray[np.float32]:
        """As ``classify``, for asyncio. Cancelling the task cancels the requests."""
        return await self._gather(self._start("classify", prompts, priority, timeout))

    def score(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        template: str | None = None,
        sigmoid: bool = True,
        priority: int = 0,
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """How well each document answers the query, [n]: for rerankers, which have one label.

        Args:
            query: A text.
            documents: Texts.
            template: The prompt of a pair, with {query} and {document} in it. Default: the tokenizer joins the two
                texts as its post-processor has it, which for most decoders means one behind the other.
            sigmoid: Whether scores are from 0 to 1, instead of the model's own.
            priority, timeout: As for ``submit``.

        Raises as ``embed``.
        """
        prompts = self._pairs(query, documents, template)
        return _one_label(self._wait(self._start("score", prompts, priority, timeout)), sigmoid)

    async def ascore(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        template: str | None = None,
        sigmoid: bool = True,
        priority: int = 0,
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """As ``score``, for asyncio. Cancelling the task cancels the requests."""
        prompts = self._pairs(query, documents, template)
        return _one_label(await self._gather(self._start("score", prompts, priority, timeout)), sigmoid)

    def submit_pooled(self, prompt: PromptLike, *, priority: int = 0, timeout: float | None = None) -> Pooling:
        """Begin a request for an embedding or for scores, and return at once: ``await`` it or call ``result()``.

        Raises as ``submit``.
        """
        if self._settings.task == "generate":
            self._refuse("submit_pooled")
        request, handle = self._pooled_request(prompt, priority, timeout)
        self._core.add(request)
        return handle

    def _pooled_request(
        self, prompt: PromptLike, priority: int, timeout: float | None
    ) -> tuple[PooledRequest, Pooling]:
        """One that the core does not have yet."""
        deadline = self._read_times("submit_pooled", priority, timeout)
        ids, embeddings = self._read_prompt(prompt)
        sequence = TokenSequence(ids, priority, (self._next_arrival(), 0), embeddings=embeddings)
        holder: list[PooledRequest] = []
        handle = Pooling(lambda: self._core.cancel(holder[0]))
        holder.append(PooledRequest(sequence, self._settings.pooling, deadline, handle))
        return holder[0], handle

    def _read_prompt(self, prompt: Any) -> Any:
        raise NotImplementedError

    def _read_times(self, method: str, priority: Any, timeout: Any) -> float | None:
        raise NotImplementedError

    def _next_arrival(self) -> int:
        raise NotImplementedError

    def _expect(self, method: str, task: str) -> None:
        """Raises InvalidArgumentError if the package has another task than the method."""
        if self._settings.task != task:
            self._refuse(method)

    def _refuse(self, method: str) -> NoReturn:
        raise InvalidArgumentError(f"{method}: the package {_CALLS[self._settings.task]}")

    def _start(
        self, method: str, prompts: Any, priority: int, timeout: float | None, prefix: str = ""
    ) -> list[Pooling]:  # fmt: skip
        """A request for each prompt, with the prefix before each text."""
        self._expect(method, "embed" if method == "embed" else "classify")
        if isinstance(prompts, str | Prompt) or (is_prompt(prompts) and len(prompts)):  # an empty list: no prompts
            prompts = [prompts]
        if not isinstance(prompts, Iterable):
            raise ArgumentTypeError(
                f"{method}: prompts: expected text, token ids or a list of prompts, got {type(prompts).__name__}"
            )
        made: list[tuple[PooledRequest, Pooling]] = []
        for at, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                prompt = prefix + prompt
            try:
                made.append(self._pooled_request(prompt, priority, timeout))
            except InvalidArgumentError as error:
                raise type(error)(f"{method}: prompts[{at}]: {error}") from None
        self._core.add(*(request for request, _ in made))
        return [handle for _, handle in made]

    def _wait(self, handles: list[Pooling]) -> NDArray[np.float32]:
        try:
            return self._stack([handle.result() for handle in handles])
        except BaseException:
            _cancel(handles)
            raise

    async def _gather(self, handles: list[Pooling]) -> NDArray[np.float32]:
        try:
            return self._stack([await handle for handle in handles])
        except BaseException:
            _cancel(handles)
            raise

    def _stack(self, outputs: Sequence[Any]) -> NDArray[np.float32]:
        if not outputs:
            return np.zeros((0, self._settings.width), np.float32)
        return np.stack([output.data for output in outputs])

    def _prefix(self, name: str | None) -> str:
        """The package's prompt of that name, or its default one."""
        self._expect("embed", "embed")
        known = self._settings.prompts
        if name is not None and name not in known:
            names = ", ".join(map(repr, known)) or "no name, as it has no prompts"
            raise InvalidArgumentError(f"embed: prompt_name: expected one of the package's, {names}, got {name!r}")
        name = self._settings.default_prompt if name is None else name
        return "" if name is None else known[name]

    def _pairs(self, query: Any, documents: Any, template: str | None) -> list[Any]:
        self._expect("score", "classify")
        if len(self._settings.labels) != 1:
            raise InvalidArgumentError(
                f"score: expected a model with one label, this one has {len(self._settings.labels)}: call classify"
            )
        documents = (
            list(documents) if isinstance(documents, Iterable) and not isinstance(documents, str) else [documents]
        )
        if not all(isinstance(text, str) for text in (query, *documents)):
            raise ArgumentTypeError("score: expected query as text and documents as texts: call classify for token ids")
        if self._tokenizer is None:
            raise InvalidArgumentError("score: there is no tokenizer: call classify with token ids")
        if template is None:
            return [self._tokenizer.encode_pair(query, document) for document in documents]
        if "{query}" not in template or "{document}" not in template:
            raise InvalidArgumentError(f"score: template: expected {{query}} and {{document}} in it, got {template!r}")
        return [_fill(template, {"query": query, "document": document}) for document in documents]


def _fill(template: str, texts: Mapping[str, str]) -> str:
    """In one pass, as a query may contain "{document}"."""
    return re.sub(r"\{(query|document)\}", lambda match: texts[match[1]], template)


def _one_label(scores: NDArray[np.float32], sigmoid: bool) -> NDArray[np.float32]:
    values = scores[:, 0]
    if not sigmoid:
        return values
    found: NDArray[np.float32] = (0.5 * (1 + np.tanh(values.astype(np.float64) / 2))).astype(np.float32)
    return found


def _cancel(handles: Iterable[Pooling]) -> None:
    for handle in handles:
        handle.cancel()
