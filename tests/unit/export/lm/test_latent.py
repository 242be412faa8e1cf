"""Latent attention in pages: which layers keep latents, and that their results are those of expanded keys."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.language_models import VOCABULARY, make_model
from untorch.export.lm.check import check_chunks
from untorch.export.lm.latent import latent_layers
from untorch.export.lm.step import Step
from untorch.quant import quantize

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


def logits(step: Step, tokens: torch.Tensor) -> torch.Tensor:
    """Of all tokens, as one sequence."""
    count = len(tokens)
    blocks = -(-count // step.block)
    with torch.no_grad():
        found: torch.Tensor = step(
            tokens, torch.arange(count), torch.arange(count), torch.arange(blocks, dtype=torch.int32)[None],
            torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32), torch.arange(count),
            torch.zeros(blocks, step.elements, dtype=step.dtype),
        )  # fmt: skip
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_keep_latents(dtype: torch.dtype) -> None:
    # Without experts, which rounding may choose otherwise.
    model = make_model("DeepseekV3", first_k_dense_replace=9).to(dtype)
    projections = [module.kv_b_proj for module in latent_layers(model).values()]
    small, large = Step(model), Step(model, latent=False)
    assert large.absorbed == () and len(small.absorbed) == len(small.layers) == len(projections) > 1
    # One KV head of latents and the rotary part, against four heads.
    assert {(layer.heads_kv, layer.width, layer.width_v) for layer in small.layers} == {(1, 24, 16)}
    assert {(layer.heads_kv, layer.width, layer.width_v) for layer in large.layers} == {(4, 16, 12)}
    tokens = torch.arange(5, 45) % VOCABULARY
    found, expected = logits(small, tokens), logits(large, tokens)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    else:  # rounded elsewhere, not worse
        exact = logits(Step(model.float(), latent=False), tokens)
        assert (found - exact).abs().mean() <= 1.5 * (expected - exact).abs().mean()
        model.to(dtype)
    check_chunks(small, VOCABULARY)
    # The model is as it was.
    assert all("forward" not in vars(projection) for projection in projections)


def test_quantised_steps_keep_latents() -> None:
    """What expands them stays as it is."""
    step = Step(make_model("DeepseekV3", first_k_dense_replace=9))
    tokens = torch.arange(5, 45) % VOCABULARY
    exact, absorbed = logits(step, tokens), step.absorbed
    report = quantize(step, dtype="int8", progress=False)
    reason = "Step reads its weight without calling it"
    assert {name for name, text in report.skipped.items() if text == reason} == {
        f"model.{name}.kv_b_proj" for name in absorbed
    }
    quantised = {name for layer in report.layers for name in layer.names}
    assert quantised >= {f"model.{name}.o_proj" for name in absorbed}
    found = logits(step, tokens)
    assert not torch.equal(found, exact)
    assert (found - exact).abs().max() < 0.1 * exact.abs().max()


def test_what_expands_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(make_model("DeepseekV3"))
    weights = {id(module.kv_b_proj.weight) for module in latent_layers(step.model).values()}
    own, seen = torch.nn.functional.linear, []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(id(weight) in weights)
        return own(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    logits(step, torch.tensor([1, 2, 3]))
    assert seen and not any(seen)


def test_layers_that_mean_something_else_keep_expanded_keys() -> None:
    """The same attributes, but values come before keys."""
    model = make_model("DeepseekV3")
    for module in latent_layers(model).values():
        module.expand_kv = expand_the_other_way(module)  # type: ignore[assignment]
    step = Step(model)
    assert step.absorbed == () and {layer.heads_kv for layer in step.layers} == {4}
    check_chunks(step, VOCABULARY)


def expand_the_other_way(module: torch.nn.Module) -> object:
    own = type(module).expand_kv  # type: ignore[attr-defined]

    def expand(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = own(module, latent, rotary)
        return keys.flip(-1), values

    return expand


def test_models_without_latents() -> None:
    step = Step(make_model("Llama"))
    assert step.absorbed == () and not latent_layers(step.model)
