"""Tests of choose_attention: before, after, what stays and why; results are those of the graph on the CPU."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import nn
from torch.export import Dim

from untorch.export.errors import CompileError, OptionError
from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.choose_attention import choose_attention


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[choose_attention.__module__], "_has_triton", lambda: True)


class Attention(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
        result = F.scaled_dot_product_attention(q, k, v, mask, **self.arguments)
        return result.transpose(-3, -2).flatten(-2) if q.dim() == 4 else result


class Repeated(nn.Module):
    """How models write it that share keys among heads: ``how`` is "expand" or "interleave"."""

    def __init__(self, n: int, how: str) -> None:
        super().__init__()
        self.n, self.how = n, how

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        b, h, length, d = x.shape
        if self.how == "interleave":
            return torch.repeat_interleave(x, self.n, dim=1)
        if self.how == "wrong dimension":  # heads in turns: 0 1 0 1
            return x[:, None].expand(b, self.n, h, length, d).reshape(b, h * self.n, length, d)
        return x[:, :, None, :, :].expand(b, h, self.n, length, d).reshape(b, h * self.n, length, d)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)


class Cached(Repeated):
    """``late``: the cache is written after the keys were repeated."""

    def __init__(self, late: bool) -> None:
        super().__init__(2, "expand")
        self.late = late
        self.register_buffer("keys", torch.randn(2, 2, 7, 16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.late:
            self.keys.copy_(k)
        repeated = self.repeat(self.keys)
        if self.late:
            self.keys.copy_(k)
        return F.scaled_dot_product_attention(q, repeated, self.repeat(v))


def tensors(
    heads: int = 4, heads_kv: int = 4, queries: int = 5, keys: int = 7, dtype: Any = None, width: int = 16
) -> list[Any]:
    torch.manual_seed(0)
    return [
        torch.randn(2, h, length, width, dtype=dtype)
        for h, length in ((heads, queries), (heads_kv, keys), (heads_kv, keys))
    ]


def calls(module: Any) -> list[str]:
    return [t for t in targets(module) if "attention" in t]


@pytest.mark.parametrize(
    ("model", "args", "what"),
    [
        (Attention(), tensors(), "float32, head size 16"),
        (Attention(is_causal=True), tensors(dtype=torch.float16), "float16, head size 16"),
        (Attention(scale=0.3), tensors(dtype=torch.bfloat16), "bfloat16, head size 16"),
        (Attention(enable_gqa=True), tensors(heads_kv=2), "float32, head size 16, 4 heads over 2"),
        (Attention(), [*tensors(), torch.randn(2, 4, 5, 7)], "float32, head size 16"),
        (Attention(), [*tensors(), torch.rand(5, 7) > 0.2], "float32, head size 16"),
        (Attention(), [*tensors(), torch.rand(2, 1, 1, 7) > 0.2], "float32, head size 16"),
        (Attention(), [t[0] for t in tensors()], "float32, head size 16"),
        (
            Repeated(2, "expand"), tensors(heads_kv=2),
            "float32, head size 16, 4 heads over 2, keys and values no longer repeated",
        ),
        (
            Repeated(4, "interleave"), tensors(heads_kv=1),
            "float32, head size 16, 4 heads over 1, keys and values no longer repeated",
        ),
        (Repeated(2, "wrong dimension"), tensors(heads_kv=2), "float32, head size 16"),
        (
            Cached(late=False), tensors(heads_kv=2),
            "float32, head size 16, 4 heads over 2, keys and values no longer repeated",
        ),
        (Cached(late=True), tensors(heads_kv=2), "float32, head size 16"),
    ],
)  # fmt: skip
def test_triton(model: nn.Module, args: list[Any], what: str) -> None:
    expected = copy.deepcopy(model)(*args)
    for choice in ("auto", "triton"):
        module = unlift(copy.deepcopy(model), *args)
        assert calls(module) == ["scaled_dot_product_attention"]
        report = choose_attention(module, choice, "cuda")  # type: ignore[arg-type]
        close(module)
        assert calls(module) == ["untorch.attention"]
        assert report.changed == [f"scaled_dot_product_attention: triton: {what}"]
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[args[0].dtype]
        assert_same(module(*args), expected, rtol=tolerance, atol=tolerance)
        value = module.graph.output_node().all_input_nodes[0].meta["val"]
        assert value.shape == expected.shape and value.dtype == expected.dtype


HALVES = tensors(queries=300, keys=90, dtype=torch.bfloat16, width=128)
OPERATOR = "_scaled_dot_product_cudnn_attention"


@pytest.mark.parametrize(
    ("model", "args", "what"),
    [
        (Attention(is_causal=True), HALVES, "bfloat16, head size 128"),
        (Attention(scale=0.3), HALVES, "bfloat16, head size 128"),
        (Attention(), [t[0] for t in HALVES], "bfloat16, head size 128"),
        (Attention(), tensors(queries=300, dtype=torch.bfloat16, width=64), "bfloat16, head size 64"),
        (Attention(is_causal=True), tensors(queries=513, dtype=torch.bfloat16, width=64), "bfloat16, head size 64"),
        (Attention(is_causal=True), tensors(queries=300, dtype=torch.bfloat16, width=96), "bfloat16, head size 96"),
        (Attention(), tensors(queries=1025, dtype=torch.bfloat16, width=40), "bfloat16, head size 40"),
        (
            Repeated(2, "expand"), tensors(heads_kv=2, queries=257, dtype=torch.float16, width=128),
            "float16, head size 128, 4 heads over 2, keys and values no longer repeated",
        ),
    ],
)  # fmt: skip
def test_the_kernel_for_sm_90(model: nn.Module, args: list[Any], what: str) -> None:
    """The graph calls an operator that has no kernel on the CPU: shapes and strides are compared here."""
    expected = copy.deepcopy(model)(*args)
    for architecture, choice in (("sm_90", "auto"), ("sm_90", "triton"), ("sm_80", "auto"), ("sm_100", "auto")):
        module = unlift(copy.deepcopy(model), *args)
        report = choose_attention(module, choice, "cuda", architecture)  # type: ignore[arg-type]
        close(module)
        chosen = (architecture, choice) == ("sm_90", "auto")
        assert calls(module) == [OPERATOR if chosen else "untorch.attention"]
        kernel = "the runtime's kernel for sm_90" if chosen else "triton"
        assert report.changed == [f"scaled_dot_product_attention: {kernel}: {what}"]
        value = module.graph.output_node().all_input_nodes[0].meta["val"]
        assert value.shape == expected.shape and value.dtype == expected.dtype


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Attention(), tensors(queries=300, width=128)),  # float32
        (Attention(), [*HALVES, torch.rand(300, 90) > 0.2]),
        (Attention(scale=-0.3), HALVES),
        (Attention(), tensors(queries=256, dtype=torch.bfloat16, width=128)),
        (Attention(), tensors(queries=1025, dtype=torch.bfloat16, width=32)),
        (Attention(), tensors(queries=1024, dtype=torch.bfloat16, width=56)),
        (Attention(is_causal=True), tensors(queries=512, dtype=torch.bfloat16, width=64)),
        (Attention(is_causal=True), tensors(queries=512, dtype=torch.bfloat16, width=88)),
    ],
)
def test_triton_on_sm_90(model: nn.Module, args: list[Any]) -> None:
    """What the WGMMA kernel does not take, few queries, and narrow heads."""
    module = unlift(model, *args)
    choose_attention(module, "auto", "cuda", "sm_90")
    assert calls(module) == ["untorch.attention"]


def test_what_follows_is_a_view() -> None:
    module = unlift(Attention(), *tensors())
    choose_attention(module, "auto", "cuda")
    [node] = [n for n in module.graph.nodes if str(n.target) == "untorch.attention.default"]
    assert node.meta["val"].transpose(1, 2).is_contiguous()


def efficient(q: Any, k: Any, v: Any, bias: Any, lse: bool, dropout: float, causal: bool, scale: Any) -> Any:
    assert not lse and dropout == 0
    return (F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale),)


EFFICIENT = "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Attention(), tensors(width=136)),
        (Attention(), tensors(width=512)),
        (Attention(), tensors(width=512, dtype=torch.bfloat16)),
        (Attention(), tensors(width=264, dtype=torch.float16)),
        (Attention(is_causal=True, scale=0.25), tensors(width=136)),
        (Attention(), [torch.randn(4, 5, 136), torch.randn(4, 7, 136), torch.randn(4, 7, 260)]),
        (Attention(), [*tensors(width=136), torch.randn(5, 7)]),
        (Attention(), [*tensors(width=136), torch.randn(2, 1, 1, 7) > 0]),
        (
            Attention(),
            [torch.randn(4, 5, 136), torch.randn(4, 7, 136), torch.randn(4, 7, 136), torch.rand(4, 1, 7) > 0.3],
        ),
    ],
)
def test_wide_heads(model: nn.Module, args: list[Any]) -> None:
    """By the runtime's kernel, under the name of an operator: no GPU is asked, and a file for another one has it."""
    module = unlift(model, *args)
    report = choose_attention(module, "auto", "cuda")
    close(module)
    assert calls(module) == [EFFICIENT] and not report.skipped
    assert report.changed[0].startswith("scaled_dot_product_attention: the runtime's kernel for wide heads: ")
    value = module.graph.output_node().all_input_nodes[0].meta["val"]
    expected = model(*args)
    assert value.shape == expected.shape and value.dtype == expected.dtype
    for node in module.graph.nodes:
        if "efficient" in str(node.target):  # CPUs have no such operator
            assert node.args[3] is None or node.args[3].meta["val"].shape == (*node.args[0].meta["val"].shape[:3], 7)
            node.target = efficient
    module.recompile()
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    assert_same(module(*args), expected, rtol=tolerance, atol=tolerance)


