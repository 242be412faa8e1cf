"""``untorch inspect --graph``: draws a package's methods: inputs, kernels by module, weights by size, passes.

Modules whose kernels are alike are drawn once, with how many there are. The file is read as ``untorch inspect`` reads
it; the model is neither opened nor run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from untorch.archive import ArchiveReader
from untorch.cli.output import bytes_text, shape_text
from untorch.cli.svg import Svg, fit
from untorch.files import write_text
from untorch.profiler.sequence import Call, CallSequence, parse_sequence
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError
from untorch.runtime.text import escape_controls

__all__ = ["draw_package", "write_graph"]

_WIDTH, _MARGIN, _GAP = 1160, 24, 24
_FLOW = 640  # width of the flow; weights and passes are beside it
_ROW, _PAD = 24, 10
_MAX_PERIOD = 8
_MAX_ROWS, _MAX_WEIGHTS, _MAX_METHODS, _MAX_CHANGES = 400, 24, 40, 3

_KINDS = {
    "GEMM": ("#dbeafe", "#1d4ed8"),
    "convolution": ("#ede9fe", "#6d28d9"),
    "attention": ("#fce7f3", "#be185d"),
    "fused loop": ("#dcfce7", "#15803d"),
    "other function": ("#f1f5f9", "#475569"),
}
_GEMM = re.compile(r"mm\b|_linear|matmul|mm_out|grouped_mm|moe")
_DTYPES = {
    "float32": "#60a5fa", "float16": "#34d399", "bfloat16": "#2dd4bf", "int8": "#f59e0b", "uint8": "#f97316",
    "int32": "#a78bfa", "int64": "#c084fc", "bool": "#94a3b8",
}  # fmt: skip
_OTHER_DTYPE = "#f472b6"


@dataclass(frozen=True)
class _Group:
    """Calls of one module behind each other."""

    module: str
    calls: tuple[Call, ...]

    @property
    def looks(self) -> tuple[Any, ...]:
        """What makes two of them alike: all but the numbers in names."""
        return (_plain(self.module), tuple((_plain(call.name), call.operators) for call in self.calls))


@dataclass(frozen=True)
class _Repeat:
    """Groups that occur ``count`` times behind each other; the first of them, and the last's module."""

    groups: tuple[_Group, ...]
    count: int
    last: str


def write_graph(path: Path, target: Path) -> None:
    """Draws the package ``path`` into an .svg or .html file. Raises InvalidArgumentError for another ending."""
    kind = target.suffix.lower()
    if kind not in (".svg", ".html"):
        raise InvalidArgumentError(f"--graph {target}: expected a name that ends with .svg or .html")
    picture, weights = draw_package(path)
    if kind == ".html":
        picture = _page(path.name, picture, weights)
    write_text(target, picture)


def draw_package(path: Path) -> tuple[str, list[tuple[str, str, str, int]]]:
    """The picture as SVG; and each weight's name, dtype, shape and bytes, the largest first.

    Raises InvalidFileError for a stock package, which says nothing of what is drawn.
    """
    with ArchiveReader(path) as archive:
        if not archive.has_manifest():
            raise InvalidFileError(f"{path}: a stock package has no manifest that --graph could draw")
        manifest = archive.manifest()
        sequences = {name: _sequence(archive, spec) for name, spec in manifest["methods"].items()}
        size = archive.file_size
    picture = Svg(_WIDTH)
    weights = _weights(manifest, list(manifest["methods"]))
    total = sum(entry["nbytes"] for entry in manifest["weights"])
    picture.text(_MARGIN, 34, path.name, 20, weight=700)
    about = f"{bytes_text(size)} · {len(manifest['weights'])} distinct weights, {bytes_text(total)}"
    picture.text(_MARGIN, 54, f"{about} · torch {manifest.get('torch_version', 'unknown')}", 12, "#475569")
    y = _legend(picture, 76)
    names = list(manifest["methods"])
    for name in names[:_MAX_METHODS]:
        spec = manifest["methods"][name]
        y = _method(picture, y + _GAP, name, spec, sequences[name], _weights(manifest, [name]))
    if len(names) > _MAX_METHODS:
        picture.text(_MARGIN, y + _GAP, f"… and {len(names) - _MAX_METHODS} more methods", 12, "#475569")
    return picture.render(f"{path.name}: methods, kernels and weights"), weights


