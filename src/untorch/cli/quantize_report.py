"""``untorch quantize-report``: error, bytes and sensitivity of each linear layer of a script's model when quantised."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.options import DebugOption, DeviceOption, JsonOption, QuantizeOption, QuietOption, RecipeOption
from untorch.cli.output import bytes_text, emit, make_table, print_fields, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plot_report", "quantize_report"]


def quantize_report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT:FUNCTION",
            help="A function that returns a module, or what untorch export takes. SCRIPT is a .py file or a module.",
            show_default=False,
        ),
    ],
    quantize: QuantizeOption = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size", metavar="N", help="For int4, inputs that share a scale: 32, 64, 128 (default) or 256."
        ),
    ] = None,
    quantize_method: Annotated[
        str | None,
        typer.Option(
            "--quantize-method",
            metavar="NAME",
            help="int4: hqq (default), rtn or symmetric; int8 and fp8: rtn; nvfp4: search (default) or rtn.",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Only layers of this name, repeatable; * matches any text."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="PATTERN", help="No layers of this name, repeatable; * matches any text."),
    ] = None,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Also tables of embeddings; for int4 and int8.")
    ] = False,
    device: DeviceOption = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="TYPE",
            help="What the layers are for: cpu (default) or cuda, which is the default for fp8. int8 has other layers "
            "for GPUs, fp8 none for CPUs.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="Plot the figures to a file: .svg; errors also to .png and .pdf."),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also run the model on its example inputs for each layer, with that layer alone quantised: the "
            "relative error of the outputs.",
        ),
    ] = False,
    recipe: RecipeOption = None,
    limit: Annotated[
        float | None,
        typer.Option("--limit", metavar="ERROR", help="Layers of a larger sensitivity get --fallback in the recipe."),
    ] = None,
    fallback: Annotated[
        str, typer.Option("--fallback", metavar="DTYPE", help="With --limit: none (default), int8, fp8, int4 or nvfp4.")
    ] = "none",
    quiet: QuietOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the error and the bytes of each linear layer, by default in int4. Writes nothing but plot and recipe.

    Weights are quantised where they are, or on the given device.
    """
    from untorch.runtime.errors import UnsupportedError

    for package, extra in (("torch", "export"), *((("matplotlib", "plot"),) if plot is not None else ())):
        if importlib.util.find_spec(package) is None:
            what = "quantize-report needs PyTorch" if package == "torch" else "--plot needs matplotlib"
            raise UnsupportedError(f"{what}: pip install 'untorch[{extra}]'")
    from untorch.cli.script import load_models
    from untorch.cli.sensitivity import check_recipe, measure_sensitivity, read_target, recipe_rules
    from untorch.export.method import Method
    from untorch.export.options import ExportOptions
    from untorch.export.quantize import quantize_methods
    from untorch.progress import Progress
    from untorch.quant.options import QuantizeOptions

    dtype = quantize or "int4"
    given: dict[str, Any] = {"dtype": dtype, "group_size": group_size, "method": quantize_method}
    given |= {"include": include or None, "exclude": exclude or None, "embeddings": embeddings}
    options = QuantizeOptions(**given)  # a wrong option is an error before the script loads a model
    layers_for = read_target(target, dtype)
    check_recipe(recipe, limit, fallback, layers_for)
    wanted = ExportOptions(quantize=options)
    loaded = load_models(source)
    methods = [Method(name, model, ()) for name, model in _modules(loaded, source).items()]
    by_name = wanted.quantize_methods([item.name for item in methods])
    quantised = quantize_methods(
        methods, by_name, Progress(not (quiet or json)), device, by_name=False, target=layers_for
    )
    reports = {item.name: item.quantization for item in quantised if item.quantization is not None}
    progress = Progress(not (quiet or json))
    measured = {}
    if sensitivity or recipe:
        measured = measure_sensitivity(loaded, source, methods, options, progress, layers_for)
    if recipe is not None:
        from untorch.quant.recipe import write_recipe

        rules = {
            name: recipe_rules(report, options, measured.get(name, {}), limit, fallback)
            for name, report in reports.items()
            if report.layers
        }
        write_recipe(recipe, rules["forward"] if list(rules) == ["forward"] else rules, measured)
    if plot is not None:
        plot_report(plot, {name: report.to_json() for name, report in reports.items()})
    document = {
        "source": source, "dtype": dtype, "group_size": options.group_size, "method": options.method,
        "target": layers_for, "plot": None if plot is None else str(plot),
        "recipe": None if recipe is None else str(recipe),
        "methods": [
            {"name": name, **report.to_json(), "sensitivity": measured.get(name)} for name, report in reports.items()
        ],
    }  # fmt: skip
    if not quiet or json:
        emit(document, json, lambda console: _render(console, document))


