"""``untorch::w4a8_linear``: the library's kernel beside the reference, torch's checks of an operator, its contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from untorch.ops.w4a8 import OPERATOR, _check, quantize_parts, w4a8_linear_reference
from untorch.ops.w4a8_layout import pack_w4a8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def arguments(**changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    n, k, group = changed.pop("n", 20), changed.pop("k", 60), changed.pop("group", 32)
    dtype = changed.pop("dtype", torch.float32)
    whole = -(-k // group) * group
    zero = torch.randn(whole // group, n) * (0.0 if changed.pop("symmetric", False) else 0.1)
    scales = torch.stack([torch.rand(whole // group, n) * 0.1, zero], -1)
    weight, scale_and_zero = pack_w4a8(torch.randint(0, 16, (n, whole), dtype=torch.uint8), scales)
    base = {
        "x": torch.randn(3, 5, k).to(dtype), "weight": weight, "scale_and_zero": scale_and_zero, "group_size": group,
        "out_features": n, "bias": torch.randn(n).to(dtype),
    }  # fmt: skip
    return base | changed


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@given(
    n=st.integers(1, 70), k=st.integers(1, 200), group=st.sampled_from([32, 64, 128, 256]), bare=st.booleans(),
    symmetric=st.booleans(),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_the_library_gives_the_same_as_the_reference(
    dtype: torch.dtype, n: int, k: int, group: int, bare: bool, symmetric: bool
) -> None:
    given = arguments(n=n, k=k, group=group, dtype=dtype, symmetric=symmetric)
    assert given["scale_and_zero"].shape[2] == (1 if symmetric else 2)
    if bare:
        given["bias"] = None
    got = OPERATOR(**given)
    assert got.dtype == dtype
    assert got.is_contiguous()
    rounding = 1e-5 if dtype.itemsize >= 4 else torch.finfo(dtype).eps
    torch.testing.assert_close(got, w4a8_linear_reference(**given), rtol=rounding, atol=rounding)


def test_quantized_parts_come_back() -> None:
    torch.manual_seed(1)
    x = torch.randn(9, 70) * torch.logspace(-3, 3, 9).unsqueeze(1)
    steps, scale = quantize_parts(x, 96)
    assert (steps.dtype, steps.shape, scale.shape) == (torch.int8, (9, 3, 32), (9, 3, 1))
    back = (steps.float() * scale).flatten(-2)
    assert torch.all((back[:, :70] - x).abs() <= scale.repeat_interleave(32, 1).squeeze(-1)[:, :70] * 0.501)
    assert torch.all(back[:, 70:] == 0)
    assert steps.abs().amax(-1)[:, :2].eq(127).all()
    x[0, 1], x[1, 69] = torch.nan, torch.inf
    assert torch.isnan(quantize_parts(x, 96)[1]).squeeze(-1)[:2].tolist() == [
        [True, False, False],
        [False, False, True],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype) -> None:
    given = arguments(dtype=dtype)
    torch.library.opcheck(OPERATOR, tuple(given.values()))
    given |= {"bias": None, "x": given["x"].transpose(0, 1)}
    torch.library.opcheck(OPERATOR, tuple(given.values()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        given = arguments()
        for name in ("weight", "scale_and_zero", "bias"):
            self.register_buffer(name, given[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = OPERATOR(x, self.weight, self.scale_and_zero, 32, 20, self.bias)
        return y + 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it exports
def test_export_keeps_it_as_one_node_and_the_rows_may_vary() -> None:
    net = Net()
    program = torch.export.export(net, (torch.randn(2, 3, 60),), dynamic_shapes=({0: Dim("b"), 1: Dim("t")},))
    nodes = [node for node in program.run_decompositions().graph.nodes if node.op == "call_function"]
    assert nodes[0].target == OPERATOR
    x = torch.randn(4, 6, 60)
    assert torch.equal(program.module()(x), net(x))


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": torch.tensor(1.0)}, "x: expected floating point [..., k], got float32 []"),
        ({"x": torch.ones(2, 60, dtype=torch.int64)}, "x: expected floating point [..., k], got int64 [2, 60]"),
        ({"x": torch.ones(60, 2).t()}, "x: expected a contiguous last dimension, got the stride 2: copy it"),
        ({"x": torch.ones(2, 65)}, "weight: expected contiguous int32 [2, 12, 16], got int32 [2, 8, 16]"),
        ({"group_size": 48}, "group_size: expected 32, 64, 128 or 256, got 48"),
        ({"group_size": 64}, "scale_and_zero: expected contiguous bfloat16 or float16 or float32 [2, 1, 2, 16], got"),
        ({"weight": torch.ones(2, 8, 16)}, "weight: expected contiguous int32 [2, 8, 16], got float32 [2, 8, 16]"),
        ({"out_features": 40}, "weight: expected contiguous int32 [3, 8, 16], got"),
        ({"scale_and_zero": torch.ones(2, 2, 2, 16).double()}, "scale_and_zero: expected contiguous bfloat16"),
        (
            {"scale_and_zero": torch.ones(2, 3, 1, 16)},
            "scale_and_zero: expected contiguous bfloat16 or float16 or float32 [2, 2, 1, 16], got",
        ),
        ({"bias": torch.ones(19)}, "bias: expected contiguous float32 [20], got float32 [19]"),
        ({"bias": torch.ones(20).half()}, "bias: expected contiguous float32 [20], got float16 [20]"),
        ({"bias": torch.ones(20, device="meta")}, "bias: expected the device of x, cpu, got meta"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], text: str, fake: bool) -> None:
    given = arguments(**changed)
    if fake:
        mode = torch._subclasses.FakeTensorMode()
        given = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
            for name, value in given.items()
        }
    with pytest.raises(ValueError, match="^w4a8_linear: ") as error:
        _check(**given)
    assert text in str(error.value)


def test_the_operator_checks() -> None:
    given = arguments(group_size=48)
    for library in (OPERATOR, torch.ops.untorch.w4a8_linear):
        with pytest.raises(ValueError, match="^w4a8_linear: group_size: expected 32, 64, 128 or 256, got 48$"):
            library(**given)