def _sequence(archive: ArchiveReader, spec: dict[str, Any]) -> CallSequence:
    entry = spec.get("kernel_calls")
    if not isinstance(entry, str) or entry not in archive.entries:
        return CallSequence()
    return parse_sequence(bytes(archive.read(entry)), {})


def _weights(manifest: dict[str, Any], methods: list[str]) -> list[tuple[str, str, str, int]]:
    found: dict[tuple[int, str], tuple[str, str, str, int]] = {}
    for name in methods:
        for constant in manifest["methods"][name]["constants"]:
            nbytes = int(manifest["weights"][constant["weight"]]["nbytes"])
            shape = shape_text(constant["shape"])
            found.setdefault(
                (constant["weight"], constant["fqn"]), (str(constant["fqn"]), str(constant["dtype"]), shape, nbytes)
            )
    return sorted(found.values(), key=lambda weight: (-weight[3], weight[0]))


def _legend(picture: Svg, y: float) -> float:
    x: float = _MARGIN
    for kind, (fill, stroke) in _KINDS.items():
        picture.rectangle(x, y - 10, 14, 14, fill, stroke)
        picture.text(x + 20, y + 1, kind, 11, "#475569")
        x += 44 + 7 * len(kind)
    return y + 4


def _method(
    picture: Svg, y: float, name: str, spec: dict[str, Any], sequence: CallSequence,
    weights: list[tuple[str, str, str, int]],
) -> float:  # fmt: skip
    """One method from ``y`` on; where it ends."""
    picture.line(_MARGIN, y, _WIDTH - _MARGIN, y, "#e2e8f0")
    device = ", ".join([spec["device"], *([spec["gpu_architecture"]] if spec.get("gpu_architecture") else [])])
    picture.text(_MARGIN, y + 26, f"method {fit(name, 400, 16)}", 16, weight=700)
    picture.text(_WIDTH - _MARGIN, y + 26, device, 12, "#475569", anchor="end")
    left = _flow(picture, y + 44, spec, sequence)
    x = _MARGIN + _FLOW + _GAP
    right = _draw_weights(picture, x, y + 44, weights)
    right = _draw_passes(picture, x, right + 20, sequence)
    return max(left, right)


def _flow(picture: Svg, y: float, spec: dict[str, Any], sequence: CallSequence) -> float:
    middle = _MARGIN + _FLOW / 2
    y = _tensors(picture, y, "inputs", spec["inputs"])
    repeats = _repeats(_groups(sequence.calls))
    if not sequence.calls:
        picture.arrow(middle, y, y + 18)
        picture.rectangle(_MARGIN, y + 18, _FLOW, 34, "#f8fafc", "#cbd5e1")
        text = "the file does not say what its code calls (exported by an older version)"
        picture.text(middle, y + 40, text, 12, "#475569", anchor="middle")
        y += 52
    rows = 0
    for repeat in repeats:
        if rows > _MAX_ROWS:
            picture.text(middle, y + 26, "… more kernels are not drawn", 12, "#475569", anchor="middle")
            y += 30
            break
        picture.arrow(middle, y, y + 18)
        y = _draw_repeat(picture, y + 18, repeat)
        rows += sum(len(group.calls) for group in repeat.groups)
    picture.arrow(middle, y, y + 18)
    return _tensors(picture, y + 18, "outputs", spec["outputs"])


def _tensors(picture: Svg, y: float, title: str, entries: Sequence[Any]) -> float:
    shown = [entry for entry in entries if entry is not None]
    height = 14 + 18 * max(len(shown), 1)
    picture.rectangle(_MARGIN, y, _FLOW, height, "#fffbeb", "#d97706")
    picture.text(_MARGIN + _PAD, y + 20, title, 12, "#92400e", 700)
    for row, entry in enumerate(shown):
        if "constant" in entry:
            text = f"{entry['name']} = {entry['constant']!r}"
        else:
            text = f"{entry['name']}: {entry['dtype']}{shape_text(entry['shape'])}"
            text += " (written)" if entry.get("mutated") else ""
        picture.text(_MARGIN + 90, y + 20 + 18 * row, fit(text, _FLOW - 100, 12), 12, mono=True)
    return y + height


