"""Reads a .pt2 file for ``untorch inspect``: the archive, the manifest and the ELF headers. Runs nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from untorch.archive import ArchiveReader
from untorch.cli.process import exported_functions
from untorch.pipeline.describe import describe_calls, describe_pipeline
from untorch.runtime.coverage import describe_function, describe_kernel, needed_functions
from untorch.runtime.elf import parse_elf
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UntorchError

__all__ = ["describe_package"]

_WEIGHTS = "data/weights/"
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
_ARCHITECTURE = re.compile(r"sm_([0-9]{1,4})")
_MAX_SYMBOLS = 20_000  # of a library; models have some hundreds
_MAX_NODES = 10_000
# Driver branches: what untorch calls came with CUDA 12.4, sm_100 and sm_120 with 12.8.
_OLDEST_DRIVER, _DRIVER_OF_BLACKWELL, _BLACKWELL = 550, 570, 100
_DRIVERS = {"12": 525, "13": 580}  # that take every cubin of a major version's tools


def describe_package(path: str | Path, *, checksums: bool = False, device: str | None = None) -> dict[str, Any]:
    """What ``untorch inspect --json`` prints. Raises InvalidFileError; InvalidArgumentError for an unknown device.

    The loader's reader has checked every value of the manifest that is used here.
    """
    if device is not None and not _DEVICE.fullmatch(device):
        raise InvalidArgumentError(f"--device {device}: expected cpu, cuda or cuda:<index>")
    with ArchiveReader(path) as archive:
        if checksums:
            archive.verify()
            archive.verify_external()
        known = archive.methods()
        manifest = archive.manifest() if archive.has_manifest() else None
        calls = None if manifest is None else describe_calls(manifest, str(path))
        return {
            "file": str(path),
            "file_bytes": archive.file_size,
            "format": "untorch" if manifest is not None else "stock",
            "format_version": manifest["format_version"] if manifest is not None else None,
            "untorch_version": manifest.get("untorch_version") if manifest is not None else None,
            "torch_version": manifest.get("torch_version") if manifest is not None else None,
            "checksums": "all right" if checksums else None,
            "parts_bytes": _parts(archive),
            "weights": _weights(manifest) if manifest is not None else None,
            "external_files": _external(manifest) if manifest is not None else [],
            "language_model": _language_model(manifest, str(path)) if manifest is not None else None,
            "pipeline": describe_pipeline(manifest, str(path)) if manifest is not None else None,
            "calls": None if calls is None else {"python": calls.python, "command": calls.command},
            "methods": _methods(archive, known, manifest, device),
        }


def _language_model(manifest: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """What the engine for language models would read; None for other packages."""
    from untorch.llm.settings import KV_ITEMSIZE, read_settings

    if "llm" not in manifest:
        return None
    try:
        settings = read_settings(manifest, path)
    except UntorchError as error:
        return {"error": str(error)}
    row = settings.block_elements * KV_ITEMSIZE[settings.dtype]
    return {
        "architecture": settings.architecture,
        "task": settings.task,
        "vocabulary": settings.vocabulary,
        "max_positions": settings.max_positions,
        "kv_dtype": settings.dtype,
        "kv_bytes_a_token": sum(row // group.size for group in settings.groups),
        "kv_bytes_a_token_behind_windows": sum(row // group.size for group in settings.groups if group.sees_all),
        "state_bytes_a_sequence": 4 * settings.state_elements,
        "inputs_embeds": bool(settings.embeds),
        "tokenizer": settings.tokenizer is not None,
        "chat_template": settings.chat_template is not None,
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
    sizes = [weight["nbytes"] for weight in manifest["weights"]]
    return {
        "count": len(sizes),
        "bytes": sum(sizes),
        "shared": sum(len(names) > 1 for names in users.values()),
        "saved_bytes": sum(sizes[index] * (len(names) - 1) for index, names in users.items()),
    }


def _external(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The .safetensors files that weights are taken from, and how many of them."""
    files = [{"file": name, "weights": 0, "bytes": 0} for name in manifest.get("external_files", [])]
    for weight in manifest["weights"]:
        if "external" in weight:
            files[weight["external"]]["weights"] += 1
            files[weight["external"]]["bytes"] += weight["nbytes"]
    return files


def _methods(
    archive: ArchiveReader, known: list[dict[str, Any]], manifest: Mapping[str, Any] | None, where: str | None
) -> list[dict[str, Any]]:
    """Every method, in the manifest's order; of a stock package what is known without one."""
    libraries: dict[str, dict[str, Any]] = {}  # several methods may have one
    if manifest is None:
        unknown = dict.fromkeys(("inputs", "outputs", "constants", "quantization", "gpu_codes"))
        return [{**_method(archive, method, libraries, where), **unknown} for method in known]
    by_name = {method["name"]: method for method in known}
    sizes = [weight["nbytes"] for weight in manifest["weights"]]
    methods = []
    for name, spec in manifest["methods"].items():
        constants = spec["constants"]
        codes = [code for code in (spec, *(spec.get("variants") or ())) if code.get("gpu_architecture") is not None]
        entry = _method(archive, by_name[name], libraries, where)
        entry["inputs"], entry["outputs"] = spec["inputs"], spec["outputs"]
        entry["constants"] = {
            "count": len(constants),
            "bytes": sum(sizes[index] for index in {constant["weight"] for constant in constants}),
            "mutated": sum(constant.get("mutated", False) for constant in constants),
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
        "scale_blocks": any(weight.get("operator") == "w8a8_linear" and _has_blocks(weight) for weight in weights),
        "group_sizes": sorted({int(weight["group_size"]) for weight in weights}),
        "methods": sorted({str(weight["method"]) for weight in weights if "method" in weight}),
        "prefills": sorted({str(weight["prefill"]) for weight in weights if "prefill" in weight}),
        "int8_activations": any(
            weight.get("int8_activations") or weight.get("operator") in ("w4a8_linear", "nvfp4_int8_linear")
            for weight in weights
        ),
    }


