"""The engine: requests in from any thread, one background thread that schedules, runs and samples, tokens out."""

from __future__ import annotations

import atexit
import numbers
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from untorch.llm.blocks import BlockGroup, BlockManager
from untorch.llm.core import Core
from untorch.llm.graphs import read_sizes
from untorch.llm.handle import Generation
from untorch.llm.lora_methods import LoraMethods
from untorch.llm.outputs import Chunk, Completion, RequestOutput, Usage
from untorch.llm.params import SamplingParams
from untorch.llm.pooled_methods import PooledMethods
from untorch.llm.pooling import PoolingCore
from untorch.llm.prompt import Embeddings, Prompt, check_tokens, is_prompt, read_embeddings
from untorch.llm.request import Request, Sample
from untorch.llm.runner import PackageRunner, Runner
from untorch.llm.sampler import SamplerState
from untorch.llm.scheduler import Scheduler
from untorch.llm.sequence import Sequence as TokenSequence
from untorch.llm.settings import Settings
from untorch.llm.slots import SlotManager
from untorch.llm.snapshots import SnapshotCache
from untorch.llm.speculation import read_speculative
from untorch.llm.speculators import make_speculator
from untorch.llm.structured import Grammars
from untorch.llm.tokenizer import ChatTemplate, Tokenizer
from untorch.llm.vision.messages import take_images
from untorch.runtime.errors import ArgumentTypeError, ClosedError, InvalidArgumentError, UntorchError

if TYPE_CHECKING:
    from untorch.runtime.program import Program
    from untorch.trust.policy import TrustPolicy

__all__ = ["Engine", "EngineStats"]

PromptLike = str | Sequence[int] | Prompt


@dataclass(frozen=True)
class EngineStats:
    """Since the engine was made, and of now.

    cached_tokens: of the prompt_tokens, those from the prefix cache. blocks_free: with those that are still findable.
    prefix_hits: prompts that had some. state_snapshots: of recurrent layers' states that the prefix cache holds now.
    drafts: of speculative decoding, verified a sequence and step. draft_tokens: in them. accepted_tokens: of those, the
    ones that were generated.
    """

    steps: int
    step_seconds: float
    model_seconds: float
    requests: int
    finished: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    running: int
    waiting: int
    blocks: int
    blocks_free: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    prefix_hits: int = 0
    state_snapshots: int = 0


