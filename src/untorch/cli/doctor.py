"""``untorch doctor``: checks that the runtime works and describes the machine. torch is looked up, never imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from untorch.cli.options import DebugOption, JsonOption
from untorch.cli.output import bytes_text, emit, make_table, print_fields

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["doctor"]


def doctor(json: JsonOption = False, debug: DebugOption = False) -> None:
    """Check this machine and this installation."""
    from untorch.cli.checks import run_checks
    from untorch.cli.machine import describe_machine

    checks = run_checks()
    working = all(check["status"] != "failed" for check in checks)
    document: dict[str, Any] = {"working": working, **describe_machine(), "checks": checks}
    emit(document, json, lambda console: _render(console, document))
    if not working:
        raise typer.Exit(1)


def _device(device: dict[str, Any]) -> str:
    memory = bytes_text(device["total_memory"])
    return f"{device['name']}, {device['architecture']}, {device['multiprocessors']} SMs, {memory}"


def _kernels(cuda: dict[str, Any]) -> str:
    if not cuda["kernels"]:
        return "not in this build"
    codes = [code for code in cuda["architectures"] or () if code.startswith("sm_")]
    if not codes:
        return "in this build"
    has_ptx = len(codes) < len(cuda["architectures"])
    return f"in this build, for {', '.join(codes)}" + (" and, by PTX, newer ones" if has_ptx else "")


def _cpu_kernels(cpu: dict[str, Any]) -> str:
    """The level, what is used beyond it, and AMX where the CPU has it and it is not used."""
    text = " with ".join(filter(None, (cpu["level"], ", ".join(cpu["extensions"]))))
    if cpu["wanted_level"]:
        return f"{text} (UNTORCH_ISA={cpu['wanted_level']})"
    has_amx = {"amx_tile", "amx_bf16", "amx_int8"} <= set(cpu["features"])
    return text + ("; the operating system refuses AMX" if has_amx and "amx" not in cpu["extensions"] else "")


def _extras(extras: dict[str, dict[str, Any]]) -> str:
    there = [name for name, found in extras.items() if found["installed"]]
    lacking = [f"{name} ({', '.join(found['missing'])})" for name, found in extras.items() if not found["installed"]]
    return f"{', '.join(there) or 'none'}" + (f"; not installed: {', '.join(lacking)}" if lacking else "")


def _render(console: Console, document: dict[str, Any]) -> None:
    cpu, library, threads, cuda = (document[key] for key in ("cpu", "library", "threads", "cuda"))
    native = document["native_operators"]
    wanted = f", OMP_NUM_THREADS={threads['environment']}" if threads["environment"] else ""
    found = "; ".join(f"{name}: {path}" for name, path in cuda["libraries"].items() if path)
    print_fields(
        console,
        [
            ("untorch", f"{document['untorch']} (native library {library['version']})"),
            ("wheel", ", ".join(document["wheel"]) if document["wheel"] else "none: a source tree"),
            ("Python", f"{document['python']['version']} at {document['python']['executable']}"),
            ("numpy", f"{document['numpy']}, ml_dtypes {document['ml_dtypes'] or 'not installed'}"),
            ("platform", document["platform"]),
            ("CPU", f"{cpu['model'] or 'unknown'}, {cpu['architecture']}, {cpu['usable_cores']} usable cores"),
            ("CPU features", " ".join(cpu["features"])),
            ("kernels", _cpu_kernels(cpu)),
            ("threads", f"{threads['number'] or 'unknown'}{wanted}"),
            ("libuntorch.so", f"{library['path'] or 'not found'} ({bytes_text(library['bytes'])})"),
            ("extras", _extras(document["extras"])),
            ("torch", f"{document['torch'] or 'not installed'} (needed for untorch export only)"),
            ("CUDA", f"works, driver {cuda['driver']}" if cuda["served"] else f"does not work here: {cuda['note']}"),
            *((f"cuda:{device['index']}", _device(device)) for device in cuda["devices"]),
            ("CUDA kernels", _kernels(cuda)),
            ("CUDA libraries", found or "none found"),
            ("operators by name", f"{len(native['cpu'])} native ones on the CPU, {len(native['cuda'])} on CUDA"),
        ],
    )
    rows = [(check["name"], check["status"], check["detail"]) for check in document["checks"]]
    console.print(make_table(None, ("check", "status", "detail"), rows))
    console.print("The runtime works." if document["working"] else "The runtime does not work here.", style="bold")
