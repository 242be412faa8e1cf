"""Text generation: a prompt or a conversation to the text that follows, by ``untorch.llm``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from untorch.llm import Engine, SamplingParams
from untorch.llm.settings import read_settings
from untorch.pipeline.base import Pipeline, numbered
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError
from untorch.runtime.program import Program

__all__ = ["TASK", "TextGeneration"]

TASK = "text-generation"


class TextGeneration(Pipeline):
    """The text that follows, as ``untorch generate`` prints it: a string for a text, for a conversation
    (``[{"role": …, "content": …}]``, by the package's chat template) or for token ids; a list for a list of these.

    stream: True: an iterator over the text's pieces as they come, of one input. Other options are fields of
    ``untorch.llm.SamplingParams``; those that are left out are as the model's authors recommend.

    Where the package has no tokenizer, inputs and results are token ids.
    """

    options = (
        "stream", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
        "include_stop_str_in_output", "ignore_eos", "min_tokens", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "logit_bias", "skip_special_tokens", "json_schema", "regex", "grammar",
    )  # fmt: skip

    def __init__(self, program: Program, owned: bool) -> None:
        found = read_settings(program.manifest, program.path)
        if found.task != "generate":
            raise InvalidFileError(
                f"{program.path}: {found.architecture} generates no text: use "
                f"untorch.llm.Engine({program.path!r}).{found.task}(…)"
            )
        super().__init__(program, Settings({"task": TASK, "architecture": found.architecture}, program.path), owned)
        self.engine = Engine(program)

    def __call__(self, inputs: Any, *, batch_size: int = 64, **options: Any) -> Any:
        """See the class. batch_size: inputs of a list that are in the engine at a time.

        Raises InvalidArgumentError and ArgumentTypeError for inputs and options that the model does not take.
        """
        if _is_one(inputs):
            return super().__call__(_One(inputs), batch_size=batch_size, **options)
        if options.get("stream") and not isinstance(inputs, str):
            raise InvalidArgumentError("pipeline: stream: expected one input, got several: call it for each of them")
        return super().__call__(inputs, batch_size=batch_size, **options)

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class."""
        given = dict(options)
        stream = given.pop("stream", False)
        if not isinstance(stream, bool):
            raise InvalidArgumentError(f"pipeline: stream: expected True or False, got {stream!r:.80}")
        params = replace(self.engine.default_params, **given)
        prompts = []
        for index, one in enumerate(inputs):
            with numbered(index if is_list else None):
                prompts.append(self._prompt(one.value if isinstance(one, _One) else one))
        if stream:
            return [self._pieces(prompts[0], params)]
        outputs = self.engine.generate(prompts, params)
        for index, output in enumerate(outputs):
            with numbered(index if is_list else None):
                if output.error is not None:
                    raise output.error
        return [output.text if self.engine.tokenizer is not None else output.token_ids for output in outputs]

    def _prompt(self, given: Any) -> Any:
        if isinstance(given, list | tuple) and given and isinstance(given[0], Mapping):
            for message in given:
                if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                    raise ArgumentTypeError(
                        f'prompt: expected messages such as {{"role": "user", "content": "…"}}, got {message!r:.80}'
                    )
            return self.engine.chat_prompt(given)
        if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu":
            return given.tolist()
        # What is a sequence of integers, or one of them, is no prompt for that.
        if isinstance(given, bytes | bytearray | memoryview):
            raise ArgumentTypeError(
                f"prompt: expected text or a list of token ids, got {type(given).__name__}: decode it"
            )
        if isinstance(given, int | np.integer | np.ndarray):
            got = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else f"{given!r:.80}"
            raise ArgumentTypeError(f"prompt: expected text or a list of token ids, got {got}")
        return given  # the engine says what it expects

    def _pieces(self, prompt: Any, params: SamplingParams) -> Iterator[Any]:
        """The request begins now. Leaving the loop cancels it."""
        handle = self.engine.submit(prompt, params)

        def pieces() -> Iterator[Any]:
            try:
                for chunk in handle:
                    piece = chunk.token_ids if self.engine.tokenizer is None else chunk.text
                    if piece:
                        yield piece
            finally:
                handle.cancel()

        return pieces()

    def close(self) -> None:
        """Ends what runs, and closes the package unless it was opened by the caller."""
        self.engine.close()
        super().close()


class _One:
    """One input that is a list: a conversation, or token ids."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_one(inputs: Any) -> bool:
    if not isinstance(inputs, list | tuple) or not inputs:
        return False
    return all(isinstance(one, Mapping) for one in inputs) or all(
        isinstance(one, int) and not isinstance(one, bool) for one in inputs
    )
