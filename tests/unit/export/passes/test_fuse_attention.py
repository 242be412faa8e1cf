"""Tests of fuse_attention: ways to write attention, what stays and why; results are those of eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import fx, nn
from torch.export import Dim

from untorch.export.options import ExportOptions
from untorch.export.passes import PassReport, run_passes
from untorch.export.passes.drop_dead_code import drop_dead_code
from untorch.export.passes.fuse_attention import fuse_attention

ATTENTION = "scaled_dot_product_attention"
B, H, L, S, D = 2, 3, 5, 7, 8
Function = Callable[..., torch.Tensor]


class Model(nn.Module):
    """``function`` of query, key and value [b, h, l, d], with a bias for each head and a mask of the first keys."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("bias", torch.randn(1, H, L, S, generator=generator))
        self.register_buffer("seen", torch.arange(S)[None] < torch.tensor([[4], [7]]))
        self.register_buffer("temperature", torch.rand(H, 1, 1, generator=generator) + 0.5)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.function(self, q, k, v)


def operands(*, dtype: torch.dtype = torch.float32, width: int = D) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(B, H, n, d, generator=generator) for n, d in ((L, D), (S, D), (S, width)))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def run(
    function: Function, args: tuple[torch.Tensor, ...] | None = None, dynamic: Any = None, **tolerance: float
) -> tuple[fx.GraphModule, PassReport]:
    """The graph behind the pass, whose results are the model's."""
    args = args or operands()
    model = Model(function)
    module = unlift(model, *args, dynamic=dynamic)
    report = fuse_attention(module)
    drop_dead_code(module)
    close(module)
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    got, expected = module(*args), model(*args)
    assert_same(got, expected, check_stride=False, **tolerance)
    return module, report


def plain(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), -1) @ v


