"""Writes the lists of operators in docs/limits.md from what the runtime serves and refuses.

Usage: python scripts/render_limits.py [--check]

The served functions are those that libuntorch.so exports, the Python kernels those of the registry, the refused ones
those of untorch.runtime.unsupported. With --check nothing is written; the exit code is 1 when the page is out of date.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "limits.md"
BEGIN, END = "<!-- operators: written by scripts/render_limits.py -->", "<!-- operators: end -->"
DEVICES = {"the CPU": "aoti_torch_cpu_", "CUDA": "aoti_torch_cuda_"}


def names(values: Iterable[str]) -> str:
    """A wrapped list of code spans."""
    text = ", ".join(f"`{value}`" for value in sorted(values))
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>\n"


def operator(name: str) -> str:
    """The name without the prefix of its device."""
    for prefix in DEVICES.values():
        name = name.removeprefix(prefix)
    return name


def render_refused(refused: Mapping[str, str]) -> str:
    """A table of reasons with their functions, the reasons in alphabetical order."""
    lines = ["| why | functions |", "|---|---|"]
    ordered = sorted(refused.items(), key=lambda item: (item[1], item[0]))
    for reason, group in groupby(ordered, key=lambda item: item[1]):
        functions = ", ".join(f"`{operator(name)}`" for name, _ in group)
        lines.append(f"| {reason} | {functions} |")
    return "\n".join(lines) + "\n"


def render(
    exported: Iterable[str], kernels: Iterable[str], refused: Mapping[str, str], native: Mapping[str, Iterable[str]]
) -> str:
    """The text between the markers."""
    exported, kernels = set(exported) - refused.keys(), list(kernels)
    cpu, cuda = (
        [name.removeprefix(prefix) for name in exported if name.startswith(prefix)] for prefix in DEVICES.values()
    )
    vector = sum(name.startswith("Sleef_") for name in exported)
    other = len(exported) - len(cpu) - len(cuda) - vector
    refused_cuda = {name: reason for name, reason in refused.items() if name.startswith(DEVICES["CUDA"])}
    refused_cpu = {name: reason for name, reason in refused.items() if name not in refused_cuda}
    return "\n".join(
        [
            "### Served by C functions",
            "",
            f"{len(cpu)} operators on the CPU (`{DEVICES['the CPU']}…`) and {len(cuda)} on CUDA "
            f"(`{DEVICES['CUDA']}…`), {other} functions for tensors, scalars, devices and the like, "
            f"and {vector} vector functions under SLEEF's names.",
            "",
            folded("The operators of the CPU", names(cpu)),
            folded("The operators of CUDA", names(cuda)),
            "### Native operators by name",
            "",
            "The library serves these itself where Inductor calls them through the proxy executor.",
            "",
            f"- On the CPU: {', '.join(f'`{name}`' for name in sorted(native['cpu']))}.",
            f"- On CUDA: {', '.join(f'`{name}`' for name in sorted(native['cuda']))}.",
            "",
            "### Python kernels",
            "",
            f"{len(kernels)} operators run on numpy, on the CPU, where Inductor calls them through the proxy executor.",
            "",
            folded("The operators", names(kernels)),
            "### Refused",
            "",
            f"{len(refused_cpu)} functions that PyTorch's headers declare for the CPU are left out "
            f"(`{DEVICES['the CPU']}…`, but for full names).",
            "",
            render_refused(refused_cpu),
            f"{len(refused_cuda)} that they declare for CUDA are left out (`{DEVICES['CUDA']}…`).",
            "",
            render_refused(refused_cuda),
        ]
    )


def replaced(page: str, generated: str) -> str:
    """The page with ``generated`` between its markers. Raises ValueError when it does not have both."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the marker {END if begin else BEGIN!r}")
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


def current() -> str:
    """The text for this installation."""
    from untorch.cli.process import exported_functions
    from untorch.runtime.registry import native_operators, registered_kernels
    from untorch.runtime.unsupported import UNSUPPORTED_SHIMS

    native = {device: native_operators(device) for device in ("cpu", "cuda")}
    return render(exported_functions(), registered_kernels(), UNSUPPORTED_SHIMS, native)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    old = PAGE.read_text()
    new = replaced(old, current())
    if arguments:
        if new != old:
            print("docs/limits.md is out of date: run python scripts/render_limits.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
