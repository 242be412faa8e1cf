"""``untorch inspect``: a file's contents, and whether this machine runs it. The model is neither opened nor run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.options import DebugOption, DeviceOption, FileArgument, JsonOption
from untorch.cli.output import bytes_text, emit, make_table, one_line, print_fields, shape_text

if TYPE_CHECKING:
    from rich.console import Console

_MAX_METHODS = 40  # a text is for people
_MAX_LABELS = 12
_TASK_WORDS = {"generate": "generates", "embed": "embeds", "classify": "classifies"}

__all__ = ["inspect"]


def inspect(
    file: FileArgument,
    operators: Annotated[bool, typer.Option("--operators", help="List all needed functions and operators.")] = False,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Read the whole file first, like untorch verify.")
    ] = False,
    graph: Annotated[
        Path | None,
        typer.Option("--graph", metavar="PATH", help="Also draw the methods, into an .svg or .html file."),
    ] = None,
    device: DeviceOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a file holds and whether it runs here, or on the given device."""
    from untorch.cli.package import describe_package

    document = describe_package(file, checksums=checksums, device=device)
    if graph is not None:
        from untorch.cli.graph import write_graph

        write_graph(file, graph)
    document["graph"] = None if graph is None else str(graph)
    emit(document, json, lambda console: _render(console, document, operators))


def _render(console: Console, document: dict[str, Any], operators: bool) -> None:
    kind = "untorch" if document["format"] == "untorch" else "stock AOTInductor package"
    if document["untorch_version"] is not None:
        kind += f" {document['untorch_version']} (format {document['format_version']})"
    weights = document["weights"]
    fields: list[tuple[str, object]] = [
        ("file", f"{document['file']} ({bytes_text(document['file_bytes'])})"),
        ("written by", f"{kind}, torch {document['torch_version'] or 'unknown'}"),
        ("parts", ", ".join(f"{name} {bytes_text(size)}" for name, size in document["parts_bytes"].items() if size)),
    ]
    if weights is not None:
        text = f"{weights['count']} distinct, {bytes_text(weights['bytes'])}"
        if weights["shared"]:
            text += f"; {weights['shared']} used by several methods (saves {bytes_text(weights['saved_bytes'])})"
        fields.append(("weights", text))
    for external in document["external_files"][:_MAX_METHODS]:
        text = f"{external['weights']} weights, {bytes_text(external['bytes'])}, in {one_line(external['file'])}"
        fields.append(("not in the file", text))
    if document["language_model"] is not None:
        fields.append(("language model", _language_model(document["language_model"])))
    fields += _pipeline(document["pipeline"])
    if document["calls"] is not None:
        calls = [call for call in (document["calls"]["python"], document["calls"]["command"]) if call is not None]
        fields += [("call" if index == 0 else "", one_line(call)) for index, call in enumerate(calls)]
    if document["checksums"] is not None:
        fields.append(("checksums", document["checksums"]))
    if document["graph"] is not None:
        fields.append(("graph", f"written to {document['graph']}"))
    print_fields(console, fields)
    for method in document["methods"][:_MAX_METHODS]:
        _render_method(console, method, operators)
    if (left := len(document["methods"]) - _MAX_METHODS) > 0:
        console.print(f"\n… and {left} more methods; --json has all")