class Engine(PooledMethods, LoraMethods):
    """Serves a package of ``untorch.export.causal_lm``: continuous batching over a paged KV cache.

    Methods may be called from any thread. Use it as a context manager, or call ``close()``.

    Args:
        source: The package's path, or a loaded program.
        kv_memory: Bytes for keys, values and the states of recurrent layers, or a string such as "2GiB". Default:
            enough for max_sequences of the model's length, at most a quarter of the memory that is available; on a
            GPU at most 95 % of what weights, the largest step and its CUDA graph leave, which is tried.
        max_batch_tokens: Tokens a step. Prompts that are longer are cut into chunks.
        max_sequences: Sequences that are computed at a time; others wait.
        prefix_cache: Whether equal beginnings of prompts are computed once. Of models with recurrent layers, their
            states are kept where prompts end and where they go apart.
        snapshot_memory: For recurrent layers: bytes of kv_memory for the states of known prefixes, or a string. The
            least recently used ones give way. Default: up to a quarter of kv_memory, and up to four for each of
            max_sequences. 0: no prefix cache for such a model.
        speculative: "ngram": what followed a sequence's last tokens earlier in it is proposed, and one step verifies
            several tokens (prompt lookup). "draft": the package's draft model proposes them. None: one token a step.
            What is generated is the same, but for rounding.
        num_speculative_tokens: The most tokens that are proposed at a time, 1 to 64.
        prompt_lookup_min: For "ngram": the fewest of the last tokens that have to match.
        prompt_lookup_max: For "ngram": the most that are compared. The longest match counts.
        loras: Adapters (LoRA) to load beside the weights, folders of PEFT by name: ``submit(…, lora=name)``. The
            package has to be exported with ``lora``.
        text: False: no text at all, only token ids, and the package ``tokenizers`` is not needed.
        num_threads: As for ``untorch.load``.
        cuda_graphs: On a GPU: whether steps that decode are CUDA graphs, captured now for 1, 2, 4, 8, 16, 24 …
            sequences; or these sizes. Larger batches are launched kernel by kernel.
        progress: Called while graphs are captured with how many are, and how many there will be.
        trust: As for ``untorch.load``.

    Raises:
        InvalidFileError: The package is damaged or no language model.
        UnsupportedError: It needs another untorch, a GPU, or a Python package that is missing.
        InvalidArgumentError: An argument is wrong.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Program | Runner,
        *,
        kv_memory: int | str | None = None,
        max_batch_tokens: int = 1024,
        max_sequences: int = 64,
        prefix_cache: bool = True,
        snapshot_memory: int | str | None = None,
        speculative: str | None = None,
        num_speculative_tokens: int = 4,
        prompt_lookup_min: int = 2,
        prompt_lookup_max: int = 5,
        loras: Mapping[str, str | os.PathLike[str]] | None = None,
        text: bool = True,
        num_threads: int = 0,
        cuda_graphs: bool | Sequence[int] = True,
        progress: Callable[[int, int], None] | None = None,
        trust: TrustPolicy | str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in (("max_batch_tokens", max_batch_tokens), ("max_sequences", max_sequences)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgumentError(f"Engine: {name}: expected a positive integer, got {value!r}")
        if max_batch_tokens < max_sequences:
            raise InvalidArgumentError(
                f"Engine: max_batch_tokens: expected at least max_sequences ({max_sequences}), as each sequence "
                f"decodes one token a step, got {max_batch_tokens}"
            )
        sizes = read_sizes(cuda_graphs, max_sequences)
        options = read_speculative(speculative, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max)
        self._runner = (
            source
            if isinstance(source, Runner)
            else PackageRunner(
                source,
                kv_memory,
                max_batch_tokens,
                max_sequences,
                num_threads,
                trust,
                sizes,
                progress,
                options,
                snapshot_memory if prefix_cache else 0,
            )
        )
        try:
            settings = self._settings = self._runner.settings
            for name, folder in (loras or {}).items():
                self._loras("Engine").load(name, folder)
            speculator = None if options is None else make_speculator(options, self._runner, max_batch_tokens)
            self._tokenizer = (
                Tokenizer(self._runner.file(settings.tokenizer)) if text and settings.tokenizer is not None else None
            )
            self._template = (
                ChatTemplate(self._runner.file(settings.chat_template).decode(), settings.special_tokens)
                if settings.chat_template is not None
                else None
            )
        except BaseException:
            self._runner.close()
            raise
        has_states = settings.state_elements > 0
        groups = list(settings.groups)
        if options is not None and options.method == "draft":  # it looks behind the windows of the first group
            groups[0] = BlockGroup(groups[0].size)
        snapshots = None
        if has_states:
            prefix_cache = prefix_cache and self._runner.snapshots > 0
        if has_states and prefix_cache:
            snapshots = SnapshotCache(range(max_sequences, max_sequences + self._runner.snapshots))
        blocks = BlockManager(self._runner.blocks, settings.block_size, prefix_cache, groups, snapshots)
        self._longest = blocks.longest(settings.max_positions)
        self._max_sequences = max_sequences
        slots = SlotManager(max_sequences) if has_states else None
        scheduler = Scheduler(blocks, max_batch_tokens, max_sequences, slots)
        core = Core if settings.task == "generate" else PoolingCore
        self._core = core(self._runner, scheduler, settings, speculator)
        self._grammars = Grammars(self._tokenizer, settings.vocabulary, settings.stop_ids)
        self._grammar_lock = threading.Lock()
        self._arrivals = 0
        self._lock = threading.Lock()
        self._process = os.getpid()
        _engines.add(self)
        self._core.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The package's; None if it has none."""
        return self._tokenizer

    @property
    def chat_template(self) -> str | None:
        """The text of the package's Jinja template; None if it has none."""
        return None if self._template is None else self._template.source

    @property
    def max_prompt_tokens(self) -> int:
        """The most tokens that a prompt may have: the model's length, and what the pages hold, are the limits."""
        return min(self._settings.max_positions - 1, self._longest)

    @property
    def takes_images(self) -> bool:
        """Whether prompts and messages may have images."""
        return self._runner.vision is not None

    @property
    def settings(self) -> Settings:
        """What the package says of the model: vocabulary, longest sequence, stop tokens, pages."""
        return self._settings

    @property
    def default_params(self) -> SamplingParams:
        """What the model's authors recommend."""
        return self._settings.default_params()

    def submit(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Generation:
        """Begin a request, and return at once.

        Args:
            prompt: Text, token ids, or a Prompt with images or embeddings.
            params: Default: ``default_params``.
            lora: The name of an adapter that is loaded. None: the model itself.
            priority: Requests with smaller numbers run first, and are preempted last.
            timeout: Seconds from now on after which it ends with the reason "timeout" and the tokens that it has.

        Raises:
            InvalidArgumentError: The prompt or a parameter does not fit the model.
            ClosedError: The engine is closed.
        """
        request, handle = self._request(prompt, params, lora, priority, timeout, streams=True)
        self._core.add(request)
        return handle

    def _request(
        self, prompt: PromptLike, params: SamplingParams | None, lora: str | None, priority: int = 0,
        timeout: float | None = None, streams: bool = False,
    ) -> tuple[Request, Generation]:  # fmt: skip
        """One that the core does not have yet. streams: chunks are wanted, and not the result alone."""
        self._expect("submit", "generate")
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise ArgumentTypeError(f"submit: params: expected SamplingParams, got {type(params).__name__}")
        deadline = self._read_times("submit", priority, timeout)
        ids, embeddings = self._read_prompt(prompt)
        adapter = self._adapter(lora)
        self._check(params)
        with self._grammar_lock:
            matcher = self._grammars.matcher(params)
        holder: list[Request] = []
        handle = Generation(lambda: self._core.cancel(holder[0]))
        request = Request(ids, params, self._settings.stop_ids, self._tokenizer, deadline, handle, streams)
        holder.append(request)
        sequence = TokenSequence(
            list(ids), priority, (self._next_arrival(), 0), params.samples, embeddings=embeddings,
            shares_prefix=params.prompt_logprobs is None, salt=b"" if adapter is None else adapter.salt, lora=adapter,
        )  # fmt: skip
        held_back = (*self._settings.stop_ids, *params.stop_token_ids)
        state = SamplerState(params, frozenset(ids) if params.has_penalties else frozenset(), held_back, 0, matcher)
        sample = sequence.owner = Sample(request, sequence, state)
        request.samples.append(sample)
        return request, handle

    def _run_one(self, prompt: PromptLike, params: SamplingParams | None, lora: str | None) -> RequestOutput:
        request, handle = self._request(prompt, params, lora)
        self._core.add(request)
        return _result(handle)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, params: SamplingParams | None = None, *, lora: str | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self, prompts: Sequence[int], params: SamplingParams | None = None, *, lora: str | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
    ) -> Any:
        """The results of one prompt, or of a list of them: a RequestOutput, or a list.

        lora: The name of an adapter; of several prompts also a list, one a prompt.
        Of several, one that fails has its error in ``error``; the error of a single one is raised. Of none: [].
        """
        self._expect("generate", "generate")
        if isinstance(prompts, list | tuple) and not prompts:
            return []
        if is_prompt(prompts):
            if isinstance(params, Sequence):
                raise ArgumentTypeError("generate: params: expected SamplingParams for one prompt, got a list")
            return self._run_one(prompts, params, lora)  # type: ignore[arg-type]
        if not isinstance(prompts, Iterable):
            raise ArgumentTypeError(
                f"generate: prompts: expected text, token ids or a list of prompts, got {type(prompts).__name__}"
            )
        many: list[Any] = list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidArgumentError(f"generate: params: expected {len(many)}, one a prompt, got {len(each)}")
        names = [lora] * len(many) if lora is None or isinstance(lora, str) else list(lora)
        if len(names) != len(many):
            raise InvalidArgumentError(f"generate: lora: expected {len(many)}, one a prompt, got {len(names)}")
        handles: list[Generation | UntorchError] = []
        requests: list[Request] = []
        for prompt, given, name in zip(many, each, names, strict=True):
            try:
                request, handle = self._request(prompt, given, name)
            except ClosedError:
                raise
            except UntorchError as error:
                handles.append(error)
            else:
                requests.append(request)
                handles.append(handle)
        # At once: the first is not run alone, and how they are batched does not depend on when the thread looks.
        self._core.add(*requests)
        try:
            return [one.wait() if isinstance(one, Generation) else _refused(one) for one in handles]
        except BaseException:  # an interrupt
            for one in handles:
                if isinstance(one, Generation):
                    one.cancel()
            raise

    async def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """Chunks as they come. Leaving the loop cancels the request."""
        if params is not None and params.samples > params.n:
            raise InvalidArgumentError("stream: params: best_of decides at the end: use generate")
        handle = self.submit(prompt, params, lora=lora, priority=priority, timeout=timeout)
        try:
            async for chunk in handle:
                yield chunk
        finally:
            handle.cancel()

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int] | Prompt:
        """The token ids of a conversation, by the package's chat template, which gets the variables, too.

        With images (``{"type": "image", "image": …}`` among the parts of a content) a Prompt, in which they are
        encoded.

        Raises InvalidArgumentError.
        """
        if self._template is None or self._tokenizer is None:
            what = "chat template" if self._template is None else "tokenizer"
            raise InvalidArgumentError(f"chat: the package has no {what}: use generate with a prompt of your own")
        messages, images = take_images(messages)
        ids = self._tokenizer.encode(self._template.render(messages, **variables), add_special_tokens=False)
        return self._with_images(Prompt(ids, images=images)) if images else ids

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        **variables: Any,
    ) -> RequestOutput:
        """The answer to a conversation: ``[{"role": "user", "content": "…"}]``. The template gets the variables."""
        return self._run_one(self.chat_prompt(messages, **variables), params, lora)

    def stats(self) -> EngineStats:
        """Counters, and what runs and waits."""
        core, scheduler = self._core, self._core.scheduler
        return EngineStats(
            core.steps, core.step_seconds, core.model_seconds, core.requests, core.finished, core.prompt_tokens,
            core.cached_tokens, core.generated_tokens, scheduler.preemptions, len(scheduler.running),
            len(scheduler.waiting), scheduler.blocks.count, scheduler.blocks.free, core.drafts, core.draft_tokens,
            core.accepted_tokens, scheduler.prefix_hits,
            0 if scheduler.blocks.snapshots is None else len(scheduler.blocks.snapshots),
        )  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """Bytes: those of ``Program.memory``, and ``kv_cache``, the pages and the states of recurrent layers."""
        return self._runner.memory()

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests, and free the model and its pages.

        drain: Seconds in which requests that run may end. Those that do not, and by default all, are cancelled.
        """
        if os.getpid() == self._process:
            self._core.stop(drain)
            self._runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_times(self, method: str, priority: Any, timeout: Any) -> float | None:
        """The deadline. Raises InvalidArgumentError; ClosedError in another process."""
        if not isinstance(priority, numbers.Integral):
            raise ArgumentTypeError(f"{method}: priority: expected an integer, got {priority!r}")
        if timeout is not None and (not isinstance(timeout, numbers.Real) or not float(timeout) > 0):
            raise InvalidArgumentError(f"{method}: timeout: expected seconds above 0, got {timeout!r}")
        if os.getpid() != self._process:
            raise ClosedError(f"{method}: the engine belongs to the process that made it: make one in this process")
        return None if timeout is None else time.monotonic() + float(timeout)

    def _next_arrival(self) -> int:
        with self._lock:
            self._arrivals += 1
            return self._arrivals

    def _read_prompt(self, prompt: Any) -> tuple[list[int], Embeddings | None]:
        settings = self._settings
        if isinstance(prompt, Prompt) and len(prompt.images):
            prompt = self._with_images(prompt)
        given = prompt.tokens if isinstance(prompt, Prompt) else prompt
        if isinstance(given, str):
            if self._tokenizer is None:
                raise InvalidArgumentError("prompt: expected token ids, as there is no tokenizer, got text")
            ids = self._tokenizer.encode(given)
        elif is_prompt(given):
            ids = list(given)
        else:
            raise ArgumentTypeError(f"prompt: expected text or a list of token ids, got {given!r:.80}")
        ids = check_tokens(ids, settings.vocabulary)
        if not ids:
            raise InvalidArgumentError("prompt: expected at least one token, got none")
        # A token that is generated needs a position, too.
        most = settings.max_positions - (settings.task == "generate")
        if len(ids) > most:
            expected = f"at most {most}" if settings.task != "generate" else f"less than {settings.max_positions}"
            raise InvalidArgumentError(f"prompt: expected {expected} tokens, the model's length, got {len(ids)}")
        if len(ids) > self._longest:
            raise InvalidArgumentError(
                f"prompt: expected at most {self._longest} tokens, which is what the pages hold, got {len(ids)}: give "
                "the engine more kv_memory"
            )
        if not isinstance(prompt, Prompt):
            return ids, None
        return ids, read_embeddings(
            prompt.embeddings, len(ids), settings.hidden, settings.block_size, prompt.positions, settings.position_rows
        )

    def _with_images(self, prompt: Prompt) -> Prompt:
        """With embeddings of the images in the place of their placeholders. Raises InvalidArgumentError."""
        encoder = self._runner.vision
        if encoder is None:
            raise InvalidArgumentError(
                "prompt: images: the package has no image encoder: export it with causal_lm(…, images=True)"
            )
        if prompt.embeddings or prompt.positions is not None:
            raise InvalidArgumentError("prompt: images: expected no embeddings and positions beside images")
        tokens = prompt.tokens
        if isinstance(tokens, str):
            if self._tokenizer is None:
                raise InvalidArgumentError("prompt: expected token ids, as there is no tokenizer, got text")
            tokens = self._tokenizer.encode(tokens)
        return encoder.expand(tokens, prompt.images, self.max_prompt_tokens)

    def _check(self, params: SamplingParams) -> None:
        """What only the model tells."""
        vocabulary = self._settings.vocabulary
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= vocabulary:
                    raise InvalidArgumentError(
                        f"SamplingParams: {name}: expected ids from 0 to {vocabulary - 1}, got {token}"
                    )
        if params.stop and self._tokenizer is None:
            raise InvalidArgumentError("SamplingParams: stop: there is no tokenizer, so there is no text to search")
        if params.samples > self._max_sequences:
            name = "n" if params.best_of is None else "best_of"
            raise InvalidArgumentError(
                f"SamplingParams: {name}: expected at most the engine's max_sequences ({self._max_sequences}), got "
                f"{params.samples}"
            )


def _result(handle: Generation) -> RequestOutput:
    """An interrupt cancels the request."""
    try:
        return handle.result()
    except BaseException:
        handle.cancel()
        raise


def _refused(error: UntorchError) -> RequestOutput:
    return RequestOutput([], [Completion(0, [], "", "error")], Usage(0, 0, 0), None, error)


# The thread of an engine must not run while the interpreter goes.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _close_all() -> None:
    for engine in list(_engines):
        engine.close()


atexit.register(_close_all)
