"""Reads a .pt2 file for ``untorch inspect``: the archive, the manifest and the ELF headers. Runs nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from untorch.archive import MANIFEST, ArchiveReader
from untorch.cli.process import exported_functions
from untorch.runtime.coverage import describe_function, describe_kernel, needed_functions
from untorch.runtime.elf import parse_elf
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError

__all__ = ["describe_package"]

_METHODS = "data/aotinductor/"
_WEIGHTS = "data/weights/"
_DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?")
# Driver branches: what untorch calls came with CUDA 12.4, sm_100 and sm_120 with 12.8.
_OLDEST_DRIVER, _DRIVER_OF_BLACKWELL, _BLACKWELL = 550, 570, 100
_DRIVERS = {"12": 525, "13": 580}  # that take every cubin of a major version's tools
# torch's names of instruction sets, as Linux calls the features that decide.
_STOCK_FEATURES = {
    "AVX2": ("avx2", "fma"),
    "AVX512": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "AVX512_VNNI": ("avx512_vnni",),
}


def describe_package(path: str | Path, *, checksums: bool = False, device: str | None = None) -> dict[str, Any]:
    """What ``untorch inspect --json`` prints. Raises InvalidFileError; InvalidArgumentError for an unknown device."""
    if device is not None and not _DEVICE.fullmatch(device):
        raise InvalidArgumentError(f"--device {device}: expected cpu, cuda or cuda:<index>")
    with ArchiveReader(path) as archive:
        if checksums:
            archive.verify()
        manifest = archive.manifest() if archive.has_manifest() else None
        try:
            methods = (
                _own_methods(archive, manifest, device) if manifest is not None else _stock_methods(archive, device)
            )
            weights = _weights(manifest) if manifest is not None else None
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise InvalidFileError(f"{path}: {MANIFEST} is damaged: {error!r}") from None
        return {
            "file": str(path),
            "file_bytes": archive.file_size,
            "format": "untorch" if manifest is not None else "stock",
            "format_version": manifest["format_version"] if manifest is not None else None,
            "untorch_version": manifest.get("untorch_version") if manifest is not None else None,
            "torch_version": manifest.get("torch_version") if manifest is not None else None,
            "checksums": "all right" if checksums else None,
            "parts_bytes": _parts(archive),
            "weights": weights,
            "methods": methods,
        }


def _parts(archive: ArchiveReader) -> dict[str, int]:
    parts = {"libraries": 0, "weights": 0, "sources": 0, "descriptions": 0, "zip": 0}
    for entry in archive:
        if entry.name.endswith(".so"):
            kind = "libraries"
        elif entry.name.startswith(_WEIGHTS) or entry.name.endswith(".blob"):
            kind = "weights"
        elif entry.name.endswith((".cpp", ".h", ".cu", ".py")):
            kind = "sources"
        else:
            kind = "descriptions"
        parts[kind] += entry.size
    parts["zip"] = archive.file_size - sum(parts.values())
    return parts


def _weights(manifest: Mapping[str, Any]) -> dict[str, int]:
    users: dict[int, set[str]] = {}
    for name, method in manifest["methods"].items():
        for constant in method.get("constants", []):
            users.setdefault(constant["weight"], set()).add(name)
    sizes = [int(weight["nbytes"]) for weight in manifest["weights"]]
    return {
        "count": len(sizes),
        "bytes": sum(sizes),
        "shared": sum(len(names) > 1 for names in users.values()),
        "saved_bytes": sum(sizes[index] * (len(names) - 1) for index, names in users.items()),
    }


def _own_methods(archive: ArchiveReader, manifest: Mapping[str, Any], where: str | None) -> list[dict[str, Any]]:
    methods = []
    for name, spec in manifest["methods"].items():
        cpu = spec.get("cpu") or {}
        constants = spec["constants"]
        sizes = [int(weight["nbytes"]) for weight in manifest["weights"]]
        codes = [code for code in (spec, *spec.get("variants", ())) if "gpu_architecture" in code]
        entry = _method(
            archive, name, spec["device"], spec["library"], spec.get("extern_nodes"),
            cpu.get("target"), cpu.get("architecture"), list(cpu.get("features", ())),
            [code["gpu_architecture"] for code in codes], where,
        )  # fmt: skip
        entry["inputs"] = [_checked(item) for item in spec["inputs"]]
        entry["outputs"] = [None if item is None else _checked(item) for item in spec["outputs"]]
        entry["constants"] = {
            "count": len(constants),
            "bytes": sum(sizes[index] for index in {constant["weight"] for constant in constants}),
            "mutated": sum(bool(constant.get("mutated")) for constant in constants),
        }
        entry["gpu_codes"] = _gpu_codes(codes)
        entry["quantization"] = _quantization(spec.get("quantization") or [])
        methods.append(entry)
    return methods


def _quantization(weights: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What of a method's weights is quantised, in sums; None if nothing is."""
    if not weights:
        return None
    return {
        "dtypes": sorted({str(weight["dtype"]) for weight in weights}),
        "weights": len(weights),
        "bytes": sum(int(weight["nbytes"]) for weight in weights),
        "values": sum(math.prod(map(int, weight.get("shape") or weight["packed_shape"])) for weight in weights),
        "group_sizes": sorted({int(weight["group_size"]) for weight in weights}),
        "methods": sorted({str(weight["method"]) for weight in weights if "method" in weight}),
        "prefills": sorted({str(weight["prefill"]) for weight in weights if "prefill" in weight}),
    }