def test_wide_heads_by_triton() -> None:
    module = unlift(Attention(), *tensors(width=136))
    choose_attention(module, "triton", "cuda")
    assert calls(module) == ["untorch.attention"]


def test_sizes_that_vary() -> None:
    batch, queries, keys = Dim("batch", min=1, max=8), Dim("queries", min=1, max=64), Dim("keys", min=1, max=64)
    dynamic = ({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys}, {0: batch, 2: queries, 3: keys})
    args = [*tensors(), torch.randn(2, 1, 5, 7)]
    module = unlift(Attention(), *args, dynamic=dynamic)
    choose_attention(module, "triton", "cuda")
    close(module)
    assert calls(module) == ["untorch.attention"]
    wide = [torch.randn(3, 4, 9, 16), torch.randn(3, 4, 33, 16), torch.randn(3, 4, 33, 16), torch.randn(3, 1, 9, 33)]
    assert_same(module(*wide), Attention()(*wide), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "args", "reason"),
    [
        (Attention(), tensors(dtype=torch.float64), "the type is float64, expected float16, bfloat16 or float32"),
        (Attention(dropout_p=0.5), tensors(), "it has a dropout of 0.5"),
        (
            Attention(), [torch.randn(1, 2, 3, 520)] * 3,
            "the head size is 520, expected 1 to 256",
        ),
        (
            Attention(), [torch.randn(1, 2, 3, 4, 16)] * 3,
            "the query has 5 dimensions, the key 5, the value 5, expected 3 or 4 of each",
        ),
        (
            Attention(), [torch.randn(2, 4, 5, 16), torch.randn(1, 4, 7, 16), torch.randn(1, 4, 7, 16)],
            "the batch sizes of query, key and value are not known to be equal",
        ),
    ],
)  # fmt: skip
def test_what_stays(model: nn.Module, args: list[Any], reason: str) -> None:
    module = unlift(model, *args)
    report = choose_attention(module, "auto", "cuda")
    assert calls(module) == ["scaled_dot_product_attention"]
    assert report.changed == [] and report.skipped == {"scaled_dot_product_attention": f"native: {reason}"}
    with pytest.raises(CompileError) as caught:
        choose_attention(module, "triton", "cuda")
    text = str(caught.value)
    assert text.startswith("attention='triton' cannot serve scaled_dot_product_attention (")
    assert "test_choose_attention.py" in text and "F.scaled_dot_product_attention(" in text
    assert text.endswith(f"): {reason}; attention='auto' takes a native operator for such calls")


