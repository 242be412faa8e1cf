"""Steps with adapters: which layers take them, and each token goes through its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.language_models import make_model
from tests.lora_adapters import make_pairs, merged
from untorch.export import causal_lm
from untorch.export.lm.lora import LoraStep, find_lora_layers, lora_method, lora_section
from untorch.export.lm.step import Step
from untorch.export.lm.step_methods import step_method
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

pytestmark = pytest.mark.filterwarnings("ignore")

_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_layers() -> None:
    step = Step(make_model("Llama"))
    layers = find_lora_layers(step, True)
    assert [layer.name.rpartition(".")[2] for layer in layers[:7]] == list(_ALL)
    assert len(layers) == 21 and not any("lm_head" in layer.name for layer in layers)  # it sees some rows alone
    ends = [layer.offset + layer.rows for layer in layers]
    assert [layer.offset for layer in layers] == [0, *ends[:-1]]
    assert (layers[1].inputs, layers[1].outputs) == (32, 16)
    assert {layer.name.rpartition(".")[2] for layer in find_lora_layers(step, ["q_proj", "mlp.down_proj"])} == {
        "q_proj", "down_proj",
    }  # fmt: skip
    (one,) = find_lora_layers(step, ["model.layers.1.*.v_proj"])
    assert (one.name, one.offset) == ("model.layers.1.self_attn.v_proj", 0)
    section = lora_section(layers, torch.bfloat16, [16])
    assert section["rows"] == ends[-1] and section["dtype"] == "bfloat16"
    assert section["methods"] == [{"name": "step_16_lora", "tokens": 16}]


@pytest.mark.parametrize("wanted", ["q_proj", [], [1], None, {"q_proj": 1}])
def test_what_lora_may_be(wanted: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"causal_lm: lora: expected True, or names of linear layers such as"):
        find_lora_layers(Step(make_model("Llama")), wanted)


def test_unknown_layers() -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"lora: no linear layer that all tokens go through is called 'lm_head'; there are down_proj, gate_proj",
    ):
        find_lora_layers(Step(make_model("Llama")), ["q_proj", "lm_head"])


def test_tasks_without_generation(tmp_path: Any) -> None:
    model = make_model("Llama").model
    with pytest.raises(
        InvalidArgumentError, match="lora: expected False, as the model does not generate: it is to emb"
    ):
        causal_lm(model, tmp_path / "m.pt2", task="embed", lora=True)


def test_embeddings_as_inputs(tmp_path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="lora: expected False with inputs_embeds: a step takes one of the"):
        causal_lm(make_model("Llama"), tmp_path / "m.pt2", inputs_embeds=True, lora=True)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("Llama", _ALL), ("GPT2LMHead", ("c_attn", "c_fc", "c_proj")), ("Lfm2", ("q_proj", "in_proj", "w1"))],
)
def test_each_token_goes_through_its_own(name: str, layers: tuple[str, ...]) -> None:
    model = make_model(name)
    step = Step(model)
    adapted = LoraStep(step, find_lora_layers(step, True))
    assert [id(p) for p in adapted.parameters()] == [id(p) for p in step.parameters()]
    method = lora_method(adapted, step_method(step, 12), torch.float32)
    args = list(method["args"])
    assert len(args) == len(method["dynamic_shapes"]) == (12 if step.state_elements else 10)
    # Two adapters of other ranks, side by side; columns of padding between them hold what must not be seen.
    pairs = [make_pairs(model, layers, rank, seed) for rank, seed in ((3, 1), (5, 2))]
    loras = torch.full((args[8].shape[0], 12), 7.0)
    for (begin, end), own in zip(((1, 4), (5, 10)), pairs, strict=True):
        loras[:, begin:end] = 0
        for layer in adapted.lora_layers:
            if layer.name in own:
                a, b = own[layer.name]
                loras[layer.offset : layer.offset + layer.inputs, begin:end] = a.T
                loras[layer.offset + layer.inputs : layer.offset + layer.rows, begin:end] = b
    # The three sequences of the example: the first adapter, the second, none.
    ends = args[4].tolist()
    ranges = torch.zeros(12, 2, dtype=torch.int32)
    ranges[ends[0] : ends[1]], ranges[ends[1] : ends[2]] = torch.tensor([1, 4]), torch.tensor([5, 10])

    def run(of: Step, *more: torch.Tensor) -> torch.Tensor:
        states = tuple(value.clone() for value in args[10:])
        return of(*args[:7], args[7].clone(), *more, *states)

    with torch.no_grad():
        found = run(adapted, loras, ranges)
        base = run(step)
        models = [merged(model, own, 1.0) for own in pairs]
        for sequence, other in enumerate([Step(models[0]), Step(models[1]), step]):
            torch.testing.assert_close(found[sequence], run(other)[sequence], rtol=1e-4, atol=1e-3)
            assert torch.allclose(found[sequence], base[sequence], atol=1e-2) == (sequence == 2)
        # Hooks are gone.
        torch.testing.assert_close(run(step), base)
