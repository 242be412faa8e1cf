"""Tests of fuse_decoder_linears: which layers become one operator, values, and why others stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_graphs import close, targets, unlift
from torch import fx, nn
from torch.export import Dim
from torch.utils._pytree import tree_map

from untorch.export.options import ExportOptions
from untorch.export.passes import PassReport, run_passes
from untorch.export.passes.calls import arguments_of
from untorch.export.passes.fold_constants import fold_constants
from untorch.export.passes.fuse_decoder_linears import fuse_decoder_linears
from untorch.export.passes.merge_linears import merge_linears
from untorch.export.passes.table import PASSES
from untorch.ops.decoder_linears import OPERATOR
from untorch.quant import quantize

BF16, F16 = torch.bfloat16, torch.float16
WIDTH, HEADS, INNER = 256, 512, 256
TOLERANCE = {BF16: 3e-2, F16: 4e-3}
Tensors = tuple[torch.Tensor, ...]


class LlamaNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GemmaNorm(LlamaNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class RootNorm(LlamaNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight.float()).to(x.dtype)


class LayerNormLike(LlamaNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() + x.float().mean(-1, keepdim=True) * -1.0
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Decoder(nn.Module):
    """From one attention's result to the next one's q, k and v, and the residual stream."""

    def __init__(
        self, norm: Callable[..., nn.Module] = LlamaNorm, width: int = WIDTH, heads: int = HEADS, inner: int = INNER,
        bias: bool = False, kv: int = 128,
    ) -> None:  # fmt: skip
        super().__init__()
        self.o = nn.Linear(heads, width, bias=False)
        self.norm, self.next_norm = norm(width, eps=1e-3), norm(width, eps=1e-5)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.q, self.k, self.v = (nn.Linear(width, n, bias=bias) for n in (heads, kv, kv))

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.gated(x))
        return y

    def layers(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = residual + self.o(x)
        return hidden + self.mlp(self.norm(hidden))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        stream = self.layers(x, residual)
        z = self.next_norm(stream)
        return (self.q(z) + 1, torch.cat([self.k(z), self.v(z)], -1), stream)


def given(model: nn.Module, dtype: torch.dtype = BF16, lead: tuple[int, ...] = (1, 5)) -> Tensors:
    torch.manual_seed(0)
    heads, width = (model.o.in_features, model.o.out_features) if hasattr(model, "o") else (HEADS, WIDTH)
    return torch.randn(*lead, heads).to(dtype), torch.randn(*lead, width).to(dtype)


def fused(
    model: nn.Module, dtype: torch.dtype = BF16, lead: tuple[int, ...] = (1, 5), dynamic: tuple[int, ...] = (1,),
    merges: bool = True,
) -> tuple[fx.GraphModule, PassReport]:  # fmt: skip
    """The graph behind the pass, whose results are those before it."""
    torch.manual_seed(1)
    args = given(model, dtype, lead)
    dims = {d: Dim(f"d{d}", min=2, max=64) for d in dynamic}
    module = unlift(model.to(dtype), *args, dynamic=(dims, dims))
    fold_constants(module, 1 << 20)
    if merges:
        merge_linears(module)
    close(module)
    other = [torch.cat([x, x[:, :2] * 3], 1) if 1 in dynamic else x for x in args]
    with torch.no_grad():
        before = [module(*x) for x in (args, other)]
        report = fuse_decoder_linears(module, "sm_90", dense=True)
        close(module)
        after = [module(*x) for x in (args, other)]
    for results, expected in zip(after, before, strict=True):
        for a, b in zip(results, expected, strict=True):
            size = float(b.abs().max())
            torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * size)
    return module, report


def calls(module: fx.GraphModule) -> list[dict[str, Any]]:
    return [arguments_of(node) for node in module.graph.nodes if node.target == OPERATOR]


@pytest.mark.parametrize("norm", [LlamaNorm, RootNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_one_operator(norm: Callable[..., nn.Module], dtype: torch.dtype, bias: bool) -> None:
    module, report = fused(Decoder(norm, bias=bias), dtype)
    assert len(report.changed) == 1 and not report.skipped
    [call] = calls(module)
    assert (call["group_size"], call["eps"], call["next_eps"]) == (0, 1e-3, 1e-5)
    assert (call["next_bias"] is not None) == bias
    assert [str(call[f"{name}_weight"].target) for name in ("o", "down")] == ["o.weight", "down.weight"]
    assert call["gate_up_weight"].meta["val"].shape == (2 * INNER, WIDTH)
    assert call["next_weight"].meta["val"].shape == (HEADS + 256, WIDTH)
    assert all(call[name].meta["val"].shape == (WIDTH,) for name in ("norm", "next_norm"))
    assert not {"linear", "silu", "pow.Tensor_Scalar", "rsqrt", "rms_norm", "mul.Tensor"}.intersection(targets(module))


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_int4(group: int) -> None:
    model = Decoder().to(BF16)
    quantize(model, dtype="int4", method="rtn", group_size=group)
    module, report = fused(model)
    assert len(report.changed) == 1, report
    [call] = calls(module)
    assert (
        call["group_size"] == group and call["next_scales"] is not None and "untorch.int4_linear" not in targets(module)
    )
    # The module has what the operator reads, and nothing else.
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    assert {name for name, _ in (*module.named_parameters(), *module.named_buffers())} == read


@pytest.mark.parametrize(
    ("lead", "dynamic"), [((5,), ()), ((1, 5), ()), ((3, 5), (0,)), ((3, 5), (0, 1)), ((2, 3, 5), (0, 1))]
)
def test_any_shape_of_tokens(lead: tuple[int, ...], dynamic: tuple[int, ...]) -> None:
    module, report = fused(Decoder(), lead=lead, dynamic=dynamic)
    assert len(report.changed) == 1 and len(calls(module)) == 1


def test_the_norm_of_gemma_where_its_weight_has_the_dtype() -> None:
    """1 + weight is folded to float32; the operator's is of the activations' dtype."""
    model = Decoder(GemmaNorm)
    for norm in (model.norm, model.next_norm):
        norm.weight.data = (norm.weight.data * 8).round() / 8
    module, report = fused(model)
    assert len(report.changed) == 1
    assert calls(module)[0]["norm"].meta["val"].dtype == BF16
    _, report = fused(Decoder(GemmaNorm))
    [reason] = report.skipped.values()
    assert reason.endswith("the weight of a norm, has digits that the activations' dtype has not")


class Twice(nn.Module):
    """Two layers, an attention that is not looked into, and a last norm of which rows are taken."""

    def __init__(self, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = Decoder(), second or Decoder()
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        q, kv, stream = self.first(x, residual)
        attended = torch.tanh(q) * torch.cat([kv, kv], -1)
        stream = self.second.layers(attended, stream)
        z = self.second.next_norm(stream)
        return (self.head(z[:, torch.tensor([0, 2])]),)


@pytest.mark.slow
def test_layers_behind_each_other_and_the_last_norm() -> None:
    module, report = fused(Twice())
    assert len(report.changed) == 2 and not report.skipped
    first, second = calls(module)
    assert first["next_weight"] is not None and second["next_weight"] is None
    assert second["next_eps"] == 1e-5
    assert targets(module).count("linear") == 1


@pytest.mark.slow
def test_layers_that_differ() -> None:
    """What was found of one layer is not said of another."""
    module, report = fused(Twice(Gelu()))
    assert len(report.changed) == len(calls(module)) == 1
    assert "its input is not silu(gate) · up" in report.skipped.values()
    second = Decoder()
    second.norm.eps, second.next_norm.eps = 2e-3, 2e-5
    module, _ = fused(Twice(second))
    assert [call["eps"] for call in calls(module)] == [1e-3, 2e-3]
    module, report = fused(Twice(Decoder(LayerNormLike)))
    assert len(report.changed) == 1
    assert any(reason.endswith("not the values of an RMSNorm") for reason in report.skipped.values())


def test_readers_of_the_second_norm() -> None:
    """q, k and v that are apart, and an adapter of q: the operator ends with the norm."""

    class Adapted(Merged):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
            stream = self.layers(x, residual)
            z = self.next_norm(stream)
            return self.q(z), self.k(z) + F.linear(z, self.v.weight * 2), stream

    for model in (Merged(), Adapted()):
        module, report = fused(model, merges=False)
        assert len(report.changed) == 1
        assert calls(module)[0]["next_weight"] is None and targets(module).count("linear") == 3


class Merged(Decoder):
    """Gate and up in one layer, as Phi-3 has them."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.gate_up = nn.Linear(self.gate.in_features, 2 * self.gate.out_features, bias=False)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return up * F.silu(gate)


