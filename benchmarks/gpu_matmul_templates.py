"""Does ``matmul="auto"`` pay? MLPs in bfloat16 with GEMMs by the library and by Triton templates, timed at export.

    UNTORCH_LIBRARY=build/gpu/native/libuntorch.so python benchmarks/gpu_matmul_templates.py [--widths 2048 4096]

Two blocks of layer norm, a linear layer to four times the width, GELU, one back, and the residual sum: bias and what
follows can be in a template's epilogue. Both exports run alternately on one stream, called and as CUDA graphs; a call's
time ends when the GPU is done. All weights exceed L2 from a width of 2048 on.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import tempfile
import time
from typing import Any

from common import RESULTS, Report, Table
from gpu_common import describe_gpu, note_of

KINDS = ("library", "auto")


def model_of(width: int) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
            return out

    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).eval().requires_grad_(False).cuda().bfloat16()


def measure(width: int, batch: int, seconds: float) -> dict[str, float]:
    """Microseconds of a call and of a graph, and seconds of the export, by what computes the GEMMs."""
    import torch
    from gpu_models import alternate, difference

    import untorch
    from untorch.export import export

    model, x = model_of(width), torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
    result: dict[str, float] = {}
    calls: dict[str, Any] = {}
    with contextlib.ExitStack() as stack, torch.no_grad():
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stream = torch.cuda.Stream()
        stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(untorch.stream(stream))
        expected = model(x)
        for kind in KINDS:
            begin = time.perf_counter()
            export(model, (x,), folder / f"{kind}.pt2", device="cuda", matmul=kind, progress=False)  # type: ignore[arg-type]
            result[f"export {kind}"] = round(time.perf_counter() - begin, 1)
            method = stack.enter_context(untorch.load(folder / f"{kind}.pt2")).forward
            off = difference(method(x), expected)
            assert off < 0.02, f"{kind}: differs from eager by {off:.1e}"
            graph = stack.enter_context(method.graph(x))
            calls[f"call {kind}"] = lambda method=method: method(x)
            calls[f"graph {kind}"] = lambda graph=graph: graph(x)
        times = alternate(calls, stream.synchronize, seconds)
        calls.clear()
    return result | {key: round(value["call"] * 1e6, 1) for key, value in times.items()}


def table(measured: dict[str, dict[str, float]]) -> Table:
    rows = []
    for key, times in measured.items():
        row = key.split(":")
        for kind in ("call", "graph"):
            library, auto = times[f"{kind} library"], times[f"{kind} auto"]
            row += [f"{library:.0f}", f"{auto:.0f} ({library / auto:.2f})"]
        rows.append([*row, f"{times['export library']:.0f}", f"{times['export auto']:.0f}"])
    return Table(
        ["Width", "M", "call, library", "auto", "CUDA graph, library", "auto", "export, library, s", "auto, s"], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="*", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--seconds", type=float, default=0.25, help="of measuring for each contestant")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    report = Report("gpu_matmul_templates", quick=False)
    describe_gpu(report)
    measured = {f"{w}:{m}": measure(w, m, options.seconds) for w in options.widths for m in options.batches}
    report.values = {"measured": measured}
    text = "Microseconds, median; in brackets how many times as fast with templates."
    made = table(measured)
    report.tables["gpu_matmul_templates"] = Table(made.columns, made.rows, note_of(report, text))
    report.write(options.output)


if __name__ == "__main__":
    main()
