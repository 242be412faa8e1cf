"""Tests of select_rows_early: layers compute the rows that are read; results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import fx, nn
from torch.export import Dim

from untorch.export.lm.step import Step
from untorch.export.lm.step_methods import step_method
from untorch.export.passes.drop_dead_code import drop_dead_code
from untorch.export.passes.drop_inference_dropout import drop_inference_dropout
from untorch.export.passes.select_rows_early import select_rows_early
from untorch.quant import quantize

Select = Callable[[torch.Tensor], torch.Tensor]


class Mlp(nn.Module):
    """x + mlp(norm(x)), and what is selected of it."""

    def __init__(self, select: Select, norm: nn.Module | None = None, gated: bool = False) -> None:
        super().__init__()
        self.select, self.gated = select, gated
        self.norm = nn.LayerNorm(16) if norm is None else norm
        self.up, self.down = nn.Linear(16, 64), nn.Linear(32 if gated else 64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        if self.gated:
            gate, value = y.chunk(2, dim=-1)
            y = nn.functional.silu(gate) * value
        return self.select(x + self.down(nn.functional.gelu(y)))


def rows_of_linears(model: nn.Module, *args: Any, dynamic: Any = None) -> list[list[int]]:
    """Sizes of linear layers' inputs behind the pass, which must not change the results."""
    with torch.no_grad():
        expected = model.eval()(*args)
        module = unlift(model, *args, dynamic=dynamic)
        drop_dead_code(module)
        before = linears(module)
        report = select_rows_early(module)
        close(module)
        assert_same(module(*args), expected, rtol=1e-4, atol=1e-5)
    found = linears(module)
    assert bool(report.changed) == (found != before)
    return found


def linears(module: fx.GraphModule) -> list[list[int]]:
    """Sizes of the inputs of linear layers."""
    return [list(node.args[0].meta["val"].shape) for node in module.graph.nodes if "linear" in str(node.target)]


ROWS = torch.tensor([3, 15, 3])


@pytest.mark.parametrize(
    ("select", "rows"),
    [
        (lambda x: x[:, 0], [2, 1, 16]),
        (lambda x: x[:, -1], [2, 1, 16]),
        (lambda x: x[:, 0:1], [2, 1, 16]),
        (lambda x: x[:, 5:9:2], [2, 2, 16]),
        (lambda x: x.index_select(1, ROWS), [2, 3, 16]),
        (lambda x: x[:, ROWS], [2, 3, 16]),
        (lambda x: torch.softmax(x, -1).to(torch.float64)[:, 0], [2, 1, 16]),
        (lambda x: torch.cat([x.mean(-1, keepdim=True), x.clamp(min=0)], -1)[:, 0], [2, 1, 16]),
        (lambda x: torch.topk(x, 3).values[:, 0], [2, 1, 16]),
        # Not few rows, columns, rows that are mixed, another reader
        (lambda x: x[:, 0:4], [2, 24, 16]),
        (lambda x: x[..., 0], [2, 24, 16]),
        (lambda x: torch.softmax(x, 1)[:, 0], [2, 24, 16]),
        (lambda x: x.cumsum(1)[:, 0], [2, 24, 16]),
        (lambda x: x.flip(1)[:, 0], [2, 24, 16]),
        (lambda x: x[:, 0] + x.mean(1), [2, 24, 16]),
        (lambda x: x[:, torch.arange(24) < 2], [2, 24, 16]),
        (lambda x: x[torch.arange(2), torch.tensor([1, 5])], [2, 24, 16]),
    ],
)
def test_selections(select: Select, rows: list[int]) -> None:
    found = rows_of_linears(Mlp(select), torch.randn(2, 24, 16))
    assert found == [rows, [*rows[:-1], 64]]


@pytest.mark.parametrize("model", [Mlp(lambda x: x[:, 0], gated=True), Mlp(lambda x: x[:, 0], nn.RMSNorm(16))])
def test_other_layers(model: nn.Module) -> None:
    assert rows_of_linears(model, torch.randn(2, 24, 16))[0] == [2, 1, 16]


def test_operands_that_are_broadcast() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.column = nn.Linear(16, 16), nn.Buffer(torch.randn(16))
            self.row, self.rows = nn.Buffer(torch.randn(1, 1, 16)), nn.Buffer(torch.randn(24, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * self.column + self.row - self.rows)[:, 2]

    assert rows_of_linears(Model(), torch.randn(2, 24, 16)) == [[2, 1, 16]]


def test_norms_over_rows_stay() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Mlp(lambda x: x[:, 0], nn.LayerNorm((24, 16))))
    assert rows_of_linears(model, torch.randn(2, 24, 16)) == [[2, 24, 16], [2, 1, 16], [2, 1, 64]]


def test_sizes_of_one_come_and_go() -> None:
    class Model(nn.Module):
        def __init__(self, batch: int) -> None:
            super().__init__()
            self.layer, self.batch = nn.Linear(16, 16), batch

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x.reshape(self.batch * 24, 4, 4).flatten(1)).view(self.batch, 24, 16)
            return y[:, 0]

    assert rows_of_linears(Model(1), torch.randn(1, 24, 16)) == [[1, 16]]
    assert rows_of_linears(Model(2), torch.randn(2, 24, 16)) == [[48, 16]]


