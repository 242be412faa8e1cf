"""Graph passes before AOTInductor: an ordered list; each says what it changed, and what it left alone and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from untorch.export.errors import CompileError
from untorch.export.options import PASS_NAMES, ExportOptions

__all__ = ["PassReport", "run_passes"]


@dataclass
class PassReport:
    """What one pass did. ``changed`` names nodes; ``skipped`` maps nodes that it looked at to the reason.

    ``not_run`` is the reason why the pass as a whole did not run, if it did not.
    """

    name: str
    changed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    not_run: str | None = None


Pass = Callable[[fx.GraphModule], PassReport]

_DEVICES = {"conv1d_as_conv2d": "cuda", "pack_linears": "cpu", "repack_int4": "cpu"}


def run_passes(
    module: fx.GraphModule, options: ExportOptions, device: str = "cpu", method: str = "forward"
) -> list[PassReport]:
    """Runs the passes on the unlifted module of ``method``, in place, in the order of PASS_NAMES; one report each.

    ``device`` is the method's. A pass that ``options`` switch off, or that is for another device, only reports that.
    Raises CompileError with the method and the pass, when one fails or leaves a graph that is not well-formed.
    """
    passes = _passes(options, device)
    reports = []
    for name in PASS_NAMES:
        if reason := _reason_not_to_run(name, options, device):
            reports.append(PassReport(name, not_run=reason))
            continue
        try:
            reports.append(passes[name](module))
            module.graph.lint()
            module.recompile()
        except CompileError as error:  # it says what to do
            raise CompileError(f"method {method!r}: {error}") from error
        except Exception as error:
            raise CompileError(
                f"method {method!r}: pass {name!r} failed: {error}; passes={{{name!r}: False}} switches it off"
            ) from error
    return reports


def _passes(options: ExportOptions, device: str) -> dict[str, Pass]:
    # A pass has its own file and needs PassReport from here.
    from untorch.export.passes.choose_attention import choose_attention
    from untorch.export.passes.cond_predicates_to_host import cond_predicates_to_host
    from untorch.export.passes.conv1d_as_conv2d import conv1d_as_conv2d
    from untorch.export.passes.drop_dead_code import drop_dead_code
    from untorch.export.passes.drop_inference_dropout import drop_inference_dropout
    from untorch.export.passes.exact_floor_division import exact_floor_division
    from untorch.export.passes.fold_constants import fold_constants
    from untorch.export.passes.pack_linears import pack_linears
    from untorch.export.passes.repack_int4 import repack_int4
    from untorch.export.passes.restore_views import restore_views

    return {
        "drop_inference_dropout": drop_inference_dropout,
        "cond_predicates_to_host": cond_predicates_to_host,
        "restore_views": restore_views,
        "fold_constants": lambda module: fold_constants(module, options.fold_limit),
        "exact_floor_division": exact_floor_division,
        "conv1d_as_conv2d": conv1d_as_conv2d,
        "choose_attention": lambda module: choose_attention(module, options.attention, device),
        "repack_int4": repack_int4,
        "drop_dead_code": drop_dead_code,
        "pack_linears": pack_linears,
    }


def _reason_not_to_run(name: str, options: ExportOptions, device: str) -> str | None:
    if not options.passes.get(name, True):
        return "it is switched off by the option passes"
    if name == "pack_linears" and not options.pack_linears:
        return "it is switched off by the option pack_linears"
    if _DEVICES.get(name, device) != device:
        return f"it is for {_DEVICES[name]}, and the method is for {device}"
    return None