def _draw_repeat(picture: Svg, y: float, repeat: _Repeat) -> float:
    start = y
    inset = _PAD if repeat.count > 1 else 0
    height = 2 * inset + sum(_height(group) for group in repeat.groups) + 6 * (len(repeat.groups) - 1)
    if repeat.count > 1:
        picture.rectangle(_MARGIN + 6, y + 6, _FLOW, height, "#f1f5f9", "#cbd5e1", 8)  # a stack of cards
        picture.rectangle(_MARGIN, y, _FLOW, height, "#f8fafc", "#64748b", 8)
        label = f"× {repeat.count}"
        picture.rectangle(_MARGIN + _FLOW - 52, y - 9, 46, 20, "#0f172a", radius=10)
        picture.text(_MARGIN + _FLOW - 29, y + 5, label, 12, "#ffffff", 700, "middle")
    y += inset
    for place, group in enumerate(repeat.groups):
        y = _draw_group(picture, y + (6 if place else 0), group, inset, repeat)
    return start + height


def _height(group: _Group) -> float:
    return 2 * _PAD + (18 if group.module else 0) + _ROW * len(group.calls)


def _draw_group(picture: Svg, y: float, group: _Group, inset: float, repeat: _Repeat) -> float:
    x, width = _MARGIN + inset, _FLOW - 2 * inset
    picture.rectangle(x, y, width, _height(group), "#ffffff", "#cbd5e1")
    top = y + _PAD
    if group.module:
        title = group.module
        if repeat.count > 1 and group is repeat.groups[0] and repeat.last != group.module:
            title += f" … {repeat.last}"
        picture.text(x + _PAD, top + 10, fit(title, width - 2 * _PAD, 12), 12, "#334155", 700)
        top += 18
    for call in group.calls:
        fill, stroke = _KINDS[_kind(call)]
        tooltip = "\n".join([call.name, ", ".join(call.operators), *call.lines])
        picture.rectangle(x + _PAD, top, width - 2 * _PAD, _ROW - 4, fill, stroke, tooltip=tooltip)
        name = call.name.removeprefix("aoti_torch_").removeprefix("cpu_").removeprefix("cuda_").removeprefix("untorch_")
        if not call.is_function:
            name = " + ".join(dict.fromkeys(op.rpartition(".")[2] for op in call.operators)) or call.name
        where = call.lines[0].rpartition("/")[2] if call.lines else ""
        picture.text(x + 2 * _PAD, top + 14, fit(name, width - 240, 12), 11, stroke, 600)
        picture.text(x + width - 2 * _PAD, top + 14, fit(where, 190, 11), 10, "#64748b", anchor="end", mono=True)
        top += _ROW
    return y + _height(group)


def _draw_weights(picture: Svg, x: float, y: float, weights: list[tuple[str, str, str, int]]) -> float:
    width = _WIDTH - _MARGIN - x
    picture.text(x, y + 12, f"weights: {len(weights)}", 13, weight=700)
    y += 22
    by_dtype: dict[str, int] = {}
    for _, dtype, _, nbytes in weights:
        by_dtype[dtype] = by_dtype.get(dtype, 0) + nbytes
    total = max(sum(by_dtype.values()), 1)
    at = x
    for dtype, nbytes in sorted(by_dtype.items(), key=lambda item: -item[1]):
        part = width * nbytes / total
        colour = _DTYPES.get(dtype, _OTHER_DTYPE)
        picture.rectangle(at, y, part, 14, colour, radius=0, tooltip=f"{dtype}: {bytes_text(nbytes)}")
        at += part
    y += 28
    for dtype, nbytes in sorted(by_dtype.items(), key=lambda item: -item[1])[:8]:
        picture.rectangle(x, y - 9, 10, 10, _DTYPES.get(dtype, _OTHER_DTYPE), radius=2)
        picture.text(x + 16, y, f"{dtype}: {bytes_text(nbytes)}", 11, "#475569")
        y += 16
    largest = max((nbytes for *_, nbytes in weights), default=1) or 1
    for name, dtype, shape, nbytes in weights[:_MAX_WEIGHTS]:
        y += 6
        bar = max(width * nbytes / largest, 1)
        picture.text(x, y + 8, fit(name, width - 150, 11), 11)
        picture.text(x + width, y + 8, f"{shape} {bytes_text(nbytes)}", 10, "#64748b", anchor="end", mono=True)
        picture.rectangle(
            x, y + 13, bar, 5, _DTYPES.get(dtype, _OTHER_DTYPE), radius=2, tooltip=f"{name}: {dtype}{shape}"
        )
        y += 20
    if len(weights) > _MAX_WEIGHTS:
        rest = sum(nbytes for *_, nbytes in weights[_MAX_WEIGHTS:])
        picture.text(x, y + 14, f"… and {len(weights) - _MAX_WEIGHTS} more, {bytes_text(rest)}", 11, "#475569")
        y += 18
    return y