class UpFirst(Merged):
    def gated(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up(x).chunk(2, -1)
        return up * F.silu(gate)


class Sigmoid(Merged):
    """silu by its definition."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).split(self.gate.out_features, -1)
        return gate * torch.sigmoid(gate) * up


class Gelu(Decoder):
    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.gate(x), approximate="tanh") * self.up(x)


class Clamped(Decoder):
    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)).clamp(max=50) * self.up(x)


class Scaled(Decoder):
    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return super().mlp(x) * 0.5


class PostNorm(Decoder):
    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.next_norm(super().mlp(x))
        return y


class Routed(Decoder):
    """Something else reads the first norm, as a router does."""

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return super().mlp(x) + 0 * x.sum(-1, keepdim=True)

    def layers(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = residual + self.o(x)
        z = self.norm(hidden)
        return hidden + Decoder.mlp(self, z) * z.sigmoid()


class Kept(Decoder):
    """Results between are results of the model."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        hidden = residual + self.o(x)
        stream = hidden + self.mlp(self.norm(hidden))
        z = self.next_norm(stream)
        return self.q(z), stream, hidden


class KeptGate(Merged):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        hidden = residual + self.o(x)
        both = self.gate_up(self.norm(hidden))
        gate, up = both.chunk(2, -1)
        stream = hidden + self.down(F.silu(gate) * up)
        z = self.next_norm(stream)
        return self.q(z), stream, both * 2


class Adapter(Decoder):
    """LoRA of the down projection."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INNER, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gated(x)
        return self.down(y) + self.b(self.a(y))


class NoAttention(Decoder):
    """A residual stream that is no sum."""

    def layers(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = residual * 2
        return hidden + self.mlp(self.norm(hidden)) + 0 * self.o(x)


class Transposed(Decoder):
    """A GEMM with the columns of a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(INNER, WIDTH) / 16)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.gated(x) @ self.columns


