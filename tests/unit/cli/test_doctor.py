"""untorch doctor."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from untorch import _core
from untorch.cli.cuda_code import compiled_architectures
from untorch.cli.doctor import _cpu_kernels, _extras, _kernels
from untorch.cli.extras import EXTRAS, installed_extras
from untorch.cli.machine import cuda_status
from untorch.cli.process import exported_functions

# The whole text, as a user reads it.
NO_CUDA = "this untorch was built without CUDA: install the CUDA toolkit (nvcc) and reinstall untorch"


def test_json_document(cli: Callable[..., Any]) -> None:
    done = cli("doctor", "--json")
    document = done.document()
    assert (done.code, document["working"]) == (0, True), document["checks"]
    assert set(document) == {
        "working", "untorch", "python", "numpy", "ml_dtypes", "platform", "cpu", "threads", "library", "torch", "cuda",
        "checks", "native_operators", "wheel", "extras",
    }  # fmt: skip
    assert document["native_operators"] == {device: _core.native_operators(device) for device in ("cpu", "cuda")}
    assert document["cpu"]["features"] == _core.cpu_features().split()
    assert document["cpu"]["level"] in ("baseline", "v3", "v4")
    assert document["cpu"]["extensions"] == _core.cpu_extensions().split()
    assert set(document["cpu"]["extensions"]) <= {"vnni", "bf16", "amx"}
    assert document["library"]["bytes"] > 0
    assert document["threads"]["number"] >= 1
    cuda = document["cuda"]
    assert set(cuda) == {"served", "note", "kernels", "driver", "devices", "libraries", "architectures"}
    assert cuda["served"] is (cuda["note"] is None)
    assert cuda["kernels"] is ("aoti_torch_cuda_mm_out" in exported_functions())
    assert bool(cuda["architectures"]) is cuda["kernels"]
    assert all(re.fullmatch(r"(sm|compute)_\d+", code) for code in cuda["architectures"])
    assert set(document["extras"]) == set(EXTRAS)
    assert document["extras"]["cli"] == {"installed": True, "missing": []}
    assert all(device["architecture"].startswith("sm_") for device in cuda["devices"])
    assert [check["name"] for check in document["checks"]] == [
        "versions", "native library", "threads", "memfd", "kernels", "half types", "temporary folder",
    ]  # fmt: skip
    assert all(set(check) == {"name", "status", "detail"} for check in document["checks"])


def test_text(cli: Callable[..., Any]) -> None:
    out = cli("doctor").out
    assert ("does not work here: " in out) is not cuda_status()["served"]
    assert (f"does not work here: {NO_CUDA}\n" in out) is not cuda_status()["kernels"]
    assert out.rstrip().endswith("The runtime works.")


AMX = "amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("level", "extensions", "features", "wanted", "text"),
    [
        ("baseline", "", "", None, "baseline"),
        ("v3", "vnni", "avx_vnni", None, "v3 with vnni"),
        ("v4", "vnni amx", AMX, None, "v4 with vnni, amx"),
        ("v4", "vnni", AMX, None, "v4 with vnni; the operating system refuses AMX"),
        ("v4", "vnni bf16", AMX, "v4-bf16", "v4 with vnni, bf16 (UNTORCH_ISA=v4-bf16)"),
    ],
)
def test_kernels_of_the_cpu(level: str, extensions: str, features: str, wanted: str | None, text: str) -> None:
    cpu = {"level": level, "extensions": extensions.split(), "features": features.split(), "wanted_level": wanted}
    assert _cpu_kernels(cpu) == text


def test_extras_are_those_of_the_project() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    names = {
        extra: tuple(re.split(r"[^\w-]", entry, maxsplit=1)[0] for entry in entries)
        for extra, entries in project["optional-dependencies"].items()
    }
    del names["dev"]
    assert names == EXTRAS


def test_what_an_extra_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("untorch.cli.extras._is_installed", lambda package: package != "jinja2")
    found = installed_extras()
    assert found["llm"] == {"installed": False, "missing": ["jinja2"]} and found["cli"]["installed"]
    assert _extras({name: found[name] for name in ("cli", "plot", "llm")}) == "cli, plot; not installed: llm (jinja2)"
    assert _extras({"llm": found["llm"]}) == "none; not installed: llm (jinja2)"


def fat_library(path: Path, *codes: tuple[int, int, bytes]) -> Path:
    """An ELF file with one section .nv_fatbin: codes are kind, architecture and bytes."""
    entries = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), 0, 0, 0, 0, arch).ljust(64, b"\0") + code
        for kind, arch, code in codes
    )
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries + bytes(8)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at = 64
    table = at + len(fat) + len(names)
    header = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q10xHHH", table, 64, 3, 2)
    rows = [(0, 0, 0), (1, at, len(fat)), (12, at + len(fat), len(names))]
    sections = b"".join(struct.pack("<I20xQQ24x", *row) for row in rows)
    path.write_bytes(header + fat + names + sections)
    return path


def test_architectures_of_a_library(tmp_path: Path) -> None:
    codes = ((2, 90, b"x" * 24), (2, 80, b"y" * 8), (1, 90, b"z" * 16), (2, 80, b""), (16, 70, b""))
    assert compiled_architectures(fat_library(tmp_path / "a.so", *codes)) == ["sm_80", "sm_90", "compute_90"]
    assert compiled_architectures(fat_library(tmp_path / "b.so")) == []
    (tmp_path / "c.so").write_bytes(b"\x7fELF\x02\x01" + bytes(20))
    with pytest.raises(ValueError, match="ends within a header"):
        compiled_architectures(tmp_path / "c.so")
    (tmp_path / "d.so").write_bytes(b"text" * 100)
    with pytest.raises(ValueError, match="expected an ELF file, little-endian, 64 bits"):
        compiled_architectures(tmp_path / "d.so")


def test_words_for_cuda_kernels() -> None:
    given = {"kernels": True, "architectures": ["sm_80", "sm_90", "compute_90"]}
    assert _kernels(given) == "in this build, for sm_80, sm_90 and, by PTX, newer ones"
    assert _kernels({**given, "architectures": ["sm_90"]}) == "in this build, for sm_90"
    assert _kernels({"kernels": False, "architectures": []}) == "not in this build"
    assert _kernels({"kernels": True, "architectures": None}) == "in this build"


def test_a_failed_check_is_exit_code_1(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("untorch.__version__", "9.9.9")
    done = cli("doctor", "--json")
    assert done.code == 1
    document = done.document()
    assert document["working"] is False
    assert document["checks"][0] == {
        "name": "versions",
        "status": "failed",
        "detail": f"the package is 9.9.9 and its native library {_core.version()}: two installations are mixed, "
        "install untorch again",
    }
    assert "The runtime does not work here." in cli("doctor").out


def test_wrong_kernels_are_found(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    from untorch.cli import checks

    real = numpy.abs
    monkeypatch.setattr("numpy.abs", lambda x: real(x) + 1)
    status, detail = checks._kernels()
    assert status == "failed"
    assert "differs by 1 from numpy's" in detail


def test_checks_do_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    from untorch.cli.checks import run_checks

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.memfd_create", fail)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", fail)
    results = {check["name"]: check for check in run_checks()}
    assert results["memfd"]["status"] == "failed"
    assert results["temporary folder"] == {
        "name": "temporary folder",
        "status": "warning",
        "detail": "no temporary file can be made (No space left on device); only untorch export needs one",
    }


def test_why_cuda_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    with_kernels = frozenset(("aoti_torch_cuda_mm_out",))
    device = {"index": 0, "name": "GPU", "architecture": "sm_90", "multiprocessors": 132, "total_memory": 1 << 37}
    answers = [
        (frozenset(), {"error": "no driver"}, False, NO_CUDA),
        (frozenset(("aoti_torch_cuda_guard_set_index", "aoti_torch_cpu_mm_out")), {"error": "none"}, False, NO_CUDA),
        (with_kernels, {"error": "no driver"}, False, "no driver"),
        (with_kernels, {"driver": 13000, "devices": []}, False, "the driver reports no GPU"),
        (with_kernels, {"driver": 12040, "devices": [device]}, True, None),
    ]
    for exported, answer, served, note in answers:
        monkeypatch.setattr("untorch.cli.process.exported_functions", lambda exported=exported: exported)
        monkeypatch.setattr(_core, "cuda_devices", lambda answer=answer: json.dumps(answer))
        status = cuda_status()
        assert status["served"] is served
        assert note is None or note in status["note"]
    assert status["driver"] == "12.4"