def _checked(item: Mapping[str, Any]) -> dict[str, Any]:
    if "constant" not in item and not (isinstance(item["dtype"], str) and isinstance(item["shape"], list)):
        raise TypeError(f"{item['name']!r} has no dtype or no shape")
    return {"name": str(item["name"]), **item}


def _stock_methods(archive: ArchiveReader, where: str | None) -> list[dict[str, Any]]:
    files: dict[str, list[str]] = {}
    for entry in archive:
        name, slash, file = entry.name.removeprefix(_METHODS).partition("/")
        if entry.name.startswith(_METHODS) and slash:
            files.setdefault(name, []).append(file)
    methods = []
    for name, names in files.items():
        libraries = [file for file in names if file.endswith(".so")]
        if not libraries:
            raise InvalidFileError(f"{archive.path}: method '{name}' has no model library")
        # Triton on the CPU packs several libraries; the wrapper is the model.
        library = next((file for file in libraries if file.endswith(".wrapper.so")), libraries[0])
        folder = f"{_METHODS}{name}/"
        metadata = _metadata(archive, folder, names, library)
        nodes = library.removesuffix(".so") + ".json"
        words = str(metadata.get("AOTI_CPU_ISA", "")).split()
        capability = str(metadata.get("AOTI_COMPUTE_CAPABILITY", ""))
        features = dict.fromkeys(feature for word in words for feature in _STOCK_FEATURES.get(word, ()))
        described = _method(
            archive, name, str(metadata.get("AOTI_DEVICE_KEY", "unknown")), folder + library,
            folder + nodes if nodes in names else None, "native" if words else None,
            metadata.get("AOTI_MACHINE"), list(features), [f"sm_{capability}"] if capability else [], where,
        )  # fmt: skip
        unknown = dict.fromkeys(("inputs", "outputs", "constants", "quantization", "gpu_codes"))
        methods.append({**described, **unknown})
    if not methods:
        raise InvalidFileError(f"{archive.path} holds no compiled model: it has no {_METHODS}<method>/*.so")
    return methods


def _metadata(archive: ArchiveReader, folder: str, names: list[str], library: str) -> dict[str, Any]:
    own = library.removesuffix(".so") + "_metadata.json"
    for file in (own, *(name for name in names if name.endswith("metadata.json"))):
        if file in names:
            document = _parse_json(archive, folder + file)
            return document if isinstance(document, dict) else {}
    return {}


def _parse_json(archive: ArchiveReader, name: str) -> Any:
    try:
        return json.loads(archive.read(name))
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"{archive.path}: {name} is not valid JSON: {error}") from None


