"""Which configuration of a kernel is taken where none can be timed, and tuning files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from untorch.export import export
from untorch.export.gpus import GPUS, find_gpu
from untorch.export.kernel_choice import (
    Candidate,
    Work,
    choose,
    estimate,
    kernel_key,
    read_tuning,
    write_tuning,
)  # fmt: skip
from untorch.runtime.errors import InvalidArgumentError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
H200 = find_gpu("H200")
CHOICES = {"sm_90": {"a": {"kernel": "triton_poi_0", "config": {"XBLOCK": 256, "num_warps": 4, "num_stages": 1}}}}


class Launcher:
    def __init__(self, spills: int = 0, warps: int = 4, **blocks: int) -> None:
        self.n_spills, self.n_regs, self.shared = spills, 32, 0
        self.config = type("Config", (), {"kwargs": blocks, "num_warps": warps, "num_stages": 1})()


class Kernel:
    """What is looked at of Inductor's CachingAutotuner."""

    def __init__(self, launchers: list[Launcher], size_hints: dict[str, int] | None, custom: bool = False) -> None:
        self.launchers, self.size_hints, self.custom_kernel = launchers, size_hints, custom
        self.fn = type("Function", (), {"src": "def triton_poi_fused_0(x):\n    pass\n"})()
        self.triton_meta = {"signature": {"in": "*fp32", "out": "*fp32", "n": "i32"}}
        self.inductor_meta = {"num_load": 1, "num_store": 1}


def test_small_work_is_spread_over_the_sms() -> None:
    work = Work((1 << 17,))
    assert estimate(H200, work, Candidate((256,))) < estimate(H200, work, Candidate((4096,), warps=8))


def test_long_rows_are_reduced_in_long_turns() -> None:
    work = Work((4096,), reduction=8192)
    long, short = Candidate((1,), 2048, warps=8), Candidate((64,), 8, warps=8)
    assert estimate(H200, work, long) < estimate(H200, work, short)


def test_spilled_registers_cost_time() -> None:
    work, candidate = Work((1 << 20,)), Candidate((1024,))
    assert estimate(H200, work, candidate) < estimate(H200, work, dataclasses.replace(candidate, spills=40))


def test_tiles_of_two_dimensions_are_wide_both_ways() -> None:
    work = Work((4096, 4096))
    square, flat = Candidate((32, 32)), Candidate((1024, 1))
    assert estimate(H200, work, square) < estimate(H200, work, flat)


def test_reductions_along_columns_need_neighbouring_columns() -> None:
    work = Work((8192,), reduction=4096, reduces_rows=False)
    assert estimate(H200, work, Candidate((32,), 32)) < estimate(H200, work, Candidate((1,), 1024))


@given(
    gpu=st.sampled_from(GPUS), size=st.integers(1, 1 << 24), reduction=st.integers(1, 1 << 16),
    block=st.sampled_from([1, 8, 64, 512, 4096]), turn=st.sampled_from([1, 16, 256, 4096]),
    warps=st.sampled_from([1, 2, 4, 8, 16, 32]), registers=st.integers(0, 255), spills=st.integers(0, 200),
    shared=st.integers(0, 227 << 10),
)  # fmt: skip
def test_every_estimate_is_a_time(
    gpu: Any, size: int, reduction: int, block: int, turn: int, warps: int, registers: int, spills: int, shared: int
) -> None:
    seconds = estimate(gpu, Work((size,), reduction), Candidate((block,), turn, warps, registers, spills, shared))
    assert 0 < seconds < 3600
    assert seconds >= size * reduction * 8 / (gpu.bandwidth * 1e9) * 0.99


def test_the_choice_among_launchers() -> None:
    small, large = Launcher(XBLOCK=256), Launcher(XBLOCK=4096, warps=8)
    assert choose(H200, Kernel([large, small], {"x": 1 << 17}), {}) is small
    # Equals stay in Inductor's order.
    same = Launcher(XBLOCK=256)
    assert choose(H200, Kernel([same, small], {"x": 1 << 17}), {}) is same
    # Somebody's own kernel has an order of its own.
    spilling = Launcher(spills=3, XBLOCK=256)
    assert choose(H200, Kernel([spilling, large, small], {"x": 1 << 17}, custom=True), {}) is large
    assert choose(H200, Kernel([spilling, large, small], None), {}) is large


def test_a_tuning_file_decides_where_it_has_the_kernel() -> None:
    small, large = Launcher(XBLOCK=256), Launcher(XBLOCK=4096, warps=8)
    kernel = Kernel([small, large], {"x": 1 << 17})
    key = kernel_key(kernel.fn.src, kernel.size_hints, kernel.triton_meta["signature"])
    measured = {key: {"config": {"XBLOCK": 4096, "num_warps": 8, "num_stages": 1}}}
    assert choose(H200, kernel, measured) is large
    # One that this torch does not try is no help.
    assert choose(H200, kernel, {key: {"config": {"XBLOCK": 8, "num_warps": 8, "num_stages": 1}}}) is small
    assert choose(H200, kernel, {"other": measured[key]}) is small


