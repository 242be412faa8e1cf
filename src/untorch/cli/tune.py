"""``untorch tune``: the fastest configurations of a model's kernels on this machine's GPU, for builds without one."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.options import (
    DebugOption,
    DeviceOption,
    FieldOption,
    JsonOption,
    QuietOption,
    RequiredOutputOption,
)
from untorch.cli.output import emit, make_table, print_fields

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["tune"]


def tune(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT:FUNCTION|FILE",
            help="A function that returns the model and its example inputs, as for untorch export. Or a .pt2 file that "
            "was exported with keep_sources=True for this GPU's architecture and by this version of torch: its kernels "
            "are run, with the Python code in the file.",
            show_default=False,
        ),
    ],
    output: RequiredOutputOption,
    device: DeviceOption = None,
    options: FieldOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compile a model on a GPU and record the fastest configurations of its kernels in a JSON file.

    Entries that the file has already are kept. Exporting for such a GPU on a machine without one uses them: untorch
    export --arch … --option tuning=FILE. The device is cuda unless --device names another GPU.
    """
    from untorch.cli.export import parse_options
    from untorch.runtime.errors import UnsupportedError

    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError("tune needs PyTorch: pip install 'untorch[export]'")
    from untorch.export.kernel_choice import read_tuning

    device = device or "cuda"
    before = read_tuning(output) if output.exists() else {}
    if source.endswith(".pt2"):
        _tune_file(source, output, device, options)
    else:
        _tune_script(source, output, device, {**parse_options(options or ()), "progress": not (quiet or json)})
    document = {"source": source, "file": str(output), "architectures": _counts(read_tuning(output), before)}
    if not quiet or json:
        emit(document, json, lambda console: _render(console, document))


def _tune_file(source: str, output: Path, device: str, options: list[str] | None) -> None:
    from untorch.export.kernel_sources import tune_file
    from untorch.runtime.errors import InvalidArgumentError

    if device not in ("cuda", "cuda:0"):
        raise InvalidArgumentError(
            f"tune: --device: the sources in a file are for the first GPU, got {device!r}: name another one by "
            f"CUDA_VISIBLE_DEVICES"
        )
    if options:
        raise InvalidArgumentError(f"tune: --option: a file is compiled already, got {', '.join(options)}")
    tune_file(source, output)


def _tune_script(source: str, output: Path, device: str, given: dict[str, Any]) -> None:
    import untorch.export
    from untorch.cli.script import export_arguments, load_models
    from untorch.export.options import resolve_options

    fields = {**given, "record_tuning": str(output)}
    resolve_options(None, fields)
    model, keywords = export_arguments(load_models(source), source)
    keywords = {name: value for name, value in keywords.items() if name != "arch"} | {"device": device}
    with tempfile.TemporaryDirectory(prefix="untorch-") as folder:
        untorch.export.export(model, path=Path(folder) / "model.pt2", **{**keywords, **fields})


def _counts(choices: dict[str, Any], before: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "architecture": architecture,
            "kernels": len(kernels),
            "new": len(kernels.keys() - before.get(architecture, {}).keys()),
        }
        for architecture, kernels in sorted(choices.items())
    ]


def _render(console: Console, document: dict[str, Any]) -> None:
    print_fields(console, [("written", document["file"])])
    rows = [(item["architecture"], str(item["kernels"]), str(item["new"])) for item in document["architectures"]]
    console.print(make_table(None, ("architecture", "kernels", "new"), rows))