def _method(
    archive: ArchiveReader, name: str, device: str, library: str, extern_nodes: str | None,
    target: str | None, architecture: str | None, features: list[str], gpus: list[str], where: str | None,
) -> dict[str, Any]:  # fmt: skip
    """What is known of every method, and whether it runs on this machine, on the device ``where`` if that is given."""
    from untorch import _core

    elf = parse_elf(archive.view(library), f"{archive.path}: {library}")
    here = set(_core.cpu_features().split())
    missing = [feature for feature in features if feature not in here]
    served = exported_functions()
    operators = [describe_function(function, served) for function in needed_functions(elf)]
    operators += _python_operators(archive, extern_nodes)
    problems = []
    if device.startswith("cuda"):
        problems += _gpu_problems(gpus, where)
    elif device != "cpu":
        problems.append(f"it is compiled for {device}, and untorch serves cpu and cuda")
    if where is not None and where.partition(":")[0] != device.partition(":")[0]:
        problems.append(f"it is compiled for {device}, not for {where}")
    if elf.machine != _core.cpu_architecture():
        problems.append(f"its library is for {elf.machine}, this machine is {_core.cpu_architecture()}")
    elif missing:
        problems.append(f"this CPU lacks {', '.join(missing)}")
    if lacking := [entry["name"] for entry in operators if not entry["served"]]:
        problems.append(f"not served: {', '.join(lacking)}")
    return {
        "name": name,
        "device": device,
        "gpu_architectures": gpus,
        "cpu": {
            "target": target,
            "architecture": architecture or elf.machine,
            "features": features,
            "missing": missing,
        },
        "library": {"file": library, "bytes": len(archive.view(library)), "needed": list(elf.needed)},
        "operators": operators,
        "runs_here": not problems,
        "problems": problems,
    }


def _gpu_codes(codes: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The code for each architecture: its assembler's version, and the oldest driver branch; PTX is never stored."""
    found = []
    for code in codes:
        architecture, ptxas = str(code["gpu_architecture"]), code.get("ptxas")
        needed = _DRIVERS.get(str(ptxas).partition(".")[0], 0)
        number = int(match[1]) if (match := re.fullmatch(r"sm_(\d+)", architecture)) else 0
        driver = max(_OLDEST_DRIVER, needed, _DRIVER_OF_BLACKWELL if number >= _BLACKWELL else 0)
        found.append({"architecture": architecture, "ptxas": ptxas, "ptx": False, "driver": driver})
    return found


def _gpu_problems(architectures: list[str], where: str | None) -> list[str]:
    """Why code for GPU architectures does not run here; a cubin runs within its major version."""
    from untorch.cli.machine import cuda_status

    status = cuda_status()
    if not status["served"]:
        return [f"it is compiled for CUDA, which does not work here: {status['note']}"]
    index = int(where.partition(":")[2] or 0) if where is not None else 0
    if index >= len(status["devices"]):
        return [f"there is no cuda:{index}: this machine has {len(status['devices'])} GPUs"]
    here = status["devices"][index]
    own = int(here["architecture"].removeprefix("sm_"))
    numbers = [int(match[1]) for name in architectures if (match := re.fullmatch(r"sm_(\d+)", name))]
    if numbers and not any(number // 10 == own // 10 and number <= own for number in numbers):
        return [
            f"it is compiled for {', '.join(architectures)}, cuda:{index} ({here['name']}) is {here['architecture']}"
        ]
    return []


def _python_operators(archive: ArchiveReader, extern_nodes: str | None) -> list[dict[str, Any]]:
    if extern_nodes is None:
        return []
    document = _parse_json(archive, extern_nodes)
    nodes = document.get("nodes") if isinstance(document, dict) else None
    targets: dict[str, None] = {}
    for node in nodes if isinstance(nodes, list) else ():
        inner = node.get("node") if isinstance(node, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("target"), str):
            raise InvalidFileError(f"{archive.path}: {extern_nodes}: a node has no target")
        targets[inner["target"]] = None
    return [describe_kernel(target) for target in targets]
