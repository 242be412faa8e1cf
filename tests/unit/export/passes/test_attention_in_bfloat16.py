"""Tests of attention_in_bfloat16: what is computed in which dtype, what stays, and an exported file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pass_graphs import targets, unlift
from torch import nn
from torch.nn import functional as F

import untorch
from untorch.export import ExportOptions, OptionError, export
from untorch.export.passes import run_passes
from untorch.export.passes.attention_in_bfloat16 import attention_in_bfloat16


class Attention(nn.Module):
    """Heads of x in turn, as models have them; ``options`` of the attention."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = x.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, mask, **self.options)  # type: ignore[arg-type]
        return y.transpose(1, 2).flatten(2)


def rounded(x: torch.Tensor, mask: torch.Tensor | None = None, **options: object) -> torch.Tensor:
    if mask is not None and mask.is_floating_point():
        mask = mask.bfloat16()
    return Attention(**options)(x.bfloat16(), mask).float()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
@pytest.mark.parametrize("kind", ["none", "float", "bool"])
def test_before_and_after(options: dict[str, object], kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9, 96)
    mask = {"none": None, "float": torch.randn(9, 9), "bool": torch.rand(9, 9) > 0.2}[kind]
    if mask is not None and "is_causal" in options:
        pytest.skip("PyTorch takes one of them")
    model = Attention(**options)
    module = unlift(model, x, *([] if mask is None else [mask]))
    report = attention_in_bfloat16(module)
    module.graph.lint()
    module.recompile()
    assert len(report.changed) == 1
    [node] = [n for n in module.graph.nodes if n.target == torch.ops.aten.scaled_dot_product_attention.default]
    assert {source.meta["val"].dtype for source in node.args[:3]} == {torch.bfloat16}
    assert targets(module).count("to.dtype") == 4
    out = module(x) if mask is None else module(x, mask)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, rounded(x, mask, **options), rtol=0, atol=0.02)
    torch.testing.assert_close(out, model(x) if mask is None else model(x, mask), rtol=0, atol=0.03)
    assert attention_in_bfloat16(module).skipped == {node.name: "it is not in float32"}


class Dropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


class Widths(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x[..., :8])


class NoHeads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x[0], x[0], x[0])


@pytest.mark.parametrize("model", [Dropout(), Widths(), NoHeads()])
def test_what_stays(model: nn.Module) -> None:
    report = attention_in_bfloat16(unlift(model, torch.randn(2, 4, 9, 16)))
    assert not report.changed
    assert list(report.skipped.values()) == [
        "the library's kernel does not compute it: it has dropout, no heads, or values of another width"
    ]


def test_half_types_stay() -> None:
    report = attention_in_bfloat16(unlift(Attention(), torch.randn(2, 9, 96).half()))
    assert list(report.skipped.values()) == ["it is not in float32"]


def test_the_option_switches_it_on() -> None:
    module = unlift(Attention(), torch.randn(2, 9, 96))
    reports = {report.name: report for report in run_passes(module, ExportOptions(), "cpu")}
    assert reports["attention_in_bfloat16"].not_run == "it is switched off by the option bfloat16_attention"
    reports = {report.name: report for report in run_passes(module, ExportOptions(bfloat16_attention=True), "cpu")}
    assert len(reports["attention_in_bfloat16"].changed) == 1


def test_other_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as error:
        export(
            Attention(), (torch.ones(1, 9, 96),), tmp_path / "m.pt2", device="cuda", arch="sm_90",
            bfloat16_attention=True,
        )  # fmt: skip
    assert str(error.value) == (
        "export: method 'forward': option bfloat16_attention: it is for device='cpu', got 'cuda': leave it out, or "
        "give it in the options of methods for CPUs"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it exports
def test_an_exported_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 70, 96), torch.randn(70, 70)
    length = torch.export.Dim("length", min=2, max=200)
    report = export(
        Attention(), (x, mask), tmp_path / "m.pt2", bfloat16_attention=True, progress=False,
        dynamic_shapes={"x": {1: length}, "mask": {0: length, 1: length}},
    )  # fmt: skip
    assert "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu" in report.methods["forward"].operators
    with untorch.load(tmp_path / "m.pt2") as package:
        for size in (70, 9, 130):
            x, mask = torch.randn(2, size, 96), torch.randn(size, size)
            out = package(x.numpy(), mask.numpy())
            assert out.dtype == np.float32
            torch.testing.assert_close(torch.from_numpy(out), rounded(x, mask), rtol=0, atol=0.03)
            assert not np.array_equal(out, Attention()(x, mask).numpy())