def biased(name: str) -> Decoder:
    model = Decoder()
    setattr(model, name, nn.Linear(getattr(model, name).in_features, WIDTH, bias=True))
    return model


@pytest.mark.parametrize("kind", [Merged, Sigmoid])
def test_spellings_of_the_activation(kind: type[Decoder]) -> None:
    module, report = fused(kind())
    assert len(report.changed) == len(calls(module)) == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Decoder(LayerNormLike), "{}: what follows it are not the values of an RMSNorm"),
        (UpFirst, "the rows of the up projection come before those of the gate"),
        (Gelu, "its input is not silu(gate) · up"),
        (Clamped, "clamp is no part of a SwiGLU"),
        (Scaled, "what follows {} is no residual sum: {}"),
        (PostNorm, "what follows {} is no residual sum: {}"),
        (Routed, "what follows {} is no residual sum: {}"),
        (Kept, "{} is also read by {}"),
        (KeptGate, "{}, between gate, up and down, is also read by something else"),
        (Adapter, "{} is read by {} nodes, expected a residual sum alone"),
        (NoAttention, "what it adds to is no sum of a residual stream and one linear layer"),
        (
            Transposed,
            "down: it is a GEMM with columns of a constant, no int4 layer and none with a dense weight [n, k]",
        ),
        (lambda: biased("o"), "o: it has a bias"),
        (lambda: biased("down"), "down: it has a bias"),
        (
            lambda: Decoder(width=128),
            "gate and up: it has 128 inputs and 512 outputs: expected multiples of 256 and 16",
        ),
        (lambda: Decoder(inner=264), "down: it has 264 inputs and 256 outputs: expected multiples of 256 and 16"),
    ],
)
def test_what_stays(make: Callable[[], nn.Module], text: str) -> None:
    module, report = fused(make())
    assert not report.changed and not calls(module)
    [reason] = report.skipped.values()
    assert re.fullmatch(re.escape(text).replace(r"\{\}", r"\S+"), reason), reason


def test_dense_layers_stay_by_default() -> None:
    module = unlift(Decoder().to(BF16), *given(Decoder()))
    merge_linears(module)
    report = fuse_decoder_linears(module, "sm_90")
    [reason] = report.skipped.values()
    assert reason == "o: its weight is dense: its GEMV reads at the memory's speed by itself" and not calls(module)


def test_other_dtypes_stay() -> None:
    module = unlift(Decoder(), *given(Decoder(), torch.float32))
    merge_linears(module)
    [reason] = fuse_decoder_linears(module, "sm_90", dense=True).skipped.values()
    assert reason == "its dtype is float32: expected bfloat16 or float16"


