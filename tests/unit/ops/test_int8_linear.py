"""``untorch::int8_linear``: the library's kernel beside the reference, torch's checks of an operator, its contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from untorch.ops.activations import ACTIVATIONS
from untorch.ops.int8 import INPUT_RANGES, OPERATOR, int8_linear_reference, quantize_activations
from untorch.ops.int8_layout import pack_int8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def arguments(**changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    n, k = changed.pop("n", 20), changed.pop("k", 7)
    dtype = changed.pop("dtype", torch.float32)
    weight, sums = pack_int8(torch.randint(-127, 128, (n, k), dtype=torch.int8))
    base = {
        "x": torch.randn(3, 5, k).to(dtype), "weight": weight, "scale": torch.rand(sums.shape[0]) / 100,
        "column_sums": sums, "bias": torch.randn(n).to(dtype), "residual": torch.randn(3, 5, n).to(dtype),
        "activation": "none", "out_features": n, "input_range": "asymmetric", "input_scale": 0.05, "input_zero": 90,
    }  # fmt: skip
    return base | changed


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@given(
    n=st.integers(1, 70), k=st.integers(0, 70), activation=st.sampled_from(ACTIVATIONS),
    kind=st.sampled_from(INPUT_RANGES), bare=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_the_library_gives_the_same_as_the_reference(
    dtype: torch.dtype, n: int, k: int, activation: str, kind: str, bare: bool
) -> None:
    given = arguments(n=n, k=k, dtype=dtype, activation=activation, input_range=kind)
    if bare:
        given |= {"bias": None, "residual": None}
    got = OPERATOR(**given)
    assert got.dtype == dtype
    assert got.is_contiguous()
    rounding = 1e-5 if dtype.itemsize >= 4 else torch.finfo(dtype).eps
    torch.testing.assert_close(got, int8_linear_reference(**given), rtol=rounding, atol=rounding)


def test_quantized_activations_come_back() -> None:
    torch.manual_seed(1)
    x = torch.randn(50, 33) + torch.linspace(-4, 4, 50).unsqueeze(1)
    for kind, steps in (("asymmetric", 1.0), ("symmetric", 0.5)):
        values, scale, zero = quantize_activations(x, kind)
        assert values.dtype == torch.uint8
        back = (values.float() - zero) * scale
        assert torch.all((back - x).abs() <= scale * (steps + 1e-3))
        assert torch.equal(
            torch.nan_to_num(quantize_activations(torch.zeros(2, 3), kind)[1]), torch.full((2, 1), 2.0**-126)
        )
    bad = torch.tensor([[1.0, torch.nan], [1.0, torch.inf], [1.0, 2.0]])
    assert torch.isnan(quantize_activations(bad, "asymmetric")[1]).flatten().tolist() == [True, True, False]
    assert torch.isnan(quantize_activations(bad, "static", 0.1, 3)[1]).flatten().tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype) -> None:
    given = arguments(dtype=dtype, activation="gelu")
    torch.library.opcheck(OPERATOR, tuple(given.values()))
    given |= {"bias": None, "residual": None, "input_range": "static", "x": given["x"].transpose(0, 1)}
    torch.library.opcheck(OPERATOR, tuple(given.values()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        given = arguments()
        for name in ("weight", "scale", "column_sums", "bias"):
            self.register_buffer(name, given[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = OPERATOR(
            x, self.weight, self.scale, self.column_sums, self.bias, None, "none", 20, "asymmetric", 0.0, 0
        )  # fmt: skip
        return y + 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it exports
def test_export_keeps_it_as_one_node_and_the_rows_may_vary() -> None:
    net = Net()
    program = torch.export.export(net, (torch.randn(2, 3, 7),), dynamic_shapes=({0: Dim("b"), 1: Dim("t")},))
    for decomposed in (program, program.run_decompositions()):
        nodes = [node for node in decomposed.graph.nodes if node.op == "call_function"]
        assert nodes[0].target == OPERATOR
        assert len(nodes) == 2
    x = torch.randn(4, 6, 7)
    assert torch.equal(program.module()(x), net(x))


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": torch.tensor(1.0)}, "x: expected floating point [..., k], k at most 65536, got float32 []"),
        ({"x": torch.ones(2, 7, dtype=torch.int64)}, "x: expected floating point [..., k], k at most 65536, got int64"),
        ({"x": torch.ones(2, 65537)}, "k at most 65536, got float32 [2, 65537]"),
        ({"x": torch.ones(3, 5, 9)}, "weight: expected int8 [2, 3, 16, 4], got int8 [2, 2, 16, 4]"),
        ({"weight": torch.ones(2, 2, 16, 4)}, "weight: expected int8 [2, 2, 16, 4], got float32 [2, 2, 16, 4]"),
        ({"out_features": 40}, "weight: expected int8 [3, 2, 16, 4], got"),
        ({"scale": torch.ones(20)}, "scale: expected float32 [32], got float32 [20]"),
        ({"column_sums": torch.ones(32)}, "column_sums: expected int32 [32], got float32 [32]"),
        ({"bias": torch.ones(19)}, "bias: expected float32 [20], got float32 [19]"),
        ({"bias": torch.ones(20).half()}, "bias: expected float32 [20], got float16 [20]"),
        ({"residual": torch.ones(20)}, "residual: expected float32 [3, 5, 20], got float32 [20]"),
        ({"activation": "elu"}, "activation: expected one of none, relu,"),
        ({"input_range": "row"}, "input_range: expected one of asymmetric, symmetric, static, tensor, got 'row'"),
        ({"input_range": "static", "input_scale": 0.0}, "input_scale: expected a finite number above 0, got 0.0"),
        ({"input_range": "static", "input_zero": 256}, "input_zero: expected 0 to 255, got 256"),
        ({"scale": torch.ones(32, device="meta")}, "scale: expected the device of x, cpu, got meta"),
    ],
)
def test_contract(changed: dict[str, Any], text: str, fake: bool) -> None:
    given = arguments(**changed)
    mode: Any = torch._subclasses.FakeTensorMode() if fake else None
    if mode is not None:
        given = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
        OPERATOR(**given)
    assert str(error.value).startswith("int8_linear: ")
    assert text in str(error.value)
