"""verify=True for models that call kernels of this process: they compute here, the rest where torch is missing."""

from __future__ import annotations

import importlib
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import untorch
from untorch.export.errors import VerificationError
from untorch.export.exporter import _check_verifiable
from untorch.export.verify import verify_file
from untorch.runtime import registry

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "attacks"))

X = torch.linspace(-2, 2, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def verify(kernel: Any, **options: bool) -> list[Any]:
    path = importlib.import_module("kernel_packages").compiled("own")
    model = importlib.import_module("kernel_models").Clip()
    untorch.register_kernel("attack::clip_scale", kernel, **options)
    program = torch.export.export(model, (X,))
    return verify_file(path, "clip", program, [{"name": "output"}], 1e-4, ["attack::clip_scale"])


@pytest.mark.slow
def test_a_kernel_of_this_process_computes_here() -> None:
    seen = []

    def kernel(x: np.ndarray, factor: float) -> np.ndarray:
        seen.append((x.shape, factor, "torch" in sys.modules))
        return np.clip(x, -1, 1).astype(np.float64) * factor

    (difference,) = verify(kernel, cast=True)
    assert difference.max_rel < 1e-4
    assert seen == [((3, 4), 3.0, True)]


def test_a_wrong_kernel_is_found() -> None:
    with pytest.raises(VerificationError, match="the largest difference from eager is"):
        verify(lambda x, factor: x * 0)
    with pytest.raises(VerificationError, match=r"(?s)does not load or run without torch.*expected the dtype float32"):
        verify(lambda x, factor: x.astype(np.float64))


def test_what_a_kernel_raises_is_told() -> None:
    def kernel(x: np.ndarray, factor: float) -> np.ndarray:
        raise KeyError("mine")

    with pytest.raises(VerificationError, match=r"(?s)does not load or run without torch.*KeyError: 'mine'"):
        verify(kernel)


def test_kernels_for_gpus_are_not_carried_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    registry.register_kernel("mine::op", lambda x: x, device="cuda")
    method: Any = SimpleNamespace(name="forward", target=SimpleNamespace(device="cuda"))
    with pytest.raises(VerificationError) as error:
        _check_verifiable(method, ["mine::op", "torchvision::nms", "mine::op"])
    assert str(error.value) == (
        "method 'forward' calls mine::op, whose kernel for CUDA is registered in this process alone: verify=True runs "
        "the file in another one; export without it"
    )
    _check_verifiable(method, ["torchvision::nms"])
    method.target.device = "cpu"
    _check_verifiable(method, ["mine::op"])
