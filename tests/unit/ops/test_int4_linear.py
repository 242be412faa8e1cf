"""``untorch::int4_linear``: the reference against float64, torch's own checks of an operator, and its contract."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.export import Dim

from untorch.ops.int4 import OPERATOR, dequantize_int4
from untorch.ops.int4_layout import pack_int4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer(n: int, k: int, group: int, inner: int, dtype: torch.dtype, seed: int) -> tuple[Any, torch.Tensor]:
    """Packed weight and scales, and the weight in float64, element by element as the definition says."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (n, k), generator=generator)
    scale_and_zero = torch.rand((k // group, n, 2), generator=generator).sub_(0.5).to(dtype)
    scale = scale_and_zero[..., 0].T.double().repeat_interleave(group, 1)
    zero = scale_and_zero[..., 1].T.double().repeat_interleave(group, 1)
    return (pack_int4(values, inner), scale_and_zero, group), (values - 8).double() * scale + zero


@hypothesis.given(
    rows=st.sampled_from([(), (0,), (1,), (3,), (2, 5), (2, 0, 3)]),
    tiles=st.integers(1, 5),
    outer=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128, 256]),
    inner=st.sampled_from([2, 4, 8]),
    missing=st.integers(0, 31),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    scale_dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_values(
    rows: tuple[int, ...], tiles: int, outer: int, group: int, inner: int, missing: int, dtype: torch.dtype,
    scale_dtype: torch.dtype, biased: bool, seed: int,
) -> None:  # fmt: skip
    n, k = 8 * tiles, 256 * outer
    arguments, weight = layer(n, k, group, inner, scale_dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((*rows, k - missing), generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype) if biased else None
    y = OPERATOR(x, *arguments, bias)
    assert y.dtype == dtype
    assert y.is_contiguous()
    expected = x.double() @ weight[:, : k - missing].T + (0 if bias is None else bias.double())
    # The rounding of the result, and of a sum of k products of weights up to 4.5 in float32.
    rounded = 1e-14 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=rounded * k)


def test_dequantize_is_exact_for_simple_numbers() -> None:
    values = torch.arange(16).repeat(8, 16)
    scale_and_zero = torch.tensor([0.5, 3.0]).expand(2, 8, 2).contiguous()
    weight = dequantize_int4(pack_int4(values), scale_and_zero, 128)
    assert torch.equal(weight, (values - 8) * 0.5 + 3.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck(dtype: torch.dtype, biased: bool) -> None:
    arguments, _ = layer(24, 256, 64, 8, dtype, 0)
    x = torch.randn(3, 5, 250).to(dtype)
    torch.library.opcheck(OPERATOR, (x, *arguments, torch.randn(24).to(dtype) if biased else None))
    torch.library.opcheck(OPERATOR, (x[:, 1], *arguments))  # rows that are not adjacent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        (packed, scale_and_zero, self.group), self.expected = layer(16, 128, 32, 8, torch.float32, 1)
        self.register_buffer("packed", packed)
        self.register_buffer("scale_and_zero", scale_and_zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATOR(x, self.packed, self.scale_and_zero, self.group, None) + 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it exports
def test_export_keeps_it_as_one_node_and_the_rows_may_vary() -> None:
    net = Net()
    program = torch.export.export(net, (torch.randn(2, 3, 128),), dynamic_shapes=({0: Dim("b"), 1: Dim("t")},))
    for decomposed in (program, program.run_decompositions()):
        nodes = [node for node in decomposed.graph.nodes if node.op == "call_function"]
        assert nodes[0].target == OPERATOR
        assert len(nodes) == 2
    x = torch.randn(4, 7, 128)
    torch.testing.assert_close(program.module()(x), (x.double() @ net.expected.T + 1).float(), rtol=1e-4, atol=1e-4)


def arguments(**changed: Any) -> dict[str, Any]:
    (weight, scale_and_zero, group_size), _ = layer(16, 256, 64, 8, torch.float32, 0)
    x, bias = torch.randn(2, 256), torch.randn(16)
    base = {"x": x, "weight": weight, "scale_and_zero": scale_and_zero, "group_size": group_size, "bias": bias}
    return base | changed


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": torch.tensor(1.0)}, "x: expected floating point [..., k], got float32 []"),
        ({"x": torch.ones(2, 256, dtype=torch.int64)}, "x: expected floating point [..., k], got int64 [2, 256]"),
        ({"x": torch.ones(2, 257)}, "x: expected at most the weight's k = 256 in the last dimension, got float32 [2"),
        ({"x": torch.ones(256, 2).T}, "x: expected a contiguous last dimension, got the stride 2: copy it"),
        ({"weight": torch.ones(2, 2, 32, 4)}, "weight: expected a contiguous int32 tensor [n / 8]"),
        ({"weight": torch.ones(2, 2, 32).int()}, "got int32 [2, 2, 32]"),
        ({"weight": torch.ones(2, 2, 16, 4).int()}, "got int32 [2, 2, 16, 4]"),
        ({"weight": torch.ones(2, 2, 4, 32).int().mT}, "got int32 [2, 2, 32, 4], not contiguous"),
        ({"weight": torch.ones(2, 2, 32, 8).int()}, "weight: expected inner_k_tiles of 2, 4 or 8, got 16"),
        ({"group_size": 16}, "group_size: expected 32, 64, 128 or 256, and a divisor of the weight's k = 256, got 16"),
        ({"weight": torch.ones(2, 3, 32, 4).int(), "group_size": 256}, "a divisor of the weight's k = 384, got 256"),
        (
            {"scale_and_zero": torch.ones(4, 15, 2)},
            "scale_and_zero: expected contiguous bfloat16 or float16 or float32 [4, 16, 2], got float32 [4, 15, 2]",
        ),
        ({"scale_and_zero": torch.ones(4, 16, 2).double()}, "got float64 [4, 16, 2]"),
        ({"scale_and_zero": torch.ones(4, 2, 16).mT}, "got float32 [4, 16, 2], not contiguous"),
        ({"bias": torch.ones(15)}, "bias: expected contiguous float32 [16], got float32 [15]"),
        ({"bias": torch.ones(16).half()}, "bias: expected contiguous float32 [16], got float16 [16]"),
        ({"scale_and_zero": torch.ones(4, 16, 2, device="meta")}, "scale_and_zero: expected the device of x, cpu, got"),
    ],
)
def test_contract(changed: dict[str, Any], text: str, fake: bool) -> None:
    given = arguments(**changed)
    mode: Any = torch._subclasses.FakeTensorMode() if fake else None
    if mode is not None:
        given = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
        OPERATOR(**given)
    assert str(error.value).startswith("int4_linear: ")
    assert text in str(error.value)