def test_the_cpu() -> None:
    for choice, why in (("auto", "the method is for cpu"), ("native", "the option attention asks for it")):
        module = unlift(Attention(), *tensors())
        reports = run_passes(module, ExportOptions(attention=choice), "cpu")  # type: ignore[arg-type]
        [report] = [r for r in reports if r.name == "choose_attention"]
        assert report.skipped == {"scaled_dot_product_attention": f"native: {why}"}
        assert calls(module) == ["scaled_dot_product_attention"]
    with pytest.raises(CompileError) as caught:
        run_passes(unlift(Attention(), *tensors()), ExportOptions(attention="triton"), "cpu", "encode")
    assert str(caught.value).startswith("method 'encode': attention='triton' cannot serve scaled_dot_product_attention")
    assert "the method is for cpu" in str(caught.value)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[choose_attention.__module__], "_has_triton", lambda: False)
    module = unlift(Attention(), *tensors())
    assert choose_attention(module, "auto", "cuda").skipped == {
        "scaled_dot_product_attention": "native: Triton is not installed"
    }


@pytest.mark.parametrize("model", [Attention(is_causal=True, scale=0.4), Attention(enable_gqa=True)])
def test_math(model: nn.Module) -> None:
    args = tensors(heads_kv=2 if "enable_gqa" in model.arguments else 4)  # type: ignore[operator]
    module = unlift(model, *args)
    report = choose_attention(module, "math", "cpu")
    close(module)
    assert calls(module) == ["_scaled_dot_product_attention_math"]
    assert report.changed == ["scaled_dot_product_attention: math: the option attention asks for it"]
    assert_same(module(*args), model(*args), rtol=1e-5, atol=1e-5)


