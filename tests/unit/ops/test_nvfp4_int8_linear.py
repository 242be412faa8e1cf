"""``untorch::nvfp4_int8_linear``: the library's kernel beside the reference, torch's checks of an operator, its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from untorch.ops.nvfp4_int8 import OPERATOR, _check, nvfp4_int8_linear_reference
from untorch.ops.nvfp4_layout import dequantize_nvfp4
from untorch.ops.w4a8_layout import pack_nvfp4_w4a8
from untorch.quant import pack_nvfp4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn
# Not test_schema: torch compares arguments before and after by arithmetic that float8 does not have.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def arguments(**changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    n, k, dtype = changed.pop("n", 20), changed.pop("k", 60), changed.pop("dtype", torch.float32)
    whole = -(-k // 32) * 32
    codes, scales = torch.randint(0, 16, (n, whole), dtype=torch.uint8), (torch.rand(n, whole // 16) * 400).to(E4M3)
    weight, block_scale = pack_nvfp4_w4a8(codes, scales)
    base = {
        "x": torch.randn(3, 5, k).to(dtype), "weight": weight, "block_scale": block_scale,
        "global_scale": torch.rand(n) * 1e-3, "out_features": n, "bias": torch.randn(n).to(dtype),
    }  # fmt: skip
    return base | changed


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@given(n=st.integers(1, 70), k=st.integers(1, 200), bare=st.booleans())
@settings(max_examples=12, deadline=None)
def test_the_library_gives_the_same_as_the_reference(dtype: torch.dtype, n: int, k: int, bare: bool) -> None:
    given = arguments(n=n, k=k, dtype=dtype)
    if bare:
        given["bias"] = None
    got = OPERATOR(**given)
    assert got.dtype == dtype
    assert got.is_contiguous()
    rounding = 1e-5 if dtype.itemsize >= 4 else torch.finfo(dtype).eps
    torch.testing.assert_close(got, nvfp4_int8_linear_reference(**given), rtol=rounding, atol=rounding)


def test_the_reference_is_that_of_the_dequantized_weight() -> None:
    codes, scales = torch.randint(0, 16, (20, 64), dtype=torch.uint8), (torch.rand(20, 4) * 4).to(E4M3)
    weight, block_scale = pack_nvfp4_w4a8(codes, scales)
    world = torch.rand(20)
    x = torch.randint(-127, 128, (3, 64)).float()
    x[:, ::32] = 127.0  # parts whose scale is 1: quantising changes nothing
    expected = x.double() @ dequantize_nvfp4(pack_nvfp4(codes), scales, world, torch.float64).T
    torch.testing.assert_close(
        nvfp4_int8_linear_reference(x, weight, block_scale, world, 20).double(), expected, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype) -> None:
    given = arguments(dtype=dtype)
    torch.library.opcheck(OPERATOR, tuple(given.values()), test_utils=OPCHECKS)
    given |= {"bias": None, "x": given["x"].transpose(0, 1)}
    torch.library.opcheck(OPERATOR, tuple(given.values()), test_utils=OPCHECKS)


def test_arguments_stay_as_they_are_and_the_result_is_none_of_them() -> None:
    """What opcheck's test_schema looks at."""
    arguments_given = arguments()
    given = [value for value in arguments_given.values() if isinstance(value, torch.Tensor)]
    before = [tensor.clone().view(torch.uint8) for tensor in given]
    y = OPERATOR(**arguments_given)
    after = [tensor.view(torch.uint8) for tensor in given]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(y.untyped_storage()._cdata != tensor.untyped_storage()._cdata for tensor in given)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        given = arguments()
        for name in ("weight", "block_scale", "global_scale", "bias"):
            self.register_buffer(name, given[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = OPERATOR(x, self.weight, self.block_scale, self.global_scale, 20, self.bias)
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
        ({"weight": torch.ones(2, 8, 16)}, "weight: expected contiguous int32 [2, 8, 16], got float32 [2, 8, 16]"),
        ({"out_features": 40}, "weight: expected contiguous int32 [3, 8, 16], got"),
        ({"block_scale": torch.ones(2, 4, 16)}, "block_scale: expected contiguous float8_e4m3fn [2, 4, 16], got"),
        ({"global_scale": torch.ones(1)}, "global_scale: expected contiguous float32 [20], got float32 [1]"),
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
    with pytest.raises(ValueError, match="^nvfp4_int8_linear: ") as error:
        _check(**given)
    assert text in str(error.value)


def test_the_operator_checks() -> None:
    given = arguments(global_scale=torch.ones(1))
    for library in (OPERATOR, torch.ops.untorch.nvfp4_int8_linear):
        with pytest.raises(ValueError, match="^nvfp4_int8_linear: global_scale: expected contiguous float32"):
            library(**given)