def _modules(value: Any, spec: str) -> dict[str, Any]:
    """The modules by method: of a module itself, or of anything that export takes."""
    import torch

    from untorch.cli.script import export_arguments

    if isinstance(value, torch.nn.Module):
        return {"forward": value}
    model, keywords = export_arguments(value, spec)
    if "methods" not in keywords:
        return {"forward": model}
    return {
        str(name): entry[0] if isinstance(entry, tuple) else entry.get("model") if isinstance(entry, Mapping) else entry
        for name, entry in keywords["methods"].items()
    }


def plot_report(path: Path, reports: Mapping[str, dict[str, Any]]) -> None:
    """Draws a bar for each layer's error, one diagram a method. Raises InvalidArgumentError for an unknown ending."""
    import matplotlib

    from untorch.runtime.errors import InvalidArgumentError

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sum(len(report["layers"]) for report in reports.values())
    figure, axes = pyplot.subplots(
        len(reports), 1, figsize=(9, 1.5 + 0.22 * rows + 0.8 * len(reports)), squeeze=False, layout="constrained",
        height_ratios=[len(report["layers"]) + 2 for report in reports.values()],
    )  # fmt: skip
    for axis, (name, report) in zip(axes[:, 0], reports.items(), strict=True):
        layers = report["layers"][::-1]
        axis.barh([layer["names"][0] for layer in layers], [layer["error"] or 0.0 for layer in layers])
        sizes = f"{bytes_text(report['before_bytes'])} → {bytes_text(report['after_bytes'])}"
        axis.set_title(f"{name}: {len(layers)} weights, {sizes}", loc="left")
        axis.set_xlabel("relative error of the weight (Frobenius)")
        axis.margins(y=0.01)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise InvalidArgumentError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _render(console: Console, document: dict[str, Any]) -> None:
    for method in document["methods"]:
        console.print(f"method {method['name']}", style="bold")
        compared = any(layer["rtn_error"] is not None for layer in method["layers"])
        measured = method["sensitivity"]
        rows = [
            (
                layer["names"][0] or "(the module itself)",
                " × ".join(map(str, layer["shape"])),
                f"{layer['error']:.4f}",
                *(("" if layer["rtn_error"] is None else f"{layer['rtn_error']:.4f}",) if compared else ()),
                *(() if measured is None else (_sensitivity_text(measured, layer["names"]),)),
                bytes_text(layer["before_bytes"]),
                bytes_text(layer["after_bytes"]),
                layer["note"],
            )
            for layer in method["layers"]
        ]
        errors = [">error", *([">rtn error"] if compared else []), *([] if measured is None else [">sensitivity"])]
        console.print(make_table(None, ("layer", "shape", *errors, ">before", ">after", "note"), rows))
        share = method["after_bytes"] / max(1, method["before_bytes"])
        sizes = [
            f"{bytes_text(method[f'{what}before_bytes'])} → {bytes_text(method[f'{what}after_bytes'])}"
            for what in ("", "module_")
        ]
        print_fields(
            console,
            [
                ("weights", f"{sizes[0]} ({share:.3f})"),
                ("module", sizes[1]),
                ("time", seconds_text(method["seconds"])),
                *(("left alone", f"{name}: {reason}") for name, reason in method["skipped"].items()),
            ],
        )
    for what in ("plot", "recipe"):
        if document[what] is not None:
            console.print(f"{what}: {document[what]}")


def _sensitivity_text(measured: Mapping[str, float], names: Sequence[str]) -> str:
    return next((f"{measured[name]:.2g}" for name in names if name in measured), "")
