"""Zero-shot image classification: what errors of candidate labels say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from untorch.pipeline.settings import Settings
from untorch.pipeline.tokens import Tokens
from untorch.pipeline.zero_shot import ZeroShotImageClassification
from untorch.runtime.errors import InvalidArgumentError

tokenizers = pytest.importorskip("tokenizers")


def make() -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    data = backend.to_str().encode()
    values = {"max_length": 3, "text_inputs": ["input_ids"], "pad_id": 0, "padding_side": "right"}
    program: Any = SimpleNamespace(path="m.pt2", _program=SimpleNamespace(entry=lambda name: data))
    pipeline: Any = ZeroShotImageClassification.__new__(ZeroShotImageClassification)
    pipeline.task, pipeline._tokens = "zero-shot-image-classification", Tokens(program, Settings(values, "m.pt2"))
    return pipeline


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (["cat", "a b c d"], "candidate_labels[1]: expected at most 3 tokens, got 4: shorten the label"),
        (["a b c d"], "candidate_labels[0]: expected at most 3 tokens, got 4: shorten the label"),
        (["cat", "\ud800"], "candidate_labels[1]: expected Unicode text, got a lone surrogate, '\\ud800', at 0: decode "
         'bytes with errors="replace"'),
        (None, 'candidate_labels: expected a list of strings such as ["cat", "dog"], got None'),
        ([], 'candidate_labels: expected a list of strings such as ["cat", "dog"], got []'),
    ],
)  # fmt: skip
def test_labels_that_are_refused(labels: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        make()(b"", candidate_labels=labels, hypothesis_template="{}")
    assert str(caught.value) == f"pipeline: {text}"
