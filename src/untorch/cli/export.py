"""``untorch export``: a script's model into a .pt2 file, or a list of its operators."""

from __future__ import annotations

import difflib
import errno
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.options import (
    ArchOption,
    CpuOption,
    DebugOption,
    DeviceOption,
    FieldOption,
    JsonOption,
    OutputOption,
    QuantizeOption,
    QuietOption,
    RecipeOption,
    VerifyOption,
    WeightsOption,
)
from untorch.cli.output import bytes_text, emit, make_table, print_fields, seconds_text, shape_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["export", "parse_options", "quantization_text"]

# The names of pipelines in transformers, as causal_lm's tasks.
_TASKS = {
    "text-generation": "generate", "image-text-to-text": "generate", "feature-extraction": "embed",
    "text-classification": "classify",
}  # fmt: skip
_DTYPES = ("float32", "bfloat16", "float16")
_OTHER_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
}  # fmt: skip


def _list_tasks(wanted: bool) -> None:
    if not wanted:
        return
    _check_torch()
    from untorch.export.recipes.table import list_tasks

    rows = list_tasks()
    width = max(len(task) for task, _, _ in rows)
    for task, architectures, result in rows:  # a terminal's width would cut a table
        typer.echo(f"{task:{width}}  {architectures} → {result}")
    raise typer.Exit


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT:FUNCTION",
            help="A function that returns (model, args), (model, args, kwargs), a dictionary of export()'s "
            "arguments, or a dictionary of methods. SCRIPT is a .py file or a module. Or a Hugging Face folder, a name "
            "on the Hub (org/name), or a model of timm or torchvision (timm/resnet18).",
            show_default=False,
        ),
    ],
    output: OutputOption = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="List the operators that are called and those that are missing; write no file."),
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            metavar="TASK",
            help="Of a Hugging Face folder. text-generation: a causal language model for untorch generate. "
            "image-text-to-text: one that sees images. feature-extraction: one for embeddings. --list-tasks has the "
            "others. Default: by its config.json.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Of a Hugging Face folder: float32, bfloat16 or float16 weights. Default: as its config.json says.",
        ),
    ] = None,
    example_inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--example-input",
            metavar="NAME=SIZES:DTYPE",
            help="Of a Hugging Face folder without a recipe: an input, repeatable: "
            "input_ids=batch@2,sequence@16..512:int64 (dynamic axes by name), pixel_values=1,3,64,64:float32.",
        ),
    ] = None,
    state_dict: Annotated[
        str | None,
        typer.Option(
            "--state-dict",
            metavar="FILE",
            help='Of timm/… and torchvision/…: a state dict, or "random". Default: what the library downloads.',
        ),
    ] = None,
    list_tasks: Annotated[
        bool,
        typer.Option(
            "--list-tasks", help="List the tasks of Hugging Face folders.", callback=_list_tasks, is_eager=True
        ),
    ] = False,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            metavar="DTYPE",
            help="With --task: keep keys and values in int8 or fp8. Default: as the model.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="DIR",
            help="With --task text-generation: a smaller model with the same tokenizer, for --speculative draft.",
        ),
    ] = None,
    lora_layers: Annotated[
        str | None,
        typer.Option(
            "--lora-layers",
            metavar="LAYERS",
            help="With --task text-generation: the linear layers that adapters (LoRA) may change at run time: all, or "
            "names with commas, q_proj,v_proj.",
        ),
    ] = None,
    weights: WeightsOption = None,
    stream_weights: Annotated[
        bool,
        typer.Option(
            "--stream-weights",
            help="Keep large tensors in temporary files beside the package, for models larger than memory.",
        ),
    ] = False,
    device: DeviceOption = None,
    arch: ArchOption = None,
    cpu: CpuOption = None,
    quantize: QuantizeOption = None,
    recipe: RecipeOption = None,
    verify: VerifyOption = False,
    options: FieldOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also list the passes that changed nothing, and what they skipped.")
    ] = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compile a model into one .pt2 file that runs without PyTorch, for the CPU or the given device."""
    fields = parse_options(options or ())
    if cpu is not None:
        fields["cpu"] = tuple(cpu.split(",")) if "," in cpu else cpu
    if quantize is not None:
        # Beside its own options, --option quantize.group_size=64, it is their dtype.
        given = fields.get("quantize")
        fields["quantize"] = {"dtype": quantize, **given} if isinstance(given, dict) else quantize
    if recipe is not None and "quantize" in fields:
        raise typer.BadParameter("is in the place of --quantize and --option quantize", param_hint="--recipe")
    if verify:
        fields["verify"] = True
    if weights is not None:
        fields["weights"] = weights
    if stream_weights:
        fields["stream_weights"] = True
    if quiet or json:
        fields["progress"] = False
    if not check and output is None:
        raise typer.BadParameter("name the file to write, such as -o model.pt2", param_hint="--output")
    _check_torch()
    if quiet or json or not sys.stderr.isatty():
        # Read when transformers is imported; a bar would spill into files and pipes.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    import untorch.export
    from untorch.cli.script import export_arguments, load_models
    from untorch.export.options import resolve_options

    if recipe is not None:
        from untorch.quant.recipe import read_recipe

        fields["quantize"] = read_recipe(recipe)
    # A wrong option is an error before the script spends minutes loading a model.
    resolve_options(None, fields)
    from untorch.export.recipes.hub import is_model_name

    if task is not None or os.path.isdir(source) or is_model_name(source):
        engine: dict[str, Any] = {
            "kv_dtype": kv_dtype, "draft": draft, "state_dict": state_dict, "inputs": example_inputs or None,
        }  # fmt: skip
        if lora_layers is not None:
            names = [name.strip() for name in lora_layers.split(",")]
            engine["lora"] = True if names == ["all"] else [name for name in names if name]
        report = _export_task(
            source, task, dtype, output, check, device, arch, fields, engine,
        )  # fmt: skip
        document = {"source": source, **_describe(report)}
        if not quiet or json:
            emit(document, json, lambda console: _render(console, document, verbose))
        return
    if dtype is not None:
        raise typer.BadParameter("is for a Hugging Face folder", param_hint="--dtype")
    if example_inputs:
        raise typer.BadParameter("is for a Hugging Face folder", param_hint="--example-input")
    if state_dict is not None:
        raise typer.BadParameter("is for models of timm and torchvision", param_hint="--state-dict")
    if kv_dtype is not None:
        raise typer.BadParameter("is for --task text-generation", param_hint="--kv-dtype")
    if draft is not None:
        raise typer.BadParameter("is for --task text-generation", param_hint="--draft")
    if lora_layers is not None:
        raise typer.BadParameter("is for --task text-generation", param_hint="--lora-layers")
    if ":" not in source and not os.path.exists(source):
        from untorch.runtime.errors import file_error

        raise file_error(
            f"{source}: there is no such folder; expected a Hugging Face folder, or SCRIPT:FUNCTION such as "
            "model.py:build",
            errno.ENOENT,
            source,
        )
    model, keywords = export_arguments(load_models(source), source)
    archs = arch[0] if arch is not None and len(arch) == 1 else arch
    if check:
        from untorch.cli.forecast import forecast, render_forecast

        document = {"source": source, **forecast(model, keywords, fields, device, archs)}
        if not quiet or json:
            emit(document, json, lambda console: render_forecast(console, document))
        if document["missing"]:
            raise typer.Exit(1)
        return
    if device is not None:
        keywords = {**keywords, "device": device}
    if archs is not None:
        keywords = {**keywords, "arch": archs}
    report = untorch.export.export(model, path=output, **{**keywords, **fields})
    document = {"source": source, **_describe(report)}
    if not quiet or json:
        emit(document, json, lambda console: _render(console, document, verbose))


def _check_torch() -> None:
    from untorch.runtime.errors import UnsupportedError

    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError("export needs PyTorch: pip install 'untorch[export]'")


def _has_config(source: str) -> bool:
    return os.path.isfile(os.path.join(source, "config.json"))


def _export_task(
    source: str,
    task: str | None,
    dtype: str | None,
    output: Any,
    check: bool,
    device: str | None,
    arch: Any,
    fields: dict[str, Any],
    engine: dict[str, Any],
) -> Any:
    import torch

    import untorch.export
    from untorch.export.recipes.table import IMAGE_TASK, task_names

    if task is not None and task not in task_names():
        raise typer.BadParameter(f"expected {', '.join(task_names())}, got {task}", param_hint="--task")
    if check:
        raise typer.BadParameter("--check is not for --task", param_hint="--task")
    if dtype is not None and dtype not in _DTYPES:
        near = _OTHER_DTYPES.get(dtype.lower()) or next(iter(difflib.get_close_matches(dtype, _DTYPES, n=1)), None)
        hint = "" if near is None else f"; did you mean {near}?"
        raise typer.BadParameter(f"expected {', '.join(_DTYPES)}, got {dtype}{hint}", param_hint="--dtype")
    given = {
        "dtype": None if dtype is None else getattr(torch, dtype), "device": device or "cpu", "arch": arch, **fields,
    }  # fmt: skip
    from untorch.export.recipes.hub import library_model, read_folder

    if library_model(source) is None:
        source = str(read_folder(source))
    # Scores are an encoder's as well: its config tells which.
    own = {name: value for name in ("state_dict", "inputs") if (value := engine.pop(name)) is not None}
    engine |= own
    if task in _TASKS and not own and not (task == "text-classification" and _has_config(source)):
        if task == IMAGE_TASK:
            engine["images"] = True
        return untorch.export.causal_lm(source, output, task=_TASKS[task], **given, **engine)
    given |= {name: value for name, value in engine.items() if value is not None}
    return untorch.export.export_folder(source, output, task=task, **given)


def parse_options(texts: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """``["verify=true", "inductor.cpp.simdlen=8"]`` → fields of ExportOptions. Values are JSON, or else plain text."""
    import json

    from untorch.runtime.errors import InvalidArgumentError

    fields: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArgumentError(f"--option {text}: expected NAME=VALUE, such as pack_linears=false")
        lowered = value.lower()
        try:
            parsed = json.loads(lowered if lowered in ("true", "false") else "null" if lowered == "none" else value)
        except ValueError:
            parsed = value
        outer, dot, inner = name.partition(".")
        if dot:
            group = fields.setdefault(outer, {})
            if not isinstance(group, dict):
                raise InvalidArgumentError(f"--option {text}: {outer} was given as a whole before")
            group[inner] = parsed
        else:
            fields[name] = parsed
    return fields


def _describe(report: Any) -> dict[str, Any]:
    from untorch.archive import ArchiveReader
    from untorch.pipeline.describe import describe_calls

    with ArchiveReader(report.path) as archive:
        calls = describe_calls(archive.manifest(), str(report.path))
    return {
        "file": str(report.path),
        "file_bytes": report.nbytes,
        "weight_bytes": report.weight_nbytes,
        "external_files": list(report.external_files),
        "external_bytes": report.external_nbytes,
        "seconds": dict(report.seconds),
        "calls": None if calls is None else {"python": calls.python, "command": calls.command},
        "methods": [
            {
                "name": method.name,
                "inputs": method.inputs,
                "outputs": method.outputs,
                "operators": list(method.operators),
                "passes": [_fields(item) for item in method.passes],
                "differences": [_fields(item) for item in method.differences],
                "quantization": None if method.quantization is None else method.quantization.to_json(),
            }
            for method in report.methods.values()
        ],
    }


def _fields(item: Any) -> dict[str, Any]:
    import dataclasses

    return {
        field.name: value if isinstance(value := getattr(item, field.name), str | int | float | None) else _plain(value)
        for field in dataclasses.fields(item)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _render(console: Console, document: dict[str, Any], verbose: bool = False) -> None:
    for method in document["methods"]:
        console.print(f"method {method['name']}", style="bold")
        rows = [("input", *_type_of(item)) for item in method["inputs"]]
        rows += [("output", *(("None", "", "") if item is None else _type_of(item))) for item in method["outputs"]]
        console.print(make_table(None, ("", "name", "dtype", "shape"), rows))
        if method["quantization"] is not None:
            console.print(f"quantised: {quantization_text(method['quantization'])}", soft_wrap=True)
        _render_passes(console, method["passes"], verbose)
        for item in method["differences"]:
            values = [f"{key} {_text(value)}" for key, value in item.items() if key != "name"]
            console.print(f"verified {item.get('name', '')}: {', '.join(values)}", soft_wrap=True)
        console.print(f"functions of the runtime: {len(method['operators'])}\n")
    steps = ", ".join(f"{name} {seconds_text(value)}" for name, value in document["seconds"].items())
    size = f"{bytes_text(document['file_bytes'])}, weights {bytes_text(document['weight_bytes'])}"
    fields = [("time", steps), ("written", f"{document['file']} ({size})")]
    if document["external_files"]:
        left = f"{bytes_text(document['external_bytes'])} of the weights, in {', '.join(document['external_files'])}"
        fields.insert(1, ("not stored", left))
    if document["calls"] is not None:
        fields.append(("next", document["calls"]["command"] or document["calls"]["python"]))
    print_fields(console, fields)


def _render_passes(console: Console, passes: list[dict[str, Any]], verbose: bool) -> None:
    shown = [item for item in passes if verbose or item["changed"]]
    for item in shown:
        values = [
            f"{key.replace('_', ' ')}: {_text(value)}"
            for key, value in item.items()
            if key != "name" and value and (verbose or key == "changed")
        ]
        console.print(f"pass {item['name']}: {'; '.join(values) or 'nothing to do'}", soft_wrap=True)
    if left := len(passes) - len(shown):
        console.print(f"passes that changed nothing: {left} (--verbose lists them)")


def quantization_text(report: dict[str, Any]) -> str:
    """A quantisation report in one line; the whole is in --json and in ``untorch quantize-report``."""
    layers = report["layers"]
    if not layers:
        return "nothing: the method has no linear layer"
    worst = max(layers, key=lambda layer: layer["error"] or 0.0)
    text = (
        f"{len(layers)} weights, {bytes_text(report['before_bytes'])} → {bytes_text(report['after_bytes'])}, largest "
        f"error {worst['error'] or 0.0:.3g} ({worst['names'][0] or 'the module itself'})"
    )
    notes = [f"{layer['names'][0]}: {layer['note']}" for layer in layers if layer["kept_by"]]
    skipped = [f"left alone: {name} ({reason})" for name, reason in report["skipped"].items()]
    return "; ".join([text, *notes, *skipped])


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return str(len(value)) if len(value) > 3 else ", ".join(map(str, value))
    return str(value)


def _type_of(item: dict[str, Any]) -> tuple[str, str, str]:
    if "constant" in item:
        return item["name"], "constant", repr(item["constant"])
    return item["name"], item["dtype"], shape_text(item["shape"])
