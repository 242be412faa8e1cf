"""Token classification: which labels are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from untorch.pipeline.settings import Settings
from untorch.pipeline.token_classification import TokenClassification
from untorch.runtime.errors import InvalidArgumentError


class Tokens:
    """A text is its characters."""

    backend = SimpleNamespace(model=SimpleNamespace(continuing_subword_prefix="##"))

    def encode(self, texts: Any, truncation: bool = False) -> Any:
        return [
            SimpleNamespace(
                ids=[*range(len(text))], offsets=[(i, i + 1) for i in range(len(text))], tokens=[*text],
                special_tokens_mask=[0] * len(text),
            )
            for text in texts
        ]  # fmt: skip

    def arrays(self, encodings: Any) -> Any:
        return {}

    def rows(self, output: Any, encodings: Any) -> Any:
        return list(output)


def make() -> Any:
    """The first three characters have these labels."""
    pipeline: Any = TokenClassification.__new__(TokenClassification)
    pipeline.settings = Settings({"labels": ["O", "B-PER", "PER"]}, "m.pt2")
    pipeline.task, pipeline.tokens = "token-classification", Tokens()
    pipeline.call = lambda method, arguments: np.eye(3, dtype=np.float32)[None]
    return pipeline


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, ["B-PER", "PER"]),
        ({"ignore_labels": None}, ["B-PER", "PER"]),
        ({"ignore_labels": []}, ["O", "B-PER", "PER"]),
        ({"ignore_labels": {"O", "PER"}}, ["B-PER"]),
        ({"ignore_labels": "O"}, ["B-PER", "PER"]),
        ({"ignore_labels": "B-PER"}, ["O", "PER"]),  # which has PER in it
    ],
)
def test_labels_that_are_left_out(options: dict[str, Any], labels: list[str]) -> None:
    assert [one["entity"] for one in make()("abc", **options)] == labels


@pytest.mark.parametrize("given", [3, [3], b"O"])
def test_other_labels_are_refused(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r'ignore_labels: expected a list of strings such as \["O"\], got '):
        make()("abc", ignore_labels=given)