def premultiplied(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    root = D**-0.25
    return F.dropout((q * root @ (k * root).mT).softmax(3), 0.3, training=False).matmul(v)


def permuted(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys = k.transpose(1, 2).permute(0, 2, 3, 1)
    scores = torch.matmul(q, keys) / torch.full([], 2.0, dtype=q.dtype, device=q.device)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2).contiguous()


def divided(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / torch.tensor(D**0.5)
    return torch.matmul(torch.where(m.seen[:, None, None], scores, torch.tensor(-math.inf)).softmax(-1), v)


def biased(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT + m.bias) * 0.25
    return (scores + torch.where(m.seen, 0.0, -1e4)[:, None, None]).softmax(-1) @ v


def filled(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT * 0.3).masked_fill(~m.seen[:, None, None], -math.inf)
    return scores.softmax(-1) @ v


def filled_and_biased(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = m.bias + q @ k.mT
    lowest = torch.finfo(scores.dtype).min
    return torch.where(m.seen[:, None, None], scores, lowest).softmax(-1) @ v


def twice_masked(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT).masked_fill(~m.seen[:, None, None], -math.inf)
    return torch.where(m.bias > -1, scores, -math.inf).softmax(-1) @ v


def batched(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).view(B, H, L, D)


def batched_and_masked(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.reshape(B * H, -1, D) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, L, S) + m.bias
    return torch.bmm(scores.view(B * H, L, S).softmax(-1), v)


def added_by_gemm(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.reshape(B * H, -1, D) for x in (q, k, v))
    bias = m.bias.expand(B, H, L, S).reshape(B * H, L, S)
    return torch.bmm(torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=0.25).softmax(-1), v)


def of_windows(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As in Swin: the mask is of windows, several batch entries of the scores each."""
    q, k, v = (torch.cat([x, x * 0.5]) for x in (q, k, v))
    scores = (q @ k.mT + m.bias).view(2, B, H, L, S)
    scores = scores + torch.where(m.seen, 0.0, -100.0)[None, :, None, None]
    return scores.view(2 * B, H, L, S).softmax(-1) @ v


def by_temperature(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * m.temperature
    return (scores + m.bias).softmax(-1) @ v


def of_five_dimensions(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (torch.stack([x, x + 1], 1) for x in (q, k, v))
    return (q @ k.mT + m.bias[:, None]).softmax(-1) @ v


def relative(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two GEMMs make the scores, as in Conformer; the bias is one of the first's."""
    places = (q * 0.5) @ m.bias[0, :, 0, :D, None].expand(B, H, -1, S)[:, :, :1].expand(B, H, D, S)
    return ((q @ k.mT + places) / 2).softmax(-1) @ v


def in_place(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    scores = scores.mul_(0.5).add_(m.bias)
    return scores.softmax(-1) @ v


def viewed(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A view follows that fails with other strides than the GEMM's."""
    return plain(m, q, k, v).view(B, H * L * D)


FUSED = [
    plain, premultiplied, permuted, divided, biased, filled, filled_and_biased, twice_masked, batched, batched_and_masked,
    added_by_gemm, of_windows, by_temperature, of_five_dimensions, relative, in_place, viewed,
]  # fmt: skip


@pytest.mark.parametrize("function", FUSED, ids=lambda f: f.__name__)
def test_ways_to_write_it(function: Function) -> None:
    module, report = run(function)
    assert len(report.changed) == 1
    assert not report.skipped
    after = targets(module)
    assert after.count(ATTENTION) == 1
    assert not [name for name in after if name.startswith("softmax") or name == "baddbmm"]


def test_scale_and_mask_become_arguments() -> None:
    module, _ = run(premultiplied)
    [node] = [node for node in module.graph.nodes if ATTENTION in str(node.target)]
    assert [str(argument) for argument in node.args] == ["q", "k", "v", "None", "0.0", "False"]
    assert node.kwargs["scale"] == pytest.approx(D**-0.5)
    module, _ = run(filled)
    [node] = [node for node in module.graph.nodes if ATTENTION in str(node.target)]
    assert node.args[3].meta["val"].dtype == torch.bool
    assert node.args[3].meta["val"].shape == (B, 1, 1, S)
    module, _ = run(of_windows)
    [node] = [node for node in module.graph.nodes if ATTENTION in str(node.target)]
    assert node.args[3].meta["val"].shape == (2 * B, H, L, S)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [plain, permuted, divided])
def test_half_types(dtype: torch.dtype, function: Function) -> None:
    """Also with a softmax in float32, as many models have it."""
    module, report = run(function, operands(dtype=dtype), rtol=2e-2, atol=2e-2)
    assert len(report.changed) == 1 and ATTENTION in str(targets(module))


def test_mixed_types_stay() -> None:
    def function(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).softmax(-1) @ v.bfloat16().float()

    assert len(run(function)[1].changed) == 1
    _, report = run(lambda m, q, k, v: (q @ k.mT).softmax(-1).bfloat16() @ v.bfloat16(), rtol=0, atol=0)
    assert list(report.skipped.values()) == [
        "it is in float32, bfloat16; the fused kernel is for float32, bfloat16 or float16 alone"
    ]


def test_sizes_that_vary() -> None:
    batch, queries, keys = Dim("batch"), Dim("queries"), Dim("keys")
    shapes = {"q": {0: batch, 2: queries}, "k": {0: batch, 2: keys}, "v": {0: batch, 2: keys}}
    _, report = run(plain, dynamic=shapes)
    assert len(report.changed) == 1

    def of_batches(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b = q.shape[0]
        flat = [x.reshape(b * H, -1, D) for x in (q, k, v)]
        scores = torch.bmm(flat[0], flat[1].transpose(1, 2)).view(b, H, q.shape[2], k.shape[2]) + k[:, :, None, :, 0]
        return torch.bmm(scores.view(b * H, q.shape[2], k.shape[2]).softmax(-1), flat[2])

    module, report = run(of_batches, dynamic=shapes)
    assert len(report.changed) == 1
    model = Model(of_batches)
    args = [torch.randn(3, H, n, D) for n in (2, 9, 9)]
    assert_same(module(*args), model(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, q, k, v: (q @ k.mT).softmax(-2) @ v, "the softmax is not over the last dimension"),
        (lambda m, q, k, v: (lambda s: (s.softmax(-1) @ v, s))(q @ k.mT), "the scores have another user"),
        (lambda m, q, k, v: (q @ k.mT).tanh().softmax(-1) @ v, "tanh stands between the GEMM and the softmax"),
        (lambda m, q, k, v: m.bias.softmax(-1) @ v, "the softmax is not of a GEMM"),
        (lambda m, q, k, v: k.transpose(2, 3)[:, :, :L].softmax(-1) @ v, "slice_1 stands between"),
        (lambda m, q, k, v: (q @ k.mT * m.bias).softmax(-1) @ v, "by a tensor that varies along the keys"),
        (lambda m, q, k, v: (q @ k.mT * 0).softmax(-1) @ v, "scales the scores by 0"),
        (lambda m, q, k, v: (q @ k.mT).masked_fill(m.bias > 0, -1e4).softmax(-1) @ v, "fills in -10000"),
        (lambda m, q, k, v: torch.where(m.bias > 0, q @ k.mT, m.bias).softmax(-1) @ v, "something else than a number"),
        (lambda m, q, k, v: (q @ k.mT + m.seen.long()[:, None, None]).softmax(-1) @ v, "something else than a mask"),
        (lambda m, q, k, v: (q @ k.mT).transpose(-2, -1).softmax(-1) @ q, "transpose stands between"),
        (lambda m, q, k, v: (q @ k.mT).view(B, H, S, L).softmax(-1).view(B, H, L, S) @ v, "changes the rows of the scores"),
        (lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v[..., :4], "keys and values differ in their size"),
        (lambda m, q, k, v: (q @ k[:1].mT).softmax(-1) @ v, "query and key are not batches of the same sizes"),
        (lambda m, q, k, v: (q @ k.mT).double().softmax(-1) @ v.double(), "does more than widen the scores"),
        (lambda m, q, k, v: ((q @ k.mT + m.bias.double()).float()).softmax(-1) @ v, "the mask"),
    ],
)  # fmt: skip
def test_what_stays(function: Function, reason: str) -> None:
    _, report = run(function)
    assert not report.changed
    [said] = report.skipped.values()
    assert reason in said


def test_multi_head_attention_whose_weights_nothing_reads() -> None:
    """It computes their mean over the heads."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.attention(x, x, x, attn_mask=mask)[0]
            return result

    model, args = Layer().eval().requires_grad_(False), (torch.randn(2, 5, 16), torch.randn(5, 5))
    module = unlift(model, *args)
    assert len(fuse_attention(module).changed) == 1
    close(module)
    assert_same(module(*args), model(*args), rtol=1e-5, atol=1e-6)
    assert "mean.dim" not in targets(module)


def test_probabilities_that_are_returned_stay() -> None:
    module, report = run(lambda m, q, k, v: (lambda p: (p @ v, p))((q @ k.mT).softmax(-1)))
    assert not report.changed
    assert ATTENTION not in targets(module)


def test_active_dropout_stays() -> None:
    model = Model(lambda m, q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5, training=True) @ v)
    module = unlift(model, *operands())
    assert not fuse_attention(module).changed


def test_a_softmax_of_classes_is_not_looked_at() -> None:
    _, report = run(lambda m, q, k, v: (q @ k.mT).softmax(-1) * m.bias)
    assert report == PassReport("fuse_attention")


def test_an_operand_that_is_written_in_between_stays() -> None:
    def function(m: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q + 0
        scores = q @ k.mT
        q.mul_(2)
        return scores.softmax(-1) @ v + q

    _, report = run(function)
    [said] = report.skipped.values()
    assert said == "mul_ writes into an operand"


def test_rows_without_a_key_give_zero() -> None:
    """Eager PyTorch's GEMMs give NaN, its scaled_dot_product_attention gives 0."""
    model = Model(lambda m, q, k, v: (q @ k.mT).masked_fill(m.bias.isfinite(), -math.inf).softmax(-1) @ v)
    module = unlift(model, *operands())
    assert fuse_attention(module).changed
    close(module)
    assert module(*operands()).eq(0).all()


@pytest.mark.parametrize("choice", ["math", "auto"])
def test_the_option_attention(choice: Any) -> None:
    module = unlift(Model(plain), *operands())
    reports = {report.name: report for report in run_passes(module, ExportOptions(attention=choice))}
    report = reports["fuse_attention"]
    assert bool(report.changed) == (choice == "auto")
    assert report.not_run == ("the option attention is 'math'" if choice == "math" else None)


@pytest.mark.slow
def test_one_file(tmp_path: Path) -> None:
    model, args = Model(filled_and_biased), operands()
    results, method = exported(model, args, tmp_path)
    assert_same(results, model(*args), rtol=1e-5, atol=1e-6)
    assert "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu" in method.operators
