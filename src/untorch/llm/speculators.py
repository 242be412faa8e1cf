"""Which speculator serves a model, and which models none can serve."""

from __future__ import annotations

from untorch.llm.draft_model import DraftModelSpeculator
from untorch.llm.runner import Runner
from untorch.llm.speculation import NgramSpeculator, SpeculativeOptions, Speculator
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

__all__ = ["make_speculator"]


def make_speculator(options: SpeculativeOptions, runner: Runner, max_batch_tokens: int) -> Speculator:
    """For a model. Raises UnsupportedError if tokens cannot be taken back, InvalidArgumentError for another task."""
    settings = runner.settings
    if settings.task != "generate":
        raise InvalidArgumentError(
            f"Engine: speculative: expected None, as the package does not generate: its task is {settings.task!r}"
        )
    if settings.state_elements:
        raise UnsupportedError(
            f"Engine: speculative: {settings.architecture or 'the model'} has recurrent layers, whose states cannot be "
            "taken back when a token is rejected: use speculative=None"
        )
    if options.method == "ngram":
        return NgramSpeculator(options, settings.max_positions)
    if settings.draft is None:
        raise InvalidArgumentError(
            "Engine: speculative: the package has no draft model: export it with causal_lm(…, draft=…), or use 'ngram'"
        )
    return DraftModelSpeculator(options, runner, max_batch_tokens)
