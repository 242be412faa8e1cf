"""Cross-compiled files give on this GPU what eager PyTorch gives on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import untorch
from tests.gpu.built_elsewhere import MODELS, build

# Of the largest value. Both sides round bfloat16 in other places.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def compare(folder: Path, name: str) -> None:
    args, expected = torch.load(folder / f"{name}.pt")
    file = folder / f"{name}.pt2"
    with untorch.load(file, tf32=False) as program, untorch.load(file, tf32=False) as other:  # as exact as the CPU
        major, minor = torch.cuda.get_device_capability()
        assert program["forward"].gpu_architecture == f"sm_{major}{minor}"
        inputs = [x.cuda() for x in args]
        results = program(*inputs)
        captured = other["forward"].graph(*inputs)(*inputs)  # that program's first call: it must not wait
        results, captured = (one if isinstance(one, tuple) else (one,) for one in (results, captured))
        for called, replayed in zip(results, captured, strict=True):
            assert torch.equal(torch.from_dlpack(called), torch.from_dlpack(replayed))
        for result, wanted in zip(results, expected, strict=True):
            got = torch.from_dlpack(result)
            assert got.is_cuda and got.dtype == wanted.dtype
            difference = float((got.cpu().double() - wanted.double()).abs().max())
            assert difference <= TOLERANCE[wanted.dtype] * float(wanted.double().abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_a_file_built_beside_the_gpu_without_it(name: str, tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    build(tmp_path, f"sm_{major}{minor}", (name,))
    compare(tmp_path, name)


@pytest.mark.skipif("UNTORCH_BUILT_ELSEWHERE" not in os.environ, reason="UNTORCH_BUILT_ELSEWHERE names no folder")
@pytest.mark.parametrize("name", MODELS)
def test_a_file_from_a_machine_without_a_gpu(name: str) -> None:
    compare(Path(os.environ["UNTORCH_BUILT_ELSEWHERE"]), name)
