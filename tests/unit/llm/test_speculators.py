"""Models that cannot speculate."""

from __future__ import annotations

import pytest

from tests.unit.llm.fake import FakeRunner
from untorch import InvalidArgumentError, UnsupportedError
from untorch.llm import Engine
from untorch.llm.speculation import SpeculativeOptions
from untorch.llm.speculators import make_speculator


def test_models_that_cannot_speculate() -> None:
    options = SpeculativeOptions("ngram")
    with pytest.raises(UnsupportedError) as caught:
        make_speculator(options, FakeRunner(state_elements=8, architecture="BambaForCausalLM"), 16)
    assert str(caught.value) == (
        "Engine: speculative: BambaForCausalLM has recurrent layers, whose states cannot be taken back when a token is "
        "rejected: use speculative=None"
    )
    with pytest.raises(InvalidArgumentError) as refused:
        make_speculator(options, FakeRunner(task="embed"), 16)
    assert str(refused.value) == (
        "Engine: speculative: expected None, as the package does not generate: its task is 'embed'"
    )
    with pytest.raises(InvalidArgumentError) as missing:
        make_speculator(SpeculativeOptions("draft"), FakeRunner(), 16)
    assert str(missing.value) == (
        "Engine: speculative: the package has no draft model: export it with causal_lm(…, draft=…), or use 'ngram'"
    )
    runner = FakeRunner(state_elements=8)
    with pytest.raises(UnsupportedError, match="the model has recurrent layers"):
        Engine(runner, text=False, speculative="ngram")
    assert runner.closed
