"""``untorch ops``: the operators that this build supports, and those that it refuses."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.options import DebugOption, DeviceOption, JsonOption
from untorch.cli.output import emit, make_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ops"]


def ops(
    device: DeviceOption = None,
    match: Annotated[str, typer.Option("--match", metavar="TEXT", help="Only names that contain this text.")] = "",
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the operators that models may call, on the CPU or on the given kind of device."""
    from untorch.cli.process import exported_functions, library_path
    from untorch.runtime.coverage import classify
    from untorch.runtime.errors import InvalidArgumentError
    from untorch.runtime.registry import native_operators, registered_kernels
    from untorch.runtime.unsupported import UNSUPPORTED_SHIMS

    kind = "cpu" if device is None else device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"--device {device}: expected cpu or cuda")
    groups = {
        group: [name for name in names if match in name]
        for group, names in classify(exported_functions(), kind).items()
    }
    document: dict[str, Any] = {
        "device": kind,
        "library": str(library_path()),
        **groups,
        "native_kernels": [name for name in native_operators(kind) if match in name],
        "python_kernels": [name for name in registered_kernels(kind) if match in name],
        "refused": {name: reason for name, reason in sorted(UNSUPPORTED_SHIMS.items()) if match in name},
    }
    emit(document, json, lambda console: _render(console, document))


_TITLES = {
    "operators": "operators with a C function (aoti_torch_{device}_…)",
    "native_kernels": "operators without a C function that the library serves itself",
    "python_kernels": "operators with a Python kernel",
    "vector_functions": "vector functions",
    "interface_functions": "functions of the C interface",
}


def _render(console: Console, document: dict[str, Any]) -> None:
    console.print(document["library"], soft_wrap=True)
    for kind, title in _TITLES.items():
        names = document[kind]
        console.print(f"\n{title.format(device=document['device'])}: {len(names)}", style="bold")
        if names:
            # Long names are not broken: they are there to be searched.
            text = textwrap.wrap(", ".join(names), min(console.width, 120) - 2, break_long_words=False)
            console.print(textwrap.indent("\n".join(text), "  "), soft_wrap=True)
    if document["refused"]:
        console.print(f"\nrefused: {len(document['refused'])}", style="bold")
        console.print(make_table(None, ("function", "reason"), document["refused"].items()))