class Viewed(nn.Module):
    """A view that the strides of the result decide about."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v)
        return y.view(-1, 16) if q.dim() == 3 else y.transpose(1, 2).view(2, 5, 64)


@pytest.mark.parametrize("choice", ["triton", "math"])
@pytest.mark.parametrize("dimensions", [3, 4])
def test_views_of_the_result(choice: str, dimensions: int) -> None:
    args = [t.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for t in tensors()]
    args = args if dimensions == 4 else [t[0].contiguous() for t in args]
    expected = Viewed()(*args)
    module = unlift(Viewed(), *args)
    choose_attention(module, choice, "cuda")  # type: ignore[arg-type]
    close(module)
    assert_same(module(*args), expected, rtol=1e-5, atol=1e-5)
    layouts = {"triton": {3: True, 4: False}, "math": {3: False, 4: True}}
    assert ("clone" in targets(module)) is layouts[choice][dimensions]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["native", "math"])
def test_a_file(choice: str, tmp_path: Path) -> None:
    """ "math" stays what it is, and AOTInductor does not make a fused operator of it again."""
    args = tensors()
    [value], report = exported(Attention(is_causal=True), args, tmp_path, attention=choice)
    torch.testing.assert_close(value, Attention(is_causal=True)(*args), rtol=1e-5, atol=1e-5)
    assert any("scaled_dot_product" in name for name in report.operators) is (choice == "native")


def test_unknown_choice() -> None:
    with pytest.raises(OptionError, match="option attention: expected one of 'auto', 'triton', 'native', 'math', got"):
        ExportOptions(attention="flash")  # type: ignore[arg-type]