def test_a_kernel_is_known_whatever_its_number() -> None:
    first = kernel_key("@jit\ndef triton_poi_fused_add_0(x):\n    pass", {"x": 8}, {"x": "*fp32"})
    assert first == kernel_key("@jit\ndef triton_poi_fused_add_17(x):\n    pass", {"x": 8}, {"x": "*fp32"})
    for other in (
        kernel_key("@jit\ndef triton_poi_fused_add_0(x):\n    return", {"x": 8}, {"x": "*fp32"}),
        kernel_key("@jit\ndef triton_poi_fused_add_0(x):\n    pass", {"x": 16}, {"x": "*fp32"}),
        kernel_key("@jit\ndef triton_poi_fused_add_0(x):\n    pass", {"x": 8}, {"x": "*bf16"}),
    ):
        assert other != first


def test_a_tuning_file_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    write_tuning(path, CHOICES)
    other = {"kernel": "triton_red_1", "config": {"XBLOCK": 1, "num_warps": 8, "num_stages": 1}}
    write_tuning(path, {"sm_90": {"b": other}, "sm_80": {"a": other}})
    assert read_tuning(path) == {"sm_90": {**CHOICES["sm_90"], "b": other}, "sm_80": {"a": other}}
    assert [file.name for file in tmp_path.iterdir()] == ["h200.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": "untorch tuning", "version": 2}', '{"choices": {}}'])
def test_files_of_another_kind_are_refused_and_stay(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    for call in (lambda: read_tuning(path), lambda: write_tuning(path, CHOICES)):
        with pytest.raises(InvalidArgumentError, match="tuning file .*other.json"):
            call()
    assert path.read_text() == text
    with pytest.raises(InvalidArgumentError, match="cannot be read: .*No such file"):
        read_tuning(tmp_path / "missing.json")


class Turned(nn.Module):
    """Its kernel has several configurations: a tile may be wide either way."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.t() * y


def turned(path: Path, **options: Any) -> None:
    args = (torch.zeros(512, 768), torch.zeros(768, 512))
    export(Turned(), args, path, device="cuda", progress=False, **options)


@pytest.mark.slow
def test_a_build_without_a_gpu_takes_what_the_file_says(tmp_path: Path) -> None:
    model, record, tuning = tmp_path / "model.pt2", tmp_path / "record.json", tmp_path / "tuning.json"
    turned(model, arch="sm_90", record_tuning=record)
    recorded = read_tuning(record)
    [(key, found)] = recorded["sm_90"].items()
    assert found["kernel"].startswith("triton_poi_fused_mul")
    assert min(found["config"]["XBLOCK"], found["config"]["YBLOCK"]) >= 8  # what the estimate takes
    flat = {**found["config"], "XBLOCK": 1, "YBLOCK": 1024}
    again = tmp_path / "again.json"
    for config in (flat, {**found["config"], "XBLOCK": 1024, "YBLOCK": 1}, {**flat, "YBLOCK": 256, "XBLOCK": 16}):
        write_tuning(tuning, {"sm_90": {key: {**found, "config": config}}})
        turned(model, arch="sm_90", tuning=tuning, record_tuning=again)
        if read_tuning(again)["sm_90"][key]["config"] == config:
            break
    else:
        pytest.fail(f"none of the configurations that Inductor may try was taken instead of {found['config']}")
    text = json.dumps(read_tuning(again))
    assert str(tmp_path) not in text


def test_tuning_where_there_is_nothing_to_choose(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write_tuning(path, CHOICES)
    module, args = nn.Linear(2, 2), (torch.zeros(1, 2),)
    with pytest.raises(
        InvalidArgumentError,
        match="method 'forward': option tuning: a tuning file is for a cross-compilation target, arch='sm_90': a CPU has no kernels to choose",
    ):
        export(module, args, tmp_path / "m.pt2", tuning=path, progress=False)
    with pytest.raises(
        InvalidArgumentError,
        match="method 'forward': option record_tuning: a CPU has no kernels to choose, so there is nothing to record",
    ):
        export(module, args, tmp_path / "m.pt2", record_tuning=path, progress=False)
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        export(module, args, tmp_path / "m.pt2", device="cuda", arch="sm_90", tuning=tmp_path / "no", progress=False)
    path.write_text("{}")
    with pytest.raises(InvalidArgumentError, match="expected a file that `untorch tune` wrote"):
        turned(tmp_path / "m.pt2", arch="sm_90", record_tuning=path)
    assert list(tmp_path.iterdir()) == [path]