def _render_method(console: Console, method: dict[str, Any], operators: bool) -> None:
    console.print()
    console.print(f"method {one_line(method['name'])}", style="bold")
    cpu = method["cpu"]
    needs = ", ".join(cpu["features"]) or "nothing beyond the architecture's baseline"
    missing = f"; this machine lacks {', '.join(cpu['missing'])}" if cpu["missing"] else ""
    print_fields(
        console,
        [
            ("device", ", ".join([method["device"], *method["gpu_architectures"]])),
            *([("TF32", _tf32(method["tf32"]))] if method["tf32"] else []),
            *[(f"code for {code['architecture']}", _gpu_code(code)) for code in method["gpu_codes"] or ()],
            ("CPU", f"{cpu['architecture']}, target {cpu['target'] or 'unknown'}{_others(cpu)}"),
            ("CPU features", needs + missing),
            ("library", f"{method['library']['file']} ({bytes_text(method['library']['bytes'])})"),
            ("runs here", "yes" if method["runs_here"] else f"no: {'; '.join(method['problems'])}"),
        ],
    )
    if method["inputs"] is None:
        console.print("inputs and outputs: a stock package does not tell")
    else:
        entries = [("input", item) for item in method["inputs"]] + [("output", item) for item in method["outputs"]]
        types = [(kind, *_type_of(item)) for kind, item in entries]
        console.print(make_table(None, ("", "name", "dtype", "shape"), types))
    if method["constants"] is not None:
        constants = method["constants"]
        mutated = f", {constants['mutated']} of them changed by calls" if constants["mutated"] else ""
        console.print(f"constants: {constants['count']}, {bytes_text(constants['bytes'])}{mutated}")
    if method["quantization"] is not None:
        quantized = method["quantization"]
        groups = "a scale an output"
        if quantized["scale_blocks"]:
            groups = "a scale for 128 × 128 weights"
        if set(quantized["dtypes"]) - {"int8", "fp8"}:
            groups = f"groups of {', '.join(map(str, quantized['group_sizes']))}"
        how = f", {', '.join(quantized['methods'])}" if quantized["methods"] else ""
        if quantized["prefills"]:
            how += f", prefill in {', '.join(quantized['prefills'])}"
        if quantized["int8_activations"]:
            how += ", activations in int8"
        bits = 8 * quantized["bytes"] / max(1, quantized["values"])
        console.print(
            f"quantised: {quantized['weights']} weights in {', '.join(quantized['dtypes'])}, "
            f"{bytes_text(quantized['bytes'])} ({bits:.2f} bits a weight), {groups}{how}"
        )
    lacking = [entry for entry in method["operators"] if not entry["served"]]
    console.print(f"needed functions and operators: {len(method['operators'])}, not served: {len(lacking)}")
    if shown := method["operators"] if operators else lacking:
        rows = [(e["name"], e["kind"], "yes" if e["served"] else f"no {e.get('reason', '')}".strip()) for e in shown]
        console.print(make_table(None, ("name", "kind", "served"), rows))


def _pipeline(found: dict[str, Any] | None) -> list[tuple[str, object]]:
    if found is None:
        return []
    if "error" in found:
        return [("pipeline", one_line(found["error"]))]
    fields: list[tuple[str, object]] = [("task", f"{one_line(found['task'])}, {one_line(found['architecture'])}")]
    if found["labels"] is not None:
        labels = [one_line(label) for label in found["labels"]]
        more = f" … and {len(labels) - _MAX_LABELS} more; --json has all" if len(labels) > _MAX_LABELS else ""
        fields.append(("labels", f"{len(labels)}: {', '.join(labels[:_MAX_LABELS])}{more}"))
    return [*fields, ("front end", one_line(found["front_end"]))]


def _language_model(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    text = (
        f"{found['architecture']}, {_TASK_WORDS[found['task']]}, {found['max_positions']} positions, vocabulary of "
        f"{found['vocabulary']}; keys and values {bytes_text(found['kv_bytes_a_token'])} a token in {found['kv_dtype']}"
    )
    if (kept := found["kv_bytes_a_token_behind_windows"]) != found["kv_bytes_a_token"]:
        text += f" ({bytes_text(kept) if kept else 'none'} behind windows)"
    if found["state_bytes_a_sequence"]:
        text += f", states {bytes_text(found['state_bytes_a_sequence'])} a sequence"
    return text


def _others(cpu: dict[str, Any]) -> str:
    others = [target or "unknown" for target in cpu["targets"] if target != cpu["target"]]
    return f"; code for {', '.join(others)} as well" if others else ""


def _tf32(allowed: dict[str, bool]) -> str:
    names = {"convolution": "convolutions", "matmul": "GEMMs"}
    return f"in {' and '.join(names[name] for name in names if allowed[name])}" if any(allowed.values()) else "nowhere"


def _gpu_code(code: dict[str, Any]) -> str:
    return f"ptxas {code['ptxas'] or 'unknown'}, no PTX; driver {code['driver']} or newer"


def _type_of(entry: dict[str, Any] | None) -> tuple[str, str, str]:
    if entry is None:
        return "None", "", ""
    if "constant" in entry:
        return entry["name"], "constant", repr(entry["constant"])
    return entry["name"], entry["dtype"], shape_text(entry["shape"])
