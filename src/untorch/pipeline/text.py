"""Tasks on text: classification, fill-mask, embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from untorch.pipeline.base import Pipeline, read_count
from untorch.pipeline.scores import activate, activation_of, best, softmax
from untorch.pipeline.settings import Settings
from untorch.pipeline.tokens import Tokens
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.program import Program

__all__ = ["FillMask", "TextClassification", "TextEmbedding", "TextPipeline"]


class TextPipeline(Pipeline):
    """A tokenizer in front of one method."""

    def __init__(self, program: Program, settings: Settings, owned: bool) -> None:
        super().__init__(program, settings, owned)
        self.tokens = Tokens(program, settings)


class TextClassification(TextPipeline):
    """``[{"label": …, "score": …}]`` of one text, dictionaries of a list; with top_k, lists of the best labels."""

    options = ("top_k", "function_to_apply", "truncation")

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class."""
        top_k = options.get("top_k", 1)
        if top_k is not None:
            read_count("top_k", top_k)
        name = activation_of(options, self.settings)
        encodings = self.tokens.encode(inputs, options.get("truncation", False))
        logits = self.call("forward", self.tokens.arrays(encodings))
        scores, labels = activate(logits, name), self.labels(logits.shape[-1])
        found = [best(row, labels, top_k) for row in scores]
        # A single text without top_k gives a list of one, a list of texts a list of dictionaries.
        return [row[0] for row in found] if is_list and "top_k" not in options else found


class FillMask(TextPipeline):
    """The likeliest tokens in the place of the mask; a list for each mask if there are several."""

    options = ("top_k", "truncation")

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class."""
        top_k = read_count("top_k", options.get("top_k", 5))
        mask_id = self.settings.get("mask_id", int)
        encodings = self.tokens.encode(inputs, options.get("truncation", False))
        for index, encoding in enumerate(encodings):
            if mask_id not in encoding.ids:
                raise InvalidArgumentError(
                    f"pipeline: inputs[{index}]: expected the mask token {self.settings.get('mask_token', str)}, got "
                    f"{inputs[index]!r:.80}"
                )
        output = self.call("forward", self.tokens.arrays(encodings))
        rows = self.tokens.rows(output, encodings)
        return [self._fill(row, one.ids, mask_id, top_k) for row, one in zip(rows, encodings, strict=True)]

    def _fill(self, logits: Any, ids: list[int], mask_id: int, top_k: int) -> Any:
        places = [place for place, token in enumerate(ids) if token == mask_id]
        found = []
        for place in places:
            scores = softmax(logits[place])
            row = []
            for token in np.argsort(-scores, kind="stable")[:top_k].tolist():
                filled = [*ids[:place], token, *ids[place + 1 :]]
                text = self.tokens.decode([one for one in filled if one != self.tokens.pad_id], len(places) == 1)
                row.append(
                    {
                        "score": float(scores[token]), "token": token,
                        "token_str": self.tokens.decode([token], False), "sequence": text,
                    }
                )  # fmt: skip
            found.append(row)
        return found[0] if len(found) == 1 else found


class TextEmbedding(TextPipeline):
    """An array [width] of a text, pooled and normalised as the model's modules.json says.

    prompt: a text before each of the texts. prompt_name: one of the package's, such as "query".
    """

    options = ("truncation", "prompt", "prompt_name")

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class. Texts are truncated by default, as sentence-transformers does."""
        if prompt := self._prompt(options):
            inputs = [prompt + text if isinstance(text, str) else text for text in inputs]
        encodings = self.tokens.encode(inputs, options.get("truncation", True))
        return [*self.call("forward", self.tokens.arrays(encodings))]

    @property
    def default_prompt(self) -> str:
        """What stands before each text unless a call says otherwise."""
        return self._prompt({})

    def _prompt(self, options: Mapping[str, Any]) -> str:
        """What stands before a text: given, one of the package's by its name, or its default."""
        text, name = options.get("prompt"), options.get("prompt_name")
        if text is not None:
            if not isinstance(text, str):
                raise InvalidArgumentError(f"pipeline: prompt: expected a string, got {text!r:.80}")
            if name is not None:
                raise InvalidArgumentError("pipeline: prompt_name: expected prompt or prompt_name, got both")
            return text
        # Packages before prompts have none.
        prompts: dict[str, Any] = self.settings.optional("prompts", dict) or {}
        name = self.settings.optional("default_prompt", str) if name is None else name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in prompts:
            known = ", ".join(sorted(prompts)) or "none, as the package has no prompts"
            raise InvalidArgumentError(f"pipeline: prompt_name: expected {known}, got {name!r:.80}")
        return str(prompts[name])
