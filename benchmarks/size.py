"""How much disk does each runtime take, and how large are the model files?

The installed size is what pip's RECORD lists, without byte code, numpy and pip itself; packages that a runtime
requires count too, and are shown apart.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import re
from typing import Any

from common import ROOT, WORK, Report, Table, arguments, ensure_models

RUNTIMES = {"untorch": "untorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "torch": "torch (CPU build)"}
LEFT_OUT = {"numpy", "pip"}
FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "MiniLM (float32 weights: 86.6 MiB)": {
        "untorch": ("minilm.pt2",),
        "torch, stock package": ("minilm_stock.pt2",),
        "torch, frozen weights": ("minilm_frozen.pt2",),
        "ONNX": ("minilm.onnx",),
        "OpenVINO": ("minilm.xml", "minilm.bin"),
    },
    "MLP 64-256-64 (float32 weights: 0.13 MiB)": {
        "untorch": ("mlp.pt2",),
        "torch, stock package": ("mlp_stock.pt2",),
        "torch, frozen weights": ("mlp_frozen.pt2",),
        "ONNX": ("mlp.onnx",),
    },
}


def canonical(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution_bytes(name: str) -> int:
    """Bytes of the files that RECORD lists; byte code, which pip makes itself, is left out."""
    total = 0
    for entry in importlib.metadata.distribution(name).files or ():
        path = pathlib.Path(str(entry.locate()))
        if path.suffix != ".pyc" and path.is_file():
            total += path.stat().st_size
    return total


def requirements(name: str) -> list[str]:
    """Installed distributions that ``name`` requires, directly or not, without extras."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for text in importlib.metadata.requires(waiting.pop()) or ():
            requirement, _, marker = text.partition(";")
            match = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
            if match is None or "extra" in marker:
                continue
            required = canonical(match.group())
            if required in found or required in LEFT_OUT or not installed(required):
                continue
            found.add(required)
            waiting.append(required)
    return sorted(found)


def installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def source_tree_bytes() -> int:
    """untorch's size when it runs from its source tree, with libraries that are not stripped."""
    spec = importlib.util.find_spec("untorch")
    if spec is None or spec.origin is None:
        raise SystemExit("untorch is not installed in this environment")
    files = pathlib.Path(spec.origin).parent.rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file() and path.suffix != ".pyc")


def mib(count: int) -> str:
    """Two digits or more, whatever the size."""
    return f"{count / 2**20:.1f}" if count >= 10 * 2**20 else f"{count / 2**20:.2f}"


def main() -> None:
    options = arguments(__doc__)
    ensure_models("minilm", "mlp")
    report = Report("size", options.quick)
    rows = []
    runtimes: dict[str, Any] = {}
    for name, label in RUNTIMES.items():
        from_record = installed(name)
        own = distribution_bytes(name) if from_record else source_tree_bytes()
        needed = {other: distribution_bytes(other) for other in requirements(name)} if from_record else {}
        runtimes[name] = {"bytes": own, "requirements": needed, "from_record": from_record}
        total = own + sum(needed.values())
        label += "" if from_record else " (source tree, not stripped)"
        rows.append([label, mib(own), mib(sum(needed.values())), mib(total), ", ".join(needed) or "none"])
    note = "MiB installed, without numpy, which all of them require or use."
    columns = ["Runtime", "Package", "Dependencies", "Total", "Names of dependencies"]
    report.tables["size_runtimes"] = Table(columns, rows, note)
    rows = []
    files: dict[str, Any] = {}
    for model, kinds in FILES.items():
        for kind, names in kinds.items():
            size = sum((WORK / name).stat().st_size for name in names)
            files["+".join(names)] = size
            rows.append([f"{model}, {kind}", mib(size)])
    report.tables["size_files"] = Table(["File", "MiB"], rows)
    report.values = {"runtimes": runtimes, "files": files, "directory": str(WORK.relative_to(ROOT))}
    report.write(options.output)


if __name__ == "__main__":
    main()
