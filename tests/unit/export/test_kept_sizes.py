"""Dynamic sizes of inputs stay dynamic: the error names the pass, or Inductor, that fixes one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

from untorch.export import CompileError, export
from untorch.export import inductor as inductor_module
from untorch.export.kept_sizes import FixedSizeError, keeps_sizes
from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes, table
from untorch.export.passes.report import PassReport


class Scale(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y


def traced() -> fx.GraphModule:
    shapes = ({0: Dim("n", max=64)}, None)
    program = torch.export.export(Scale(), (torch.ones(5, 3), torch.ones(3)), dynamic_shapes=shapes)
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    return module


def fix(module: fx.GraphModule) -> None:
    """What a comparison with the example's size does."""
    for node in module.graph.nodes:
        if node.op == "placeholder":
            assert node.meta["val"].shape[0] == (5 if node.name == "x" else 3)


def test_a_size_that_is_fixed() -> None:
    module = traced()
    with keeps_sizes(module):
        pass
    text = r"^fixed dimension 0 of x to 5, which are dynamic: other sizes would"
    with pytest.raises(FixedSizeError, match=text), keeps_sizes(module):
        fix(module)
    with keeps_sizes(module):  # it is static now
        pass


def test_an_error_in_the_block_is_not_hidden() -> None:
    def fail(module: fx.GraphModule) -> None:
        fix(module)
        raise KeyError("mine")

    module = traced()
    with pytest.raises(KeyError, match="mine"), keeps_sizes(module):
        fail(module)


def test_a_pass_that_fixes_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(module: fx.GraphModule, *_: Any) -> PassReport:
        fix(module)
        return PassReport(entry.name)

    entry = dataclasses.replace(table.PASSES[0], run=run)
    monkeypatch.setattr(table, "PASSES", (entry,))
    with pytest.raises(CompileError) as caught:
        run_passes(traced(), ExportOptions(), "cpu", "encode")
    assert str(caught.value).startswith(f"method 'encode': pass {entry.name!r} fixed dimension 0 of x to 5, which are")
    assert str(caught.value).endswith(f"; passes={{{entry.name!r}: False}} switches it off")


@pytest.mark.slow
def test_inductor_that_fixes_a_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_ = torch._inductor.aot_compile

    def fixing(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        result = compile_(module, *args, **kwargs)
        fix(module)
        return result

    monkeypatch.setattr(inductor_module.torch._inductor, "aot_compile", fixing)
    with pytest.raises(CompileError, match=r"^method 'forward': Inductor fixed dimension 0 of x to 5, which are dyn"):
        export(
            Scale(), (torch.ones(5, 3), torch.ones(3)), tmp_path / "m.pt2", dynamic_shapes=({0: Dim("n", max=64)}, None),
            progress=False,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())
