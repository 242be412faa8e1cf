"""untorch ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from untorch import _core, register_kernel
from untorch.cli.process import exported_functions
from untorch.runtime.coverage import classify


def test_json_document(cli: Callable[..., Any]) -> None:
    document = cli("ops", "--json").document()
    assert set(document) == {
        "device", "library", "operators", "vector_functions", "interface_functions", "native_kernels", "python_kernels",
        "refused",
    }  # fmt: skip
    assert document["device"] == "cpu"
    assert {"addmm_out", "mm_out", "bmm_out"} <= set(document["operators"])
    assert "aoti_torch_empty_strided" in document["interface_functions"]
    assert all(_core.has_symbol(f"aoti_torch_cpu_{name}") for name in document["operators"])


def test_every_exported_function_is_listed_once() -> None:
    groups = classify(exported_functions(), "cpu")
    listed = [name for names in groups.values() for name in names]
    listed += [f"cuda {name}" for name in classify(exported_functions(), "cuda")["operators"]]
    assert len(listed) == len(set(listed)) == len(exported_functions())


def test_match(cli: Callable[..., Any]) -> None:
    document = cli("ops", "--match", "addmm", "--json").document()
    assert "addmm_out" in document["operators"]
    assert all("addmm" in name for name in document["operators"] + document["interface_functions"])


def test_native_kernels_are_listed(cli: Callable[..., Any]) -> None:
    assert "torchvision::nms" in cli("ops", "--json").document()["native_kernels"]
    assert "operators without a C function that the library serves itself" in cli("ops").out


def test_a_kernel_is_registered_for_one_device(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("untorch.runtime.registry._registered", {})
    register_kernel("shop::discount", lambda x: x, device="cuda")
    assert "shop::discount" not in cli("ops", "--json").document()["python_kernels"]
    assert cli("ops", "--device", "cuda", "--json").document()["python_kernels"] == ["shop::discount"]


def test_registered_kernels_are_listed(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("untorch.runtime.registry._registered", {})
    register_kernel("shop::discount", lambda x: x)
    assert "shop::discount" in cli("ops", "--json").document()["python_kernels"]
    assert "shop::discount" in cli("ops").out


def test_what_is_refused_and_why(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"aoti_torch_cpu_dance": "it has no steps"}
    monkeypatch.setattr("untorch.runtime.unsupported.UNSUPPORTED_SHIMS", refused)
    assert cli("ops", "--json").document()["refused"] == refused
    out = cli("ops").out
    assert "aoti_torch_cpu_dance" in out
    assert "it has no steps" in out


def test_other_devices(cli: Callable[..., Any]) -> None:
    document = cli("ops", "--device", "cuda", "--json").document()
    assert all(_core.has_symbol(f"aoti_torch_cuda_{name}") for name in document["operators"])
    assert document["python_kernels"] == []
    assert document["native_kernels"] == _core.native_operators("cuda")
    done = cli("ops", "--device", "tpu")
    assert done.code == 1
    assert done.err == "untorch: --device tpu: expected cpu or cuda\n"


@pytest.mark.skipif(not _core.has_symbol("aoti_torch_cuda_mm_out"), reason="the library was built without CUDA")
def test_functions_of_the_cuda_runtime_have_the_names_that_models_call() -> None:
    assert "cudaMalloc" in exported_functions()
    assert not [name for name in exported_functions() if name.startswith("utda")]
