"""Graph passes before AOTInductor: an ordered list; each says what it changed, and what it left alone and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from untorch.export.options import ExportOptions

__all__ = ["PassReport", "run_passes"]


@dataclass
class PassReport:
    """What one pass did. ``changed`` names nodes; ``skipped`` maps nodes that it looked at to the reason."""

    name: str
    changed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


Pass = Callable[[fx.GraphModule], PassReport]


def run_passes(module: fx.GraphModule, options: ExportOptions, device: str = "cpu") -> list[PassReport]:
    """Runs the passes that ``options`` ask for on the unlifted module, in place and in order; ``device`` is its own."""
    from untorch.export.passes.drop_inference_dropout import drop_inference_dropout
    from untorch.export.passes.pack_linears import pack_linears

    passes: list[Pass] = [drop_inference_dropout]
    if options.pack_linears and device == "cpu":  # what it packs for are CPU kernels
        passes.append(pack_linears)
    reports = [run(module) for run in passes]
    module.graph.lint()
    module.recompile()
    return reports
