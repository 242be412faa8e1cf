"""What the export records of kernel calls: names, lines, modules, bytes and operations."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import untorch
from tests.native.decoder_layers import operands
from tests.native.nvfp4_experts import random_experts
from tests.native.nvfp4_panels import packed_for_integers
from tests.unit.export.test_outline import Block, Stack
from tests.unit.ops.test_int4_moe import arguments
from untorch.export import export
from untorch.export.kernel_calls import _operations_of
from untorch.ops.decoder_linears import OPERATOR as DECODER_LINEARS
from untorch.ops.int4_moe import OPERATOR as INT4_MOE
from untorch.ops.nvfp4_moe import OPERATOR as NVFP4_MOE
from untorch.profiler import profile
from untorch.profiler.recording import Recording
from untorch.profiler.sequence import parse_sequence

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 32), nn.Linear(32, 16)
        self.convolution = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.second(torch.sigmoid(self.first(x)))
        return torch.softmax(y, -1), self.convolution(image), x.cumsum(0)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calls") / "m.pt2"
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=1, max=512)
    export(
        Small().eval(), (torch.randn(40, 48), torch.randn(2, 3, 10, 10)), path, dynamic_shapes=({0: rows}, None),
        progress=False,
    )  # fmt: skip
    return path


def document(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("model/extra/kernel_calls/forward.json"))


@pytest.mark.slow
def test_calls_have_names_lines_and_modules(package: Path) -> None:
    text = json.dumps(document(package))
    assert str(Path(__file__).parent) not in text, "no path of this machine"
    calls = parse_sequence(text.encode(), {"rows": 40}).calls
    by_module = {call.module: call for call in calls if call.is_function}
    assert {"second", "convolution"} <= by_module.keys()
    for call in by_module.values():
        assert all(
            line.startswith(("tests/unit/export/test_kernel_calls.py:", "test_kernel_calls.py:")) for line in call.lines
        )
    lines = Path(__file__).read_text().splitlines()
    [line] = by_module["second"].lines
    assert "self.second(torch.sigmoid(self.first(x)))" in lines[int(line.rpartition(":")[2]) - 1]


def test_bytes_and_operations(package: Path) -> None:
    rows = 40
    calls = parse_sequence(json.dumps(document(package)).encode(), {"rows": rows}).calls
    first = next(call for call in calls if call.is_function and call.operations == 2 * rows * 48 * 32)
    assert first.nbytes is not None
    # x, the weight and the result; the bias, and where it is packed a weight padded to whole tiles.
    least = 4 * (rows * 48 + 48 * 32 + rows * 32)
    assert least <= first.nbytes <= least + 4 * 32
    convolution = next(call for call in calls if call.module == "convolution" and call.is_function)
    assert convolution.operations == 2 * (2 * 8 * 8 * 8) * 27
    softmax = next(call for call in calls if not call.is_function and "aten.exp" in call.operators)
    assert softmax.nbytes is not None and softmax.nbytes >= 2 * 4 * rows * 16
    assert softmax.operations is not None and softmax.operations >= 3 * rows * 16
    scan = next(call for call in calls if call.name == "aoti_torch_cpu_cumsum")
    assert scan.nbytes == 2 * 4 * rows * 48


def operations(function: Any, *args: Any) -> list[int]:
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    counts = [_operations_of(node) for node in graph.nodes if node.op == "call_function"]
    return [int(count) for count in counts if count is not None]


def test_operations_of_attention_and_experts() -> None:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    assert operations(lambda q, k: attend(q, k, k)[0], q, k) == [4 * 2 * 3 * 5 * 7 * 8]
    given = arguments(integers=True)
    assert operations(INT4_MOE, *given.values()) == [6 * given["topk_ids"].numel() * 32 * 16]
    weights = random_experts(4, 32, 48, True)
    x, factors, ids = torch.randn(3, 32), torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    for layout in (weights, packed_for_integers(weights)):
        assert operations(NVFP4_MOE, x, factors, ids, *layout) == [6 * 6 * 32 * 48]


@pytest.mark.parametrize(("n", "group"), [(None, 0), (128, 0), (128, 64)])
def test_operations_of_a_decoders_layers(n: int | None, group: int) -> None:
    given = operands(3, 256, 128, 384, n, torch.bfloat16, group)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}

    def layers(*values: torch.Tensor) -> Any:
        return DECODER_LINEARS(**(given | dict(zip(tensors, values, strict=True))))

    weights = 128 * 256 + 768 * 128 + 128 * 384 + (n or 0) * 128
    assert operations(layers, *tensors.values()) == [2 * 3 * weights]


def test_every_recorded_call_is_made(package: Path) -> None:
    x, image = np.ones((7, 48), np.float32), np.ones((2, 3, 10, 10), np.float32)
    found = profile(package, [x, image], runs=2, roofline=False)
    assert found.matched
    recorded = parse_sequence(json.dumps(document(package)).encode(), {"rows": 7}).calls
    assert {row.name for row in found.rows if row.lines} == {call.name for call in recorded if call.lines}


@pytest.mark.slow
def test_layers_that_are_functions_are_told_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "m.pt2"
    rows = torch.export.Dim("rows", max=64)
    model = Stack([Block(16) for _ in range(8)], every=True).eval()
    export(model, (torch.randn(4, 16),), path, dynamic_shapes=({0: rows},), progress=False)
    found = document(path)
    assert found["layers"].keys() == {"call_layer_0"}
    assert sum(entry.get("layer") == "call_layer_0" for entry in found["calls"]) >= 7
    assert [name for name, _ in found["passes"] if name == "outline_layers"] == ["outline_layers"]
    assert profile(path, [np.ones((4, 16), np.float32)], runs=1, roofline=False).matched


@pytest.mark.slow
def test_a_kernel_that_throws_while_it_is_recorded(tmp_path: Path) -> None:
    """The trampoline has unwind tables; what it began has no end, and the next call is recorded."""

    class Divide(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x // y

    path = tmp_path / "m.pt2"
    numbers = torch.arange(1, 9)
    export(Divide(), (numbers, numbers), path, progress=False)
    one, zero = np.arange(1, 9), np.zeros(8, np.int64)
    with Recording() as recording, untorch.load(path) as program:
        for _ in range(2):
            with pytest.raises(untorch.ModelError, match="division by zero|ZeroDivisionError"):
                program.forward.run([one, zero])
        recording.collect()
        [result] = program.forward.run([one, one])
        assert any(range_.name == "forward" for range_ in recording.collect())
    np.testing.assert_array_equal(result, np.ones(8))