def test_layers_of_several_kinds_stay() -> None:
    model = Decoder().to(BF16)
    quantize(model, dtype="int4", method="rtn", group_size=64, include=["gate", "up", "q", "k", "v"])
    _, report = fused(model)
    assert list(report.skipped.values()) == ["gate and up: its weight is int4, and that of o is linear"]
    model = Decoder().to(BF16)
    quantize(model, dtype="int4", method="rtn", group_size=64, include=["o", "gate", "up", "down"])
    module, report = fused(model)
    assert len(report.changed) == 1 and calls(module)[0]["next_weight"] is None
    assert list(report.skipped.values()) == ["it stays apart: its weight is linear, and that of o is int4"]


def test_a_weight_that_the_model_writes() -> None:
    class Writing(Decoder):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
            result = super().forward(x, residual)
            self.down.weight.add_(1)
            return result

    model = Writing().to(BF16).requires_grad_(False)
    module = unlift(model, *given(model))
    merge_linears(module)
    [reason] = fuse_decoder_linears(module, "sm_90", dense=True).skipped.values()
    assert reason == "down: its weight is no constant"


@pytest.mark.parametrize("architecture", [None, "sm_80", "sm_89"])
def test_gpus_without_the_kernel(architecture: str | None) -> None:
    module = unlift(Decoder().to(BF16), *given(Decoder()))
    report = fuse_decoder_linears(module, architecture, dense=True)
    assert report.not_run == f"it is for sm_90 and newer, and the method is for {architecture}"
    assert not calls(module)


def test_in_its_place() -> None:
    names = [entry.name for entry in PASSES]
    [entry] = [entry for entry in PASSES if entry.name == "fuse_decoder_linears"]
    assert entry.devices == ("cuda",) and entry.default is True
    assert names.index("fuse_rope_cache") < names.index("merge_linears") == names.index(entry.name) - 1
    model = Decoder().to(BF16)
    quantize(model, dtype="int4", method="rtn", group_size=64)
    module = unlift(model, *given(model))
    reports = run_passes(module, ExportOptions(), "cuda", architecture="sm_90a")
    assert [len(report.changed) for report in reports if report.name == entry.name] == [1]
    assert len(calls(module)) == 1
    module = unlift(model, *given(model))
    run_passes(module, ExportOptions(passes={entry.name: False}), "cuda", architecture="sm_90")
    assert not calls(module)


def step(name: str, int4: bool, **sizes: Any) -> tuple[fx.GraphModule, PassReport, int]:
    """A model as causal_lm traces it: the graph behind the passes, which gives the logits and pages that it gave."""
    from tests.conformance.language_models import make_model
    from untorch.export.lm.step import Step
    from untorch.export.lm.step_methods import step_method

    model = make_model(name, hidden_size=WIDTH, intermediate_size=INNER, **sizes).to(BF16)
    if int4:
        quantize(model, dtype="int4", method="rtn", group_size=32)
    of_step = step_method(Step(model, 16), 12)
    with torch.no_grad():
        module: Any = torch.export.export(
            of_step["model"], of_step["args"], dynamic_shapes=of_step["dynamic_shapes"], strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        ).module()  # fmt: skip
        first, second = (tree_map(torch.clone, of_step["args"]) for _ in range(2))
        run_passes(module, ExportOptions(passes={"fuse_decoder_linears": False}), "cuda", architecture="sm_90")
        expected = module(*first)
        report = fuse_decoder_linears(module, "sm_90", dense=True)
        close(module)
        found = module(*second)
    for a, b in ((found, expected), (second[7], first[7])):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * float(b.abs().max()))
    return module, report, len(model.model.layers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3"])
def test_layers_of_models(name: str, int4: bool) -> None:
    pytest.importorskip("triton")
    module, report, layers = step(name, int4, **({"head_dim": 64} if name == "Qwen3" else {}))
    found = calls(module)
    assert len(found) == len(report.changed) == layers > 1 and not report.skipped
    assert [call["next_weight"] is None for call in found] == [False] * (layers - 1) + [True]
    assert all((call["next_bias"] is not None) == (name == "Qwen2") for call in found[:-1])
    assert all(call["group_size"] == (32 if int4 else 0) for call in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Gemma2", "Qwen3Moe", "Olmo2"])
def test_models_that_stay(name: str) -> None:
    pytest.importorskip("triton")
    sizes: dict[str, Any] = {"head_dim": 64} if name in ("Gemma2", "Qwen3Moe") else {}
    module, report, _ = step(name, False, **sizes)
    assert not calls(module) and not report.changed
    assert bool(report.skipped) == (name in ("Gemma2", "Olmo2"))
