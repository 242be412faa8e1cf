"""Graph passes before AOTInductor. ``table`` lists them; each reports what it changed, what it skipped and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from untorch.export.errors import CompileError
from untorch.export.kept_sizes import FixedSizeError, keeps_sizes
from untorch.export.passes import table
from untorch.export.passes.report import PassReport

if TYPE_CHECKING:
    from untorch.export.options import ExportOptions

__all__ = ["PassReport", "run_passes"]


def run_passes(
    module: fx.GraphModule,
    options: ExportOptions,
    device: str = "cpu",
    method: str = "forward",
    architecture: str | None = None,
) -> list[PassReport]:
    """Runs the passes on the unlifted module of ``method``, in place, in the table's order; one report each.

    ``device`` and ``architecture``, of a GPU, are the method's. A pass that ``options`` switch off, or that is for
    another device, only reports that. Raises CompileError with the method and the pass, when one fails, fixes
    a size that is dynamic, or leaves a graph that is not well-formed.
    """
    reports = []
    for entry in table.PASSES:
        if reason := entry.reason_not_to_run(options, device):
            reports.append(PassReport(entry.name, not_run=reason))
            continue
        try:
            with keeps_sizes(module):
                reports.append(entry.run(module, options, device, architecture))
            module.graph.lint()
        except FixedSizeError as error:
            raise CompileError(
                f"method {method!r}: pass {entry.name!r} {error}; passes={{{entry.name!r}: False}} switches it off"
            ) from error
        except CompileError as error:  # it says what to do
            raise CompileError(f"method {method!r}: {error}") from error
        except Exception as error:
            raise CompileError(
                f"method {method!r}: pass {entry.name!r} failed: {error}; passes={{{entry.name!r}: False}} switches it "
                f"off"
            ) from error
    module.recompile()  # passes read the graph, not the code that is made of it
    return reports