def _draw_passes(picture: Svg, x: float, y: float, sequence: CallSequence) -> float:
    """What the export fused and replaced."""
    width = _WIDTH - _MARGIN - x
    if not sequence.passes:
        return y
    picture.text(x, y + 12, "fused and replaced by the export", 13, weight=700)
    y += 22
    for name, changes in sequence.passes:
        picture.text(x, y + 10, fit(f"{name.replace('_', ' ')}: {len(changes)}", width, 11), 11, "#334155", 600)
        y += 16
        for change in changes[:_MAX_CHANGES]:
            picture.text(x + 10, y + 9, fit(change, width - 10, 10), 10, "#64748b", mono=True)
            y += 14
        if len(changes) > _MAX_CHANGES:
            picture.text(x + 10, y + 9, f"… {len(changes) - _MAX_CHANGES} more", 10, "#64748b")
            y += 14
        y += 4
    return y


def _kind(call: Call) -> str:
    text = f"{call.name if call.is_function else ''} {' '.join(call.operators)}"  # a loop is named for its neighbours
    if "attention" in text:
        return "attention"
    if "convolution" in text:
        return "convolution"
    if _GEMM.search(text):
        return "GEMM"
    return "other function" if call.is_function else "fused loop"


def _plain(text: str) -> str:
    """The text without its numbers."""
    return re.sub(r"\d+", "#", text)


def _group_name(module: str) -> str:
    """The layer of a module: the path up to its first number, else its first part."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: place + 1])
    return parts[0]


def _groups(calls: Sequence[Call]) -> list[_Group]:
    groups: list[_Group] = []
    for call in calls:
        name = _group_name(call.module)
        if groups and groups[-1].module == name:
            groups[-1] = _Group(name, (*groups[-1].calls, call))
        else:
            groups.append(_Group(name, (call,)))
    return groups


def _repeats(groups: list[_Group]) -> list[_Repeat]:
    """Joins runs of groups that are alike; the period that covers most is taken."""
    looks = [group.looks for group in groups]
    found: list[_Repeat] = []
    at = 0
    while at < len(groups):
        best, period = 1, 1
        for length in range(1, min(_MAX_PERIOD, (len(groups) - at) // 2) + 1):
            count = 1
            while looks[at + count * length : at + (count + 1) * length] == looks[at : at + length]:
                count += 1
            if count > 1 and count * length > best * period:
                best, period = count, length
        last = groups[at + (best - 1) * period].module
        found.append(_Repeat(tuple(groups[at : at + period]), best, last))
        at += best * period
    # A module's calls that were made as a function have its name in each call: one group with a repeated content.
    return [_unrolled(repeat) for repeat in found]


def _unrolled(repeat: _Repeat) -> _Repeat:
    """A group whose own calls repeat, such as the calls of a layer's function, as one of them and a count."""
    if repeat.count > 1 or len(repeat.groups) > 1:
        return repeat
    [group] = repeat.groups
    looks = [(_plain(call.name), call.operators) for call in group.calls]
    for length in range(1, len(looks) // 2 + 1):
        if len(looks) % length == 0 and looks == looks[:length] * (len(looks) // length):
            return _Repeat((_Group(group.module, group.calls[:length]),), len(looks) // length, group.module)
    return repeat


def _page(name: str, picture: str, weights: list[tuple[str, str, str, int]]) -> str:
    """A page with the picture and a table of all weights."""
    rows = "".join(
        f"<tr><td>{_cell(weight)}</td><td>{_cell(dtype)}</td><td>{_cell(shape)}</td>"
        f"<td class=right>{bytes_text(nbytes)}</td></tr>"
        for weight, dtype, shape, nbytes in weights
    )
    style = (
        "body{font-family:system-ui,sans-serif;margin:24px auto;max-width:1200px;color:#0f172a}"
        "table{border-collapse:collapse;font-size:13px}td,th{padding:3px 14px 3px 0;text-align:left}"
        ".right{text-align:right}svg{max-width:100%;height:auto}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_cell(name)}</title><style>{style}</style>'
        f"<body>{picture}<h2>All weights</h2><table><tr><th>name</th><th>dtype</th><th>shape</th><th>bytes</th></tr>"
        f"{rows}</table></body></html>\n"
    )


def _cell(text: str) -> str:
    return escape(escape_controls(text))