def _has_blocks(weight: Mapping[str, Any]) -> bool:
    """Whether scales are of 128 × 128 weights: they share fewer inputs than a layer has."""
    inputs = (weight.get("shape") or weight["packed_shape"])[1]
    return int(weight["group_size"]) != int(inputs)


def _method(
    archive: ArchiveReader, method: Mapping[str, Any], libraries: dict[str, dict[str, Any]], where: str | None
) -> dict[str, Any]:
    """What is known of every method, and whether it runs on this machine, on the device ``where`` if that is given."""
    from untorch import _core

    device, gpus = method["device"], method["gpu_architectures"]
    here = set(_core.cpu_features().split())
    codes = [method, *(method["variants"] if device == "cpu" else ())]
    # What load() takes: of the code that runs here the one that asks for the most; else the method's own.
    runs = [code for code in codes if here.issuperset(code["features"])]
    code = max(runs, key=lambda code: len(code["features"]), default=method)
    features, file, nodes = code["features"], code["library"], code["extern_nodes"]
    if file not in libraries:
        libraries[file] = _library(archive, file)
    library = libraries[file]
    missing = [feature for feature in features if feature not in here]
    operators = library["functions"] + (
        _proxy_operators(archive, nodes, device.partition(":")[0]) if nodes is not None else []
    )
    problems = []
    if device.startswith("cuda"):
        problems += _gpu_problems(gpus, where)
    elif device != "cpu":
        problems.append(f"it is compiled for {device}, and untorch serves cpu and cuda")
    if where is not None and where.partition(":")[0] != device.partition(":")[0]:
        problems.append(f"it is compiled for {device}, not for {where}")
    machine = _core.cpu_architecture()
    if library["machine"] != machine:
        problems.append(f"its library is for {library['machine']}, this machine is {machine}")
    elif (method["architecture"] or machine) != machine:
        problems.append(f"it is compiled for {method['architecture']}, this machine is {machine}")
    elif missing:
        problems.append(f"this CPU lacks {', '.join(missing)}")
    if lacking := [entry["name"] for entry in operators if not entry["served"]]:
        problems.append(f"not served: {', '.join(lacking)}")
    return {
        "name": method["name"],
        "device": device,
        "gpu_architectures": gpus,
        "tf32": method["tf32"],
        "cpu": {
            "target": code["cpu_target"] or None,
            "targets": [other["cpu_target"] or None for other in codes],
            "architecture": method["architecture"] or library["machine"],
            "features": features,
            "missing": missing,
        },
        "library": {"file": file, "bytes": archive.entries[file].size, "needed": library["needed"]},
        "operators": operators,
        "runs_here": not problems,
        "problems": problems,
    }


def _library(archive: ArchiveReader, file: str) -> dict[str, Any]:
    elf = parse_elf(archive.read(file), f"{archive.path}: {file}", max_symbols=_MAX_SYMBOLS)
    served = exported_functions()
    functions = [describe_function(function, served) for function in needed_functions(elf)]
    return {"machine": elf.machine, "needed": list(elf.needed), "functions": functions}


def _gpu_codes(codes: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The code for each architecture: its assembler's version, and the oldest driver branch; PTX is never stored."""
    found = []
    for code in codes:
        architecture, ptxas = str(code["gpu_architecture"]), code.get("ptxas")
        needed = _DRIVERS.get(str(ptxas).partition(".")[0], 0)
        number = int(match[1]) if (match := _ARCHITECTURE.fullmatch(architecture)) else 0
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
    numbers = [int(match[1]) for name in architectures if (match := _ARCHITECTURE.fullmatch(name))]
    if numbers and not any(number // 10 == own // 10 and number <= own for number in numbers):
        return [
            f"it is compiled for {', '.join(architectures)}, cuda:{index} ({here['name']}) is {here['architecture']}"
        ]
    return []


def _proxy_operators(archive: ArchiveReader, extern_nodes: str, device: str) -> list[dict[str, Any]]:
    document = archive.read_json(extern_nodes)
    nodes = document.get("nodes") if isinstance(document, dict) else None
    if not isinstance(nodes, list):
        nodes = []
    if len(nodes) > _MAX_NODES:
        raise InvalidFileError(
            f"{archive.path}: {extern_nodes}: it has {len(nodes)} nodes, expected at most {_MAX_NODES}"
        )
    targets: dict[str, None] = {}
    for node in nodes:
        inner = node.get("node") if isinstance(node, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("target"), str):
            raise InvalidFileError(f"{archive.path}: {extern_nodes}: a node has no target")
        targets[inner["target"]] = None
    return [describe_kernel(target, device) for target in targets]
