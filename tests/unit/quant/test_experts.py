"""``quantize_experts`` on modules of transformers' form; tests/conformance/test_nvfp4.py has a whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from untorch.quant import NVFP4Experts, quantize, quantize_experts
from untorch.quant.quantizer import Quantizer
from untorch.runtime.errors import InvalidArgumentError


class Experts(nn.Module):
    """As Qwen3MoeExperts: one token after the other."""

    def __init__(self, e: int = 4, k: int = 32, width: int = 48) -> None:
        super().__init__()
        self.num_experts = e
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * width, k) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(e, k, width) * 0.2)
        self.act_fn: nn.Module = nn.SiLU()

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = []
        for m in range(x.shape[0]):
            total = torch.zeros_like(x[m])
            for e, weight in zip(index[m].tolist(), weights[m], strict=True):
                if e < self.num_experts:
                    gate, up = (self.gate_up_proj[e] @ x[m]).chunk(2)
                    total = total + weight * (self.down_proj[e] @ (F.silu(gate) * up))
            rows.append(total)
        return torch.stack(rows)


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


@pytest.mark.parametrize("method", ["search", "rtn"])
def test_the_weights_that_it_says(method: str) -> None:
    torch.manual_seed(0)
    block, plain = Block(Experts()), Experts()
    before = {name: p.detach().clone() for name, p in block.experts.named_parameters()}
    [report] = quantize_experts(block, method=method)
    made = block.experts
    assert isinstance(made, NVFP4Experts) and report.name == "experts"
    assert report.nbytes_before == sum(p.numel() * 4 for p in before.values())
    assert report.nbytes_after == made.moe.weight_nbytes < 0.16 * report.nbytes_before
    assert 0 < report.error_gate_up < 0.12 and 0 < report.error_down < 0.12
    # An index of num_experts is an expert elsewhere.
    x, index, weights = torch.randn(6, 32), torch.randint(0, 5, (6, 2)), torch.rand(6, 2)
    plain.load_state_dict(before)
    with torch.no_grad():
        got, want = made(x, index, weights), plain(x, index, weights)
    assert 0 < float((got - want).norm() / want.norm()) < 0.25
    # With the weights that it says it multiplies with, the plain module gives the same.
    rounded = dict(zip(("gate_up_proj", "down_proj"), made.dequantize(), strict=True))
    for name, weight in rounded.items():
        error = float((weight - before[name]).norm() / before[name].norm())
        assert error == pytest.approx(report.error_gate_up if name == "gate_up_proj" else report.error_down, rel=1e-3)
    plain.load_state_dict(rounded)
    with torch.no_grad():
        torch.testing.assert_close(got, plain(x, index, weights), rtol=1e-4, atol=1e-5)
    assert {weight.dtype for weight in made.dequantize(torch.bfloat16)} == {torch.bfloat16}


def test_search_is_no_worse() -> None:
    torch.manual_seed(1)
    experts = Experts()
    found = {}
    for method in ("search", "rtn"):
        copy = Experts()
        copy.load_state_dict(experts.state_dict())
        [found[method]] = quantize_experts(Block(copy), method=method)
    assert found["search"].error_gate_up < found["rtn"].error_gate_up
    assert found["search"].error_down < found["rtn"].error_down


def with_bias() -> Experts:
    experts = Experts()
    experts.down_proj_bias = nn.Parameter(torch.zeros(4, 32))
    return experts


class GptOssExperts(nn.Module):
    """As transformers' module of that name: transposed, gate and up by turns, with biases."""

    def __init__(self, e: int = 4, k: int = 32, width: int = 48, limit: float = 0.7) -> None:
        super().__init__()
        self.num_experts, self.alpha, self.limit = e, 1.702, limit
        self.gate_up_proj = nn.Parameter(torch.randn(e, k, 2 * width) * 0.2)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(e, 2 * width))
        self.down_proj = nn.Parameter(torch.randn(e, width, k) * 0.2)
        self.down_proj_bias = nn.Parameter(torch.randn(e, k))

    def split(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gate_up[..., ::2], gate_up[..., 1::2]

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = self.split(gate_up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for m, j in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(index.shape[1])).tolist():
            if (e := int(index[m, j])) < self.num_experts:
                act = self._apply_gate(x[m] @ self.gate_up_proj[e] + self.gate_up_proj_bias[e])
                y[m] += weights[m, j] * (act @ self.down_proj[e] + self.down_proj_bias[e])
        return y


class Concatenated(GptOssExperts):
    """As OpenAIPrivacyFilterExperts: the gate's columns before those of up."""

    def split(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gate_up.chunk(2, -1)


class Plain(Experts):
    """As transformers' modules without a gate of their own: it is ``act_fn(gate) * up``."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up


class Limited(Plain):
    """As DeepseekV4Experts: SiLU with a limit."""

    limit = 0.8

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return super()._apply_gate(torch.cat((gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)), -1))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for j in range(index.shape[1]):
            for m, e in enumerate(index[:, j].tolist()):
                y[m] += weights[m, j] * (self.down_proj[e] @ self._apply_gate(self.gate_up_proj[e] @ x[m]))
        return y


class OtherGate(GptOssExperts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super()._apply_gate(gate_up) * 1.001


class FailingGate(GptOssExperts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"not for {gate_up.dtype}")


def changed(experts: nn.Module, **fields: object) -> nn.Module:
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            value = nn.Parameter(value)
        setattr(experts, name, value)
    return experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [GptOssExperts, Concatenated])
def test_gpt_oss(kind: type[GptOssExperts], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = Block(kind().to(dtype))
    plain = block.experts
    [report] = quantize_experts(block)
    made = block.experts
    assert isinstance(made, NVFP4Experts)
    moe = made.moe
    assert (moe.hidden_size, moe.intermediate_size, moe.num_experts) == (32, 48, 4)
    assert (moe.swiglu_alpha, moe.swiglu_beta, moe.swiglu_limit) == (1.702, 1.0, 0.7)
    gate, up = plain.split(plain.gate_up_proj_bias.detach().float())
    assert torch.equal(moe.w13_bias, torch.cat((gate, up), -1))
    assert torch.equal(moe.w2_bias, plain.down_proj_bias.detach().float())
    assert report.nbytes_before == (plain.gate_up_proj.numel() + plain.down_proj.numel()) * dtype.itemsize
    assert report.nbytes_after == moe.weight_nbytes == 4 * (3 * 32 * 48 * 9 // 16 + 3 * 4)
    assert 0 < report.error_gate_up < 0.12 and 0 < report.error_down < 0.12
    x, index, weights = torch.randn(6, 32).to(dtype), torch.randint(0, 5, (6, 2)), torch.rand(6, 2).to(dtype)
    with torch.no_grad():
        got, want = made(x, index, weights), plain(x, index, weights)
    assert got.dtype == dtype
    assert 0 < float((got - want).float().norm() / want.float().norm()) < 0.1


def test_a_limit_on_silu() -> None:
    torch.manual_seed(0)
    block = Block(Limited())
    plain = block.experts
    quantize_experts(block)
    moe = block.experts.moe
    assert (moe.swiglu_alpha, moe.swiglu_beta, moe.swiglu_limit) == (1.0, 0.0, 0.8)
    assert moe.w13_bias is None and moe.w2_bias is None
    x, index, weights = torch.randn(6, 32) * 2, torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    with torch.no_grad():
        got, want = block.experts(x, index, weights), plain(x, index, weights)
    assert 0 < float((got - want).norm() / want.norm()) < 0.3


@pytest.mark.parametrize(("k", "width"), [(32, 32), (64, 32), (32, 64)])
@pytest.mark.parametrize("kind", [Experts, GptOssExperts])
def test_sizes_that_look_alike_transposed(kind: type[nn.Module], k: int, width: int) -> None:
    torch.manual_seed(0)
    block = Block(kind(k=k, width=width))
    plain = block.experts
    quantize_experts(block)
    assert (block.experts.moe.hidden_size, block.experts.moe.intermediate_size) == (k, width)
    x, index, weights = torch.randn(6, k), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    with torch.no_grad():
        got, want = block.experts(x, index, weights), plain(x, index, weights)
    assert 0 < float((got - want).norm() / want.norm()) < 0.25


def test_the_quantised_biases_are_copies() -> None:
    for kind in (GptOssExperts, Concatenated):
        block = Block(kind())
        biases = block.experts.gate_up_proj_bias, block.experts.down_proj_bias
        quantize_experts(block)
        copies = block.experts.moe.w13_bias, block.experts.moe.w2_bias
        assert {t.untyped_storage().data_ptr() for t in biases}.isdisjoint(
            t.untyped_storage().data_ptr() for t in copies
        )


def test_converted_gpt_oss_keeps_its_biases() -> None:
    block = Block(GptOssExperts())
    quantize_experts(block)
    before = block.experts.moe.w13_bias.clone()
    block.to(torch.bfloat16)
    assert torch.equal(block.experts.moe.w13_bias, before) and block.experts.moe.w13_bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: changed(GptOssExperts(), down_proj=torch.zeros(4, 32, 48)),
            r"expected gate_up_proj \[E, 2·I, K\] and down_proj \[E, K, I\], or \[E, K, 2·I\] and \[E, I, K\], got "
            r"\[4, 32, 96\] and \[4, 32, 48\]",
        ),
        (
            lambda: changed(GptOssExperts(), gate_up_proj=torch.zeros(4, 32, 95)),
            r"expected gate_up_proj \[E, 2·I, K\] .* got \[4, 32, 95\]",
        ),
        (lambda: GptOssExperts(k=40), "expected K and I to be multiples of 16, got K = 40 and I = 48"),
        (lambda: GptOssExperts(width=24), "expected K and I to be multiples of 16, got K = 32 and I = 24"),
        (
            lambda: changed(GptOssExperts(), down_proj_bias=torch.zeros(4, 16)),
            r"expected biases \[4, 96\] and \[4, 32\], got \[4, 96\] and \[4, 16\]",
        ),
        (
            OtherGate,
            r"expected experts of two GEMMs, with both biases or none and with SiLU or gpt-oss's activation between, "
            r"got OtherGate with act_fn NoneType and gate_up_proj_bias, down_proj_bias",
        ),
        (FailingGate, "got FailingGate with"),
        (lambda: changed(Plain(), act_fn=nn.GELU()), "got Plain with act_fn GELU"),
        (lambda: changed(GptOssExperts(), _apply_gate=None), "got GptOssExperts with act_fn NoneType"),
        (lambda: changed(GptOssExperts(), scale=torch.zeros(4)), "down_proj_bias, scale"),
    ],
)
def test_gpt_oss_refused(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="^quantize_experts: experts: .*" + text):
        quantize_experts(Block(make()))


def test_quantize_takes_gpt_oss_too() -> None:
    torch.manual_seed(0)
    experts = GptOssExperts()
    before = experts.gate_up_proj.numel() * 4
    model = Model(experts)
    report = quantize(model, "nvfp4", progress=False)
    assert isinstance(model.experts, NVFP4Experts) and model.again[0] is model.experts
    _, gate_up, down = report.layers
    assert gate_up.names == ("experts.gate_up_proj", "again.0.gate_up_proj")
    assert (gate_up.shape, down.shape) == ((4 * 96, 32), (4 * 32, 48))
    assert gate_up.nbytes_before == before
    broken = GptOssExperts()
    with torch.no_grad():
        broken.down_proj_bias[1, 2] = float("nan")
    with pytest.raises(InvalidArgumentError, match="experts: its down_proj_bias has values that are not finite"):
        quantize(Block(broken), "nvfp4", progress=False)


def test_experts_that_share_weights_but_nothing_else() -> None:
    """Or another limit: they are not the same experts."""
    quantizer = Quantizer("nvfp4")
    experts = [GptOssExperts(), GptOssExperts(), GptOssExperts(limit=0.6), GptOssExperts()]
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    for other in experts[1:]:
        for name in names:
            setattr(other, name, getattr(experts[0], name))
    experts[3].down_proj_bias = nn.Parameter(experts[0].down_proj_bias.detach() + 1)
    blocks = [Block(each) for each in experts]
    for block in blocks:
        quantizer.apply(block)
    first, same, limited, biased = (block.experts for block in blocks)
    assert same is first and limited is not first and biased is not first
    assert limited.moe.swiglu_limit == 0.6
    assert torch.equal(biased.moe.w2_bias, first.moe.w2_bias + 1)


def with_gelu() -> Experts:
    experts = Experts()
    experts.act_fn = nn.GELU()
    return experts


def mismatched() -> Experts:
    experts = Experts()
    experts.down_proj = nn.Parameter(torch.zeros(4, 16, 32))
    return experts


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Block(nn.Linear(2, 2)), "module: it has no experts with gate_up_proj and down_proj"),
        (Experts, "module: experts cannot be replaced in place: give what has them"),
        (lambda: Block(with_bias()), "experts: expected experts of two GEMMs, .* got Experts .* and down_proj_bias"),
        (lambda: Block(with_gelu()), "experts: expected .* activation between, got Experts with act_fn GELU"),
        (lambda: Block(mismatched()), r"expected gate_up_proj \[E, 2·I, K\] .* got \[4, 96, 32\] and \[4, 16, 32\]"),
        (lambda: Block(Experts(k=24)), "expected K and I to be multiples of 16, got K = 24 and I = 48"),
    ],
)
def test_refused(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="quantize_experts: .*" + text):
        quantize_experts(make())


def test_an_unknown_method() -> None:
    with pytest.raises(InvalidArgumentError, match="quantize_experts: method: expected one of .* got 'hqq'"):
        quantize_experts(Block(Experts()), method="hqq")


class Model(nn.Module):
    """Linear layers and experts, one of them twice."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first, self.experts, self.again = nn.Linear(32, 32), experts, nn.ModuleList([experts])


def test_quantize_takes_experts_too() -> None:
    torch.manual_seed(0)
    model, alone = Model(Experts()), Block(Experts())
    alone.experts.load_state_dict(model.experts.state_dict())
    report = quantize(model, "nvfp4", progress=False)
    [expected] = quantize_experts(alone)
    assert isinstance(model.experts, NVFP4Experts) and model.again[0] is model.experts
    for name, tensor in model.experts.named_buffers():
        assert torch.equal(tensor.view(torch.uint8), alone.experts.get_buffer(name).view(torch.uint8))
    linear, gate_up, down = report.layers
    assert linear.names == ("first",)
    assert gate_up.names == ("experts.gate_up_proj", "again.0.gate_up_proj")
    assert (gate_up.shape, down.shape) == ((4 * 96, 32), (4 * 32, 48))
    assert (gate_up.error, down.error) == (expected.error_gate_up, expected.error_down)
    assert gate_up.nbytes_before + down.nbytes_before == expected.nbytes_before
    assert gate_up.nbytes_after + down.nbytes_after == expected.nbytes_after
    assert (gate_up.dtype, gate_up.group_size, gate_up.method) == ("float32", 16, "search")
    assert "experts.gate_up_proj  384 × 32" in str(report)


def test_experts_that_quantize_leaves_alone() -> None:
    reasons = {}
    for name, model, dtype, options in (
        ("int8", Model(Experts()), "int8", {}),
        ("kind", Model(with_gelu()), "nvfp4", {}),
        ("include", Model(Experts()), "nvfp4", {"include": "first"}),
        ("exclude", Model(Experts()), "nvfp4", {"exclude": "exp*"}),
    ):
        reasons[name] = quantize(model, dtype, progress=False, **options).skipped["experts"]
        assert isinstance(model.experts, Experts)
    assert reasons["int8"] == "experts stay in floating point: only int4 and nvfp4 have GEMMs for them"
    assert reasons["kind"].startswith("expected experts of two GEMMs, with both biases or none and with SiLU")
    assert (reasons["include"], reasons["exclude"]) == ("not in include", "in exclude")
    model = Model(Experts())
    report = quantize(model, "nvfp4", include="*experts*", method="rtn", progress=False)
    assert isinstance(model.first, nn.Linear) and report.skipped == {"first": "not in include"}
    with pytest.raises(InvalidArgumentError, match="experts cannot be replaced in place: give what has them"):
        quantize(Experts(), "nvfp4", progress=False)
    broken = Experts()
    with torch.no_grad():
        broken.down_proj[1, 2, 3] = float("inf")
    with pytest.raises(InvalidArgumentError, match="experts: its down_proj has values that are not finite"):
        quantize(Block(broken), "nvfp4", progress=False)


def test_methods_that_share_experts_share_the_quantised_ones() -> None:
    experts = Experts()
    quantizer = Quantizer("nvfp4")
    first, second = Block(experts), Block(Experts())
    second.experts.gate_up_proj, second.experts.down_proj = experts.gate_up_proj, experts.down_proj
    for block in (first, second):
        quantizer.apply(block)
    assert first.experts is second.experts


def test_prefill_is_for_linear_layers_alone() -> None:
    report = quantize(Model(Experts()), "nvfp4", method="rtn", prefill="fp8", progress=False)
    assert {layer.names[0]: layer.prefill for layer in report.layers} == {
        "first": "fp8", "experts.gate_up_proj": "exact", "experts.down_proj": "exact",
    }  # fmt: skip
