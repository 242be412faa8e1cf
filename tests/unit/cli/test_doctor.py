"""untorch doctor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from untorch import _core
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
        "checks", "native_operators",
    }  # fmt: skip
    assert document["native_operators"] == {device: _core.native_operators(device) for device in ("cpu", "cuda")}
    assert document["cpu"]["features"] == _core.cpu_features().split()
    assert document["cpu"]["level"] in ("baseline", "v3", "v4")
    assert document["library"]["bytes"] > 0
    assert document["threads"]["number"] >= 1
    cuda = document["cuda"]
    assert set(cuda) == {"served", "note", "kernels", "driver", "devices", "libraries"}
    assert cuda["served"] is (cuda["note"] is None)
    assert cuda["kernels"] is ("aoti_torch_cuda_mm_out" in exported_functions())
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
