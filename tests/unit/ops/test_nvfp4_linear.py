"""``untorch::nvfp4_linear``: the reference against float64, torch's own checks of an operator, and its contract."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.export import Dim

from untorch.ops.nvfp4 import OPERATOR
from untorch.ops.nvfp4_layout import E2M1_VALUES, pack_nvfp4, pack_nvfp4_tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("bytes", 2, 4, 8)


def layer(
    n: int, k: int, layout: str | int, scales: tuple[int, ...], seed: int
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The three tensors, and the weight in float64, element by element as the definition says."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    # E4M3 from 2^-6 to 1.875.
    block_scale = torch.randint(8, 64, (n, k // 16), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
    global_scale = torch.rand(scales, generator=generator) + 0.5
    packed = pack_nvfp4(codes)
    tensors = (packed if isinstance(layout, str) else pack_nvfp4_tiles(packed, layout), block_scale, global_scale)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)[codes]
    weight = values * block_scale.double().repeat_interleave(16, 1) * global_scale.double().expand(n)[:, None]
    return tensors, weight


@hypothesis.given(
    rows=st.sampled_from([(), (0,), (1,), (3,), (2, 5), (2, 0, 3)]),
    n=st.integers(1, 40),
    outer=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    scales=st.sampled_from(["all", "one", "rows"]),
    missing=st.integers(0, 15),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    biased=st.booleans(),
    between=st.integers(0, 3),
    turned=st.booleans(),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(deadline=None, max_examples=100)
def test_values(
    rows: tuple[int, ...], n: int, outer: int, layout: str | int, scales: str, missing: int, dtype: torch.dtype,
    biased: bool, between: int, turned: bool, seed: int,
) -> None:  # fmt: skip
    # Tiles need multiples; bytes need k to be one of 16.
    n, k = (n, 16 * outer) if isinstance(layout, str) else (-(-n // 8) * 8, 16 * layout * outer)
    tensors, weight = layer(n, k, layout, {"all": (), "one": (1,), "rows": (n,)}[scales], seed)
    generator = torch.Generator().manual_seed(seed)
    # Rows with something between them, and whose order in memory is another.
    x = torch.randn((*(rows[::-1] if turned else rows), k - missing + between), generator=generator).to(dtype)
    x = x[..., : k - missing]
    x = x.permute(*reversed(range(len(rows))), len(rows)) if turned else x
    bias = torch.randn(n, generator=generator).to(dtype) if biased else None
    y = OPERATOR(x, *tensors, bias)
    assert (y.dtype, y.shape) == (dtype, (*rows, n))
    assert y.is_contiguous()
    expected = x.double() @ weight[:, : k - missing].T + (0 if bias is None else bias.double())
    # The rounding of the result, and of a sum of k products of weights up to 17 in float32.
    rounded = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=rounded * k**0.5)


# Not test_schema: torch compares arguments before and after by arithmetic that float8 does not have.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["bytes", 8])
def test_opcheck(dtype: torch.dtype, biased: bool, layout: str | int) -> None:
    tensors, _ = layer(24, 256, layout, (24,) if biased else (), 0)
    x = torch.randn(3, 5, 250).to(dtype)
    for given in ((x, *tensors, torch.randn(24).to(dtype) if biased else None), (x[:, 1], *tensors)):
        torch.library.opcheck(OPERATOR, given, test_utils=OPCHECKS)
    for prefill in ("fp8", "fp4"):
        torch.library.opcheck(OPERATOR, (x, *tensors), {"prefill": prefill}, test_utils=OPCHECKS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_exact_whatever_prefill_asks_for(dtype: torch.dtype) -> None:
    tensors, _ = layer(24, 256, 8, (24,), 0)
    x = torch.randn(700, 256).to(dtype)
    for prefill in ("fp8", "fp4"):
        assert torch.equal(OPERATOR(x, *tensors, None, prefill), OPERATOR(x, *tensors))
    assert str(OPERATOR._schema).endswith('Tensor? bias=None, str prefill="exact") -> Tensor')


def test_arguments_stay_as_they_are_and_the_result_is_none_of_them() -> None:
    """What opcheck's test_schema looks at."""
    given = list(arguments().values())
    before = [tensor.clone().view(torch.uint8) for tensor in given if tensor.dim()]
    y = OPERATOR(*given)
    after = [tensor.view(torch.uint8) for tensor in given if tensor.dim()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(y.untyped_storage()._cdata != tensor.untyped_storage()._cdata for tensor in given)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        (packed, block_scale, global_scale), self.expected = layer(16, 128, 8, (16,), 1)
        self.register_buffer("packed", packed)
        self.register_buffer("block_scale", block_scale)
        self.register_buffer("global_scale", global_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATOR(x, self.packed, self.block_scale, self.global_scale, None) + 1


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
    (packed, block_scale, global_scale), _ = layer(16, 256, 8, (), 0)
    base = {"x": torch.randn(2, 256), "weight_packed": packed, "block_scale": block_scale}
    return base | {"global_scale": global_scale, "bias": torch.randn(16)} | changed


def scales(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": torch.tensor(1.0)}, "x: expected floating point [..., k], 16 bits or more, got float32 []"),
        ({"x": torch.ones(2, 256).int()}, "x: expected floating point [..., k], 16 bits or more, got int32 [2, 256]"),
        ({"x": scales(2, 256)}, "x: expected floating point [..., k], 16 bits or more, got float8_e4m3fn [2, 256]"),
        ({"x": torch.ones(2, 257)}, "x: expected at most the weight's k = 256 in the last dimension, got float32 [2"),
        ({"x": torch.ones(256, 2).T}, "x: expected a contiguous last dimension, got the stride 2: copy it"),
        (
            {"weight_packed": torch.ones(2, 2, 32, 4)},
            "weight_packed: expected a contiguous uint8 tensor [n, k / 2] or int32 tensor [n / 8][k / (16 · "
            "inner_k_tiles)][32][inner_k_tiles / 2], got float32 [2, 2, 32, 4]",
        ),
        ({"weight_packed": torch.ones(2, 2, 16, 4).int()}, "got int32 [2, 2, 16, 4]"),
        ({"weight_packed": torch.ones(16, 128).int()}, "got int32 [16, 128]"),
        ({"weight_packed": torch.ones(128, 16).byte().T}, "got uint8 [16, 128], not contiguous"),
        ({"weight_packed": torch.ones(2, 2, 4, 32).int().mT}, "got int32 [2, 2, 32, 4], not contiguous"),
        ({"weight_packed": torch.ones(2, 2, 32, 8).int()}, "weight_packed: expected inner_k_tiles of 2, 4 or 8, got 16"),
        (
            {"weight_packed": torch.ones(16, 127).byte()},
            "weight_packed: expected k a multiple of 16, got uint8 [16, 127] for k = 254",
        ),
        ({"block_scale": scales(16, 15)}, "block_scale: expected contiguous float8_e4m3fn [16, 16], got float8_e4m3fn [1"),
        ({"block_scale": torch.ones(16, 16)}, "expected contiguous float8_e4m3fn [16, 16], got float32 [16, 16]"),
        ({"block_scale": scales(16, 16).T}, "got float8_e4m3fn [16, 16], not contiguous"),
        ({"global_scale": torch.ones(2)}, "global_scale: expected contiguous float32 [] or [1] or [16], got float32 [2]"),
        ({"global_scale": torch.ones(()).half()}, "got float16 []"),
        ({"global_scale": torch.ones(32)[::2]}, "got float32 [16], not contiguous"),
        ({"bias": torch.ones(15)}, "bias: expected contiguous float32 [16], got float32 [15]"),
        ({"bias": torch.ones(16).half()}, "bias: expected contiguous float32 [16], got float16 [16]"),
        ({"prefill": "fp16"}, "prefill: expected one of 'exact', 'fp8', 'fp4', got 'fp16'"),
        ({"global_scale": torch.ones(16, device="meta")}, "global_scale: expected the device of x, cpu, got meta"),
    ],
)  # fmt: skip
def test_contract(changed: dict[str, Any], text: str, fake: bool) -> None:
    given = arguments(**changed)
    mode: Any = torch._subclasses.FakeTensorMode() if fake else None
    if mode is not None:
        given = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
        OPERATOR(**given)
    assert str(error.value).startswith("nvfp4_linear: ")
    assert text in str(error.value)
