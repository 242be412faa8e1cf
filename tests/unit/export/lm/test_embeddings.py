"""Steps with embeddings in the place of tokens."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.language_models import make_model
from untorch.export.lm.embeddings import EmbeddingStep, embedding_method
from untorch.export.lm.step import Step
from untorch.export.lm.step_methods import step_method

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["Llama", "Gemma"])  # Gemma scales embeddings in the model
def test_embeddings_take_the_place_of_tokens(name: str) -> None:
    model = make_model(name)
    step = Step(model)
    twin = EmbeddingStep(step)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in step.parameters()]
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in step.named_parameters()]
    method = embedding_method(twin, step_method(step, 12), 32)
    args = list(method["args"])
    tokens, mask = args[0], args[9]
    assert 0 < mask.sum() < len(mask)
    with torch.no_grad():
        pools = [args[7].clone() for _ in range(3)]
        expected = step(*args[:7], pools[0])
        # Other tokens where the mask is set, and their embeddings.
        args[8] = model.get_input_embeddings()(tokens).where(mask[:, None], torch.tensor(float("nan")))
        args[0] = tokens.where(~mask, 3)
        torch.testing.assert_close(twin(*args[:7], pools[1], *args[8:]), expected)
        torch.testing.assert_close(pools[1], pools[0])
        assert not torch.allclose(step(*args[:7], pools[2]), expected)
        # The step itself reads tokens as before.
        torch.testing.assert_close(step(tokens, *args[1:7], pools[2]), expected)
    assert len(method["dynamic_shapes"]) == len(args) == 10
