"""Token classification: labels of tokens, or entities that are joined from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.scores import softmax
from untorch.pipeline.text import TextPipeline
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["STRATEGIES", "TokenClassification"]

STRATEGIES = ("none", "simple", "first", "average", "max")


@dataclass
class _Token:
    word: str
    scores: NDArray[Any]
    index: int
    start: int
    end: int
    continues: bool  # the word of the token before


class TokenClassification(TextPipeline):
    """A list of entities for each text. aggregation_strategy: none (each token), simple, first, average or max."""

    options = ("aggregation_strategy", "ignore_labels")

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class."""
        strategy, ignored = options.get("aggregation_strategy", "none"), _read_labels(options.get("ignore_labels"))
        if strategy not in STRATEGIES:
            raise InvalidArgumentError(
                f"pipeline: aggregation_strategy: expected {', '.join(STRATEGIES)}, got {strategy!r:.80}"
            )
        for index, text in enumerate(inputs):
            if not isinstance(text, str):
                raise ArgumentTypeError(
                    f"pipeline: inputs[{index}]: expected a string, got {type(text).__name__} {text!r:.80}"
                )
        encodings = self.tokens.encode(inputs, truncation=True)
        output = self.call("forward", self.tokens.arrays(encodings))
        labels = self.labels(output.shape[-1])
        found = []
        for text, encoding, logits in zip(inputs, encodings, self.tokens.rows(output, encodings), strict=True):
            entities = self._entities(self._tokens(text, encoding, softmax(logits)), labels, strategy)
            key = "entity" if strategy == "none" else "entity_group"
            found.append([entity for entity in entities if entity[key] not in ignored])
        return found

    def _tokens(self, text: str, encoding: Any, scores: NDArray[Any]) -> list[_Token]:
        unknown = self.settings.optional("unknown_id", int)
        has_prefix = bool(getattr(self.tokens.backend.model, "continuing_subword_prefix", None))
        found = []
        for index, (token_id, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            if encoding.special_tokens_mask[index]:
                continue
            word, source = encoding.tokens[index], text[start:end]
            if token_id == unknown:
                word, continues = source, False
            elif has_prefix:
                continues = len(word) != len(source)
            else:
                continues = start > 0 and " " not in text[start - 1 : start + 1]
            found.append(_Token(word, scores[index], index, start, end, continues))
        return found

    def _entities(self, tokens: list[_Token], labels: list[str], strategy: str) -> list[dict[str, Any]]:
        if strategy in ("none", "simple"):
            entities = [
                {
                    "entity": labels[int(token.scores.argmax())], "score": token.scores.max(), "index": token.index,
                    "word": token.word, "start": token.start, "end": token.end,
                }
                for token in tokens
            ]  # fmt: skip
        else:
            entities = [self._word(word, labels, strategy) for word in _words(tokens)]
        return entities if strategy == "none" else [self._group(group) for group in _groups(entities)]

    def _word(self, tokens: list[_Token], labels: list[str], strategy: str) -> dict[str, Any]:
        """All tokens of a word have one label."""
        if strategy == "first":
            scores = tokens[0].scores
        elif strategy == "max":
            scores = max((token.scores for token in tokens), key=lambda one: float(one.max()))
        else:
            scores = np.mean([token.scores for token in tokens], axis=0)
        return {
            "entity": labels[int(scores.argmax())], "score": scores.max(),
            "word": self.tokens.join([token.word for token in tokens]),
            "start": tokens[0].start, "end": tokens[-1].end,
        }  # fmt: skip

    def _group(self, entities: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "entity_group": entities[0]["entity"].split("-", 1)[-1],
            "score": np.mean([entity["score"] for entity in entities]),
            "word": self.tokens.join([entity["word"] for entity in entities]),
            "start": entities[0]["start"], "end": entities[-1]["end"],
        }  # fmt: skip


def _read_labels(given: Any) -> frozenset[str]:
    """Labels that are left out. Raises InvalidArgumentError."""
    if given is None:
        return frozenset(["O"])
    labels = [given] if isinstance(given, str) else given
    if not isinstance(labels, list | tuple | set | frozenset) or not all(isinstance(one, str) for one in labels):
        raise InvalidArgumentError(
            f'pipeline: ignore_labels: expected a list of strings such as ["O"], got {given!r:.80}'
        )
    return frozenset(labels)


def _words(tokens: list[_Token]) -> list[list[_Token]]:
    found: list[list[_Token]] = []
    for token in tokens:
        if found and token.continues:
            found[-1].append(token)
        else:
            found.append([token])
    return found


def _groups(entities: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Neighbours with one tag; a tag that begins (B-) is a group of its own."""
    found: list[list[dict[str, Any]]] = []
    for entity in entities:
        label = entity["entity"]
        begins, tag = label.startswith("B-"), label[2:] if label[:2] in ("B-", "I-") else label
        if found and not begins:
            last = found[-1][-1]["entity"]
            if tag == (last[2:] if last[:2] in ("B-", "I-") else last):
                found[-1].append(entity)
                continue
        found.append([entity])
    return found