def test_what_is_written_stays() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.state = nn.Linear(16, 16), nn.Buffer(torch.randn(2, 24, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(self.state) * x
            self.state.add_(1)
            return y[:, 0]

    module = unlift(Model(), torch.randn(2, 24, 16))
    assert select_rows_early(module).changed == []


def test_counts_that_depend_on_values_stay() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)[:, wanted.nonzero()[:, 0]]
            return y

    module = unlift(Model(), torch.randn(2, 24, 16), torch.arange(24) == 3)
    assert select_rows_early(module).changed == []


def test_without_layers_nothing_changes() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x + 1)[:, 0]

    module = unlift(Model(), torch.randn(2, 24, 16))
    before = targets(module)
    assert select_rows_early(module).changed == []
    assert targets(module) == before


def test_one_selection_after_another() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.second(self.first(x)[:, 3])  # of 9 x 24 x 16
            return self.third(y)[1]

    assert rows_of_linears(Model(), torch.randn(9, 24, 16)) == [[1, 1, 16], [1, 16], [1, 16]]


def test_sizes_that_vary() -> None:
    dynamic = {"x": {0: Dim("batch"), 1: Dim("tokens", min=2)}}
    with torch.no_grad():
        model = Mlp(lambda x: x[:, 0]).eval()
        module = unlift(model, torch.randn(2, 24, 16), dynamic=dynamic)
        assert select_rows_early(module).changed == ["select"]
        close(module)
        for shape in ((2, 24, 16), (3, 2, 16), (1, 70, 16)):
            x = torch.randn(shape)
            assert_same(module(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int4", "int8", "nvfp4"])
def test_quantised_layers(dtype: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)[:, 0]
            return y

    model = Model()
    quantize(model, dtype=dtype)
    assert rows_of_linears(model, torch.randn(2, 24, 64)) == [[2, 1, 64]]


class Attention(nn.Module):
    """Of separate projections, or of one whose parts are unbound."""

    def __init__(self, *, merged: bool = False, causal: bool = False, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.merged, self.causal, self.mask = merged, causal, mask
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        if self.merged:
            q, k, v = self.qkv(x).reshape(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (each(x).view(batch, length, 2, 8).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.causal)
        return (x + self.o(y.transpose(1, 2).reshape(batch, length, 16)))[:, 0]


ALL, ONE = [2, 24, 16], [2, 1, 16]


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (Attention(), [ALL, ALL, ONE, ONE]),
        (Attention(mask=torch.randn(24, 24)), [ALL, ALL, ONE, ONE]),
        (Attention(mask=torch.randn(2, 1, 1, 24) > 0), [ALL, ALL, ONE, ONE]),
        (Attention(merged=True), [ALL, ONE]),
        # The first query sees one key, and the operator's diagonal would begin at the first of fewer.
        (Attention(causal=True), [ALL, ALL, ALL, ONE]),
    ],
)
def test_queries_of_attention(model: nn.Module, rows: list[list[int]]) -> None:
    assert sorted(rows_of_linears(model, torch.randn(2, 24, 16))) == sorted(rows)


def test_queries_that_are_keys_stay() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.o(nn.functional.scaled_dot_product_attention(x, x, x))[:, 0]
            return y

    assert rows_of_linears(Model(), torch.randn(2, 24, 16)) == [ONE]


def test_attention_over_batches_that_vary() -> None:
    with torch.no_grad():
        model = Attention().eval()
        module = unlift(model, torch.randn(2, 24, 16), dynamic={"x": {0: Dim("batch")}})
        assert select_rows_early(module).changed == ["select"]
        close(module)
        assert sum(rows[1] == 1 for rows in linears(module)) == 2
        for batch in (1, 5):
            x = torch.randn(batch, 24, 16)
            assert_same(module(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@pytest.mark.parametrize(("tokens", "early"), [(64, True), (16, False)])
def test_prefill_of_a_language_model(kind: str, tokens: int, early: bool) -> None:
    """Of many tokens, the last layer's output projection and MLP compute those whose logits are wanted."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "qwen3":
        config = transformers.Qwen3Config(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, vocab_size=64,
        )  # fmt: skip
        model = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
    method = step_method(Step(model.eval()), tokens)
    with torch.no_grad():
        args = method["args"]
        module = torch.export.export(method["model"], args, dynamic_shapes=method["dynamic_shapes"]).module()
        copied = [arg.clone() for arg in args]
        expected = module(*copied)
        drop_inference_dropout(module)  # type: ignore[arg-type]
        drop_dead_code(module)  # type: ignore[arg-type]
        report = select_rows_early(module)  # type: ignore[arg-type]
        close(module)  # type: ignore[arg-type]
        assert report.changed == (["index"] if early else [])
        assert_same(module(*args), expected, rtol=1e-4, atol=1e-5)
        assert_same(args[7], copied[7])
    selected = [node.args[0].name for node in module.graph.nodes if "index.Tensor" in str(node.target)]
    assert ("paged_attention_1" in selected) == early


def test_in_a_file(tmp_path: Path) -> None:
    model, x = Mlp(lambda x: x[:, 0]).eval(), torch.randn(2, 24, 16)
    (got,), report = exported(model, (x,), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-5)
    (done,) = (entry for entry in report.passes if entry.name == "select_rows_early")
    assert done.changed == ["select"]
