"""``untorch::nvfp4_moe``: the reference against a loop in float64, torch's own checks of an operator, its contract."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.native.nvfp4_experts import SwiGLU, by_integers_in_float64
from tests.native.nvfp4_panels import packed_for_integers
from untorch.ops.nvfp4_moe import OPERATOR, nvfp4_moe_reference

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def weights(experts: int, k: int, width: int, generator: torch.Generator, apart: bool = False) -> list[torch.Tensor]:
    """w13, w13_scale, w2, w2_scale, w13_global, w2_global with all codes and scales of many sizes."""

    def packed(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).mul_(4).to(torch.float8_e4m3fn)

    return [
        packed(experts, 2 * width, k // 2), scale(experts, 2 * width, k // 16),
        packed(experts, k, width // 2), scale(experts, k, width // 16),
        torch.rand((experts, 2) if apart else (experts,), generator=generator) / 4,
        torch.rand(experts, generator=generator) / 4,
    ]  # fmt: skip


def matrix(packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """[rows, k] in float64, element by element as the definition says; factor: one number, or one a row."""
    rows = []
    factors = factor.double().expand(len(packed)).tolist()
    for codes, scales, last in zip(packed.tolist(), scale.double().tolist(), factors, strict=True):
        nibbles = [nibble for byte in codes for nibble in (byte & 15, byte >> 4)]
        values = [(-1 if nibble & 8 else 1) * E2M1[nibble & 7] for nibble in nibbles]
        rows.append([value * scales[i // 16] * last for i, value in enumerate(values)])
    return torch.tensor(rows, dtype=torch.float64)


def swiglus(experts: int, k: int, width: int, generator: torch.Generator) -> dict[str, Any]:
    """The arguments after the weights, with gpt-oss's numbers but for a limit that small values meet."""
    biases = [torch.randn(shape, generator=generator) for shape in ((experts, 2 * width), (experts, k))]
    return {"w13_bias": biases[0], "w2_bias": biases[1], "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 0.7}


def by_token(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    given: list[torch.Tensor],
    swiglu: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the same with every product taken as positive: what rounding errors are beside."""
    w13, w13_scale, w2, w2_scale, w13_global, w2_global = given
    width = w13.shape[1] // 2
    first, second = {}, {}
    for e in {i for row in topk_ids.tolist() for i in row if i >= 0}:
        factor = w13_global[e].reshape(-1).expand(2).repeat_interleave(width)
        first[e], second[e] = matrix(w13[e], w13_scale[e], factor), matrix(w2[e], w2_scale[e], w2_global[e])
    y, size = torch.zeros(2, *x.shape, dtype=torch.float64)
    swiglu = swiglu or {}
    b13, b2 = (swiglu.get(name) for name in ("w13_bias", "w2_bias"))
    alpha, beta = swiglu.get("swiglu_alpha", 1.0), swiglu.get("swiglu_beta", 0.0)
    limit = swiglu.get("swiglu_limit") or torch.inf
    for m, row in enumerate(topk_ids.tolist()):
        for j, e in enumerate(row):
            if e >= 0:
                both, most = first[e] @ x[m].double(), first[e].abs() @ x[m].double().abs()
                if b13 is not None:
                    both, most = both + b13[e], most + b13[e].abs()
                gate, up = both[:width].clamp(max=limit), both[width:].clamp(-limit, limit)
                row = second[e] @ (gate * torch.sigmoid(alpha * gate) * (up + beta))
                most_row = second[e].abs() @ (most[:width] * (most[width:] + abs(beta)))
                if b2 is not None:
                    row, most_row = row + b2[e], most_row + b2[e].abs()
                y[m] += topk_weights[m, j].double() * row
                size[m] += topk_weights[m, j].double() * most_row
    return y, size


def compare(y: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
    exact, size = expected
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert y.shape == exact.shape
    info = torch.finfo(dtype)
    # The rounding of the result, which is coarser near zero, and of the sums of up to 80 and 48 products.
    allowed = (
        info.eps * exact.abs() + info.eps * info.smallest_normal + size * (5e-16 if dtype == torch.float64 else 5e-7)
    )
    assert ((y.double() - exact).abs() <= allowed).all(), ((y.double() - exact).abs() / allowed).max()


@hypothesis.given(
    tokens=st.integers(0, 9),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 8),
    k=st.sampled_from([16, 32, 80]),
    width=st.sampled_from([16, 48]),
    apart=st.booleans(),
    absent=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    padding=st.integers(0, 3),
    fields=st.sets(st.sampled_from(["w13_bias", "w2_bias", "swiglu_alpha", "swiglu_beta", "swiglu_limit"])),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_values(
    tokens: int, experts: int, top_k: int, k: int, width: int, apart: bool, absent: bool, dtype: torch.dtype,
    padding: int, fields: set[str], seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    given = weights(experts, k, width, generator, apart)
    # Small enough for float16's range; rows need not be adjacent.
    x = (torch.randn((tokens, k + padding), generator=generator) / 16).to(dtype)[:, :k]
    topk_weights = torch.rand((tokens, top_k), generator=generator)
    # Repeated experts, and experts without a token, come about by chance.
    topk_ids = torch.randint(-1 if absent else 0, experts, (tokens, top_k), generator=generator, dtype=torch.int32)
    every = swiglus(experts, k, width, generator)
    swiglu = {name: every[name] for name in fields}
    y = OPERATOR(x, topk_weights, topk_ids, *given, **swiglu)
    compare(y, by_token(x, topk_weights, topk_ids, given, swiglu), dtype)


@pytest.mark.parametrize(
    ("tokens", "top_k", "choose"),
    [
        (5, 1, lambda m, j: 200),  # all tokens on one expert
        (5, 4, lambda m, j: 255),  # on the last, several times each
        (1, 8, lambda m, j: 31 * j),  # one token
        (40, 8, lambda m, j: (7 * m + 11 * j) % 256),  # some experts have none
        (3, 2, lambda m, j: -1 if m != 1 else j),  # a token whose experts are all elsewhere
        (3, 2, lambda m, j: -1),
    ],
)
def test_256_experts(tokens: int, top_k: int, choose: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    given = weights(256, 32, 16, generator)
    x = torch.randn((tokens, 32), generator=generator)
    topk_ids = torch.tensor([[choose(m, j) for j in range(top_k)] for m in range(tokens)], dtype=torch.int32)
    topk_weights = torch.rand((tokens, top_k), generator=generator)
    y = OPERATOR(x, topk_weights, topk_ids, *given)
    compare(y, by_token(x, topk_weights, topk_ids, given), torch.float32)
    assert not y[(topk_ids == -1).all(1)].any()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("k", "width"), [(64, 32), (48, 80)])
def test_packed_for_integers(k: int, width: int, apart: bool) -> None:
    """The kernel, the reference, and int8 activations in float64 agree; K and I are padded."""
    generator = torch.Generator().manual_seed(3)
    given = tuple(weights(5, k, width, generator, apart))
    packed = packed_for_integers(given)
    x, factors = torch.randn((9, k), generator=generator) / 16, torch.rand((9, 2), generator=generator)
    ids = torch.randint(-1, 5, (9, 2), generator=generator, dtype=torch.int32)
    for swiglu in ({}, swiglus(5, k, width, generator)):
        names = ("w13_bias", "w2_bias", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
        numbers = SwiGLU(*(swiglu[name] for name in names)) if swiglu else SwiGLU()
        want, size = by_integers_in_float64(x, factors, ids, *given, swiglu=numbers)
        got, reference = (
            OPERATOR(x, factors, ids, *packed, **swiglu),
            nvfp4_moe_reference(x, factors, ids, *packed, **swiglu),
        )
        for y in (got, reference):
            assert y.dtype == torch.float32 and y.is_contiguous()
            assert ((y.double() - want).abs() <= want.abs() * 2.0**-22 + size * 2.0**-18).all()
        wide = OPERATOR(x.double(), factors, ids, *packed, **swiglu)  # by the reference
        assert wide.dtype == torch.float64
        assert ((wide - want).abs() <= size * 2.0**-18).all()


def test_simple_numbers_are_exact() -> None:
    # One expert, gate = up = 2·x0: all values are 1 in the first column, and 0 elsewhere; w2 likewise.
    packed = torch.zeros(1, 32, 8, dtype=torch.uint8)
    packed[..., 0] = 0b0010  # low half: 1.0 for even K
    packed2 = torch.zeros(1, 16, 8, dtype=torch.uint8)
    packed2[..., 0] = 0b1010_0000  # high half: -1.0 for odd I
    one = torch.ones(1, 32, 1).to(torch.float8_e4m3fn)
    given = [packed, one, packed2, one[:, :16], torch.tensor([2.0]), torch.tensor([1.0])]
    x = torch.zeros(1, 16, dtype=torch.float64)
    x[0, 0] = 3.0
    y = OPERATOR(x, torch.tensor([[0.5]]), torch.zeros(1, 1, dtype=torch.int32), *given)
    silu = 6 * torch.sigmoid(torch.tensor(6.0, dtype=torch.float64))
    torch.testing.assert_close(y, (-0.5 * silu * 6).expand(1, 16))


def test_the_defaults_are_silu() -> None:
    generator = torch.Generator().manual_seed(0)
    given, zeros = weights(3, 32, 48, generator), (torch.zeros(3, 96), torch.zeros(3, 32))
    args = torch.randn((5, 32), generator=generator), torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.int32)
    y = OPERATOR(*args, *given)
    assert torch.equal(OPERATOR(*args, *given, None, None, 1.0, 0.0, None), y)
    assert torch.equal(OPERATOR(*args, *given, *zeros), y)
    assert torch.equal(OPERATOR(*args, *given, swiglu_limit=torch.inf), y)


def test_a_limit_bounds_gate_above_and_up_on_both_sides() -> None:
    # Of one expert the gates are ±12 and the ups ±12; w2's first column alone is 1.
    packed = torch.zeros(1, 32, 8, dtype=torch.uint8)
    packed[0, :16, 0] = torch.tensor([0b0010, 0b1010] * 8)  # gates 1, -1, …
    packed[0, 16:, 0] = torch.tensor([0b0010] * 2 + [0b1010] * 14)  # ups 1, 1, -1, …
    one = torch.ones(1, 32, 1).to(torch.float8_e4m3fn)
    x = torch.zeros(1, 16, dtype=torch.float64)
    x[0, 0] = 12.0

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-1.702 * value))

    for column, gate, up in ((0, 7.0, 7.0), (1, -12.0, 7.0), (2, 7.0, -7.0), (3, -12.0, -7.0)):
        packed2 = torch.zeros(1, 16, 8, dtype=torch.uint8)
        packed2[..., column // 2] = 0b0010 << 4 * (column % 2)
        given = [packed, one, packed2, one[:, :16], torch.tensor([1.0]), torch.tensor([1.0])]
        ids = torch.zeros(1, 1, dtype=torch.int32)
        numbers = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
        y = OPERATOR(x, torch.ones(1, 1), ids, *given, w2_bias=torch.full((1, 16), 0.5), **numbers)
        expected = torch.full((1, 16), (up + 1) * gate * sigmoid(gate) + 0.5, dtype=torch.float64)
        torch.testing.assert_close(y, expected)


def test_no_experts_a_token() -> None:
    given = weights(2, 16, 16, torch.Generator().manual_seed(0))
    y = OPERATOR(torch.ones(3, 16), torch.ones(3, 0), torch.ones(3, 0, dtype=torch.int32), *given)
    assert torch.equal(y, torch.zeros(3, 16))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [False, True])
def test_opcheck(dtype: torch.dtype, apart: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    given = weights(5, 32, 48, generator, apart)
    x = torch.randn((4, 40), generator=generator).to(dtype)[:, :32]
    ids = torch.randint(-1, 5, (4, 3), generator=generator, dtype=torch.int32)
    # Not test_schema, which compares arguments before and after, and cannot compare float8: the next test does.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic", "test_aot_dispatch_static")
    for options in ({}, swiglus(5, 32, 48, generator), {"w2_bias": torch.ones(5, 32), "swiglu_alpha": 2.0}):
        for args in ((x, torch.rand(4, 3), ids, *given), (x[:1], torch.rand(1, 3), ids[:1], *given)):
            torch.library.opcheck(OPERATOR, args, options, test_utils=checks)


def test_it_writes_to_no_argument_and_returns_none() -> None:
    biases = {"w13_bias": torch.ones(3, 96), "w2_bias": torch.ones(3, 32)}
    given = list(arguments(topk_weights=torch.zeros(4, 2), **biases).values())
    before = [tensor.clone() for tensor in given]
    y = OPERATOR(*given)
    for old, new in zip(before, given, strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        assert y.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, tensor in enumerate(weights(4, 32, 16, torch.Generator().manual_seed(2))):
            self.register_buffer(f"w{i}", tensor)

    def forward(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return OPERATOR(x, topk_weights, topk_ids, self.w0, self.w1, self.w2, self.w3, self.w4, self.w5) + 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it exports
def test_export_keeps_it_as_one_node_and_the_tokens_may_vary() -> None:
    net, m = Net(), Dim("m")
    args = (torch.randn(3, 32), torch.rand(3, 2), torch.ones(3, 2, dtype=torch.int32))
    program = torch.export.export(net, args, dynamic_shapes=({0: m}, {0: m}, {0: m}))
    for decomposed in (program, program.run_decompositions()):
        nodes = [node for node in decomposed.graph.nodes if node.op == "call_function"]
        assert [node.target for node in nodes] == [OPERATOR, torch.ops.aten.add.Tensor]
    args = (torch.randn(7, 32), torch.rand(7, 2), torch.zeros(7, 2, dtype=torch.int32))
    torch.testing.assert_close(program.module()(*args), net(*args))


def arguments(**changed: Any) -> dict[str, Any]:
    names = ("w13", "w13_scale", "w2", "w2_scale", "w13_global", "w2_global")
    base = dict(zip(names, weights(3, 32, 48, torch.Generator().manual_seed(0)), strict=True))
    x, ids = torch.ones(4, 32), torch.zeros(4, 2, dtype=torch.int32)
    return {"hidden_states": x, "topk_weights": torch.ones(4, 2), "topk_ids": ids} | base | changed


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def e4m3(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


CONTRACT: list[tuple[dict[str, Any], str]] = [
    (
        {"hidden_states": torch.ones(4, 16)},
        "hidden_states: expected bfloat16, float16, float32 or float64 [tokens, 32], the weights' K, got float32 [4, 16]",
    ),
    ({"hidden_states": torch.ones(2, 2, 32)}, "the weights' K, got float32 [2, 2, 32]"),
    ({"hidden_states": torch.ones(4, 32).int()}, "the weights' K, got int32 [4, 32]"),
    ({"hidden_states": e4m3(4, 32)}, "the weights' K, got float8_e4m3fn [4, 32]"),
    (
        {"hidden_states": torch.ones(32, 4).T},
        "hidden_states: expected a contiguous last dimension, got the stride 4: copy it",
    ),
    ({"topk_weights": torch.ones(4)}, "topk_weights: expected float32 [tokens, top_k], got float32 [4]"),
    ({"topk_weights": torch.ones(3, 2)}, "topk_weights: expected contiguous float32 [4, 2], got float32 [3, 2]"),
    ({"topk_weights": torch.ones(4, 2).half()}, "expected contiguous float32 [4, 2], got float16 [4, 2]"),
    ({"topk_weights": torch.ones(2, 4).T}, "topk_weights: expected contiguous float32 [4, 2], got float32 [4, 2], not"),
    ({"topk_ids": torch.zeros(4, 2).long()}, "topk_ids: expected contiguous int32 [4, 2], got int64 [4, 2]"),
    ({"topk_ids": torch.zeros(4, 3).int()}, "topk_ids: expected contiguous int32 [4, 2], got int32 [4, 3]"),
    ({"w13": torch.ones(3, 96, 16)}, "w13: expected contiguous uint8 [experts, 2·I, K / 2], got float32 [3, 96, 16]"),
    ({"w13": bytes_of(3, 95, 16)}, "got uint8 [3, 95, 16]"),
    ({"w13": bytes_of(96, 16)}, "got uint8 [96, 16]"),
    ({"w13": bytes_of(3, 16, 96).mT}, "got uint8 [3, 96, 16], not contiguous"),
    ({"w13": bytes_of(3, 96, 12)}, "w13: expected K and I to be multiples of 16, got K = 24 and I = 48"),
    ({"w13": bytes_of(3, 80, 16)}, "w13: expected K and I to be multiples of 16, got K = 32 and I = 40"),
    ({"w13": bytes_of(3, 0, 16)}, "w13: expected K and I to be multiples of 16, got K = 32 and I = 0"),
    (
        {"w13_scale": e4m3(3, 96, 1)},
        "w13_scale: expected contiguous float8_e4m3fn [3, 96, 2], got float8_e4m3fn [3, 96, 1]",
    ),
    ({"w13_scale": torch.ones(3, 96, 2)}, "w13_scale: expected contiguous float8_e4m3fn [3, 96, 2], got float32 [3"),
    ({"w2": bytes_of(3, 32, 16)}, "w2: expected contiguous uint8 [3, 32, 24], got uint8 [3, 32, 16]"),
    ({"w2_scale": e4m3(3, 32, 2)}, "w2_scale: expected contiguous float8_e4m3fn [3, 32, 3], got float8_e4m3fn [3, 32"),
    ({"w13_global": torch.ones(3, 3)}, "w13_global: expected contiguous float32 [3] or [3, 2], got float32 [3, 3]"),
    ({"w13_global": torch.ones(2, 3).T}, "[3] or [3, 2], got float32 [3, 2], not contiguous"),
    ({"w2_global": torch.ones(3, 2)}, "w2_global: expected contiguous float32 [3], got float32 [3, 2]"),
    ({"w2_global": torch.ones(3).double()}, "w2_global: expected contiguous float32 [3], got float64 [3]"),
    ({"w13_bias": torch.ones(3, 48)}, "w13_bias: expected contiguous float32 [3, 96], got float32 [3, 48]"),
    ({"w13_bias": torch.ones(3, 96).half()}, "w13_bias: expected contiguous float32 [3, 96], got float16 [3, 96]"),
    ({"w13_bias": torch.ones(96, 3).T}, "[3, 96], got float32 [3, 96], not contiguous"),
    ({"w2_bias": torch.ones(32)}, "w2_bias: expected contiguous float32 [3, 32], got float32 [32]"),
    ({"w2_bias": torch.ones(3, 32).to("meta")}, "w2_bias: expected the device of w13, cpu, got meta"),
    ({"swiglu_alpha": math.nan}, "swiglu_alpha: expected a finite number of float32, got nan"),
    ({"swiglu_alpha": 1e39}, "swiglu_alpha: expected a finite number of float32, got 1e+39"),
    ({"swiglu_beta": -math.inf}, "swiglu_beta: expected a finite number of float32, got -inf"),
    ({"swiglu_limit": 0.0}, "swiglu_limit: expected a number above 0, or None for no limit, got 0.0"),
    ({"swiglu_limit": -7.0}, "swiglu_limit: expected a number above 0, or None for no limit, got -7.0"),
    ({"swiglu_limit": math.nan}, "swiglu_limit: expected a number above 0, or None for no limit, got nan"),
    ({"w2": bytes_of(3, 32, 24).to("meta")}, "w2: expected the device of w13, cpu, got meta"),
    (
        {"topk_ids": torch.zeros(4, 2, dtype=torch.int32, device="meta")},
        "topk_ids: expected the device of hidden_states, cpu, got meta",
    ),
]


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


PACKED = {"w13": words(18, 4, 16), "w13_scale": e4m3(18, 2, 16), "w2": words(6, 8, 16), "w2_scale": e4m3(6, 4, 16)}
CONTRACT += [
    (PACKED | changed, text)
    for changed, text in (
        ({"hidden_states": torch.ones(4, 16)}, "[tokens, 32], the weights' K, got float32 [4, 16]"),
        (
            {"w13": words(18, 64)},
            "w13: expected contiguous int32 [rows / 16, K / 8, 16], with a multiple of 32 rows for each of 3 experts, got "
            "int32 [18, 64]",
        ),
        ({"w13": words(17, 4, 16)}, "with a multiple of 32 rows for each of 3 experts, got int32 [17, 4, 16]"),
        ({"w13": words(0, 4, 16)}, "with a multiple of 32 rows for each of 3 experts, got int32 [0, 4, 16]"),
        ({"w13": words(4, 18, 16).transpose(0, 1)}, "for each of 3 experts, got int32 [18, 4, 16], not contiguous"),
        ({"w13": words(18, 8, 16)}, "w13: expected contiguous int32 [18, 4, 16], got int32 [18, 8, 16]"),
        ({"w13_scale": e4m3(18, 4, 16)}, "w13_scale: expected contiguous float8_e4m3fn [18, 2, 16], got float8_e4m3fn"),
        (
            {"w2": bytes_of(3, 32, 24)},
            "w2: expected contiguous int32 [rows / 16, K / 8, 16], with a multiple of 16 rows",
        ),
        ({"w2": words(7, 8, 16)}, "with a multiple of 16 rows for each of 3 experts, got int32 [7, 8, 16]"),
        ({"w2": words(6, 6, 16)}, "w2: expected contiguous int32 [6, 8, 16], got int32 [6, 6, 16]"),
        ({"w2_scale": torch.ones(6, 4, 16)}, "w2_scale: expected contiguous float8_e4m3fn [6, 4, 16], got float32"),
        ({"w2_global": torch.ones(0)}, "with a multiple of 32 rows for each of 0 experts, got int32 [18, 4, 16]"),
        ({"w13_global": torch.ones(2)}, "w13_global: expected contiguous float32 [3] or [3, 2], got float32 [2]"),
    )
]


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(("changed", "text"), CONTRACT)
def test_contract(changed: dict[str, Any], text: str, fake: bool) -> None:
    given = arguments(**changed)
    mode: Any = torch._subclasses.FakeTensorMode() if fake else None
    if mode is not None:
        given = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()
        }
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
        OPERATOR(**given)
    assert str(error.value).startswith("nvfp4_moe: ")
    assert text in str(error.value)


@pytest.mark.parametrize("wrong", [3, -2, 2**31 - 1])
def test_an_id_of_no_expert(wrong: int) -> None:
    ids = torch.zeros(4, 2, dtype=torch.int32)
    ids[2, 1] = wrong
    with pytest.raises(
        ValueError, match=f"^nvfp4_moe: topk_ids: expected experts from 0 to 2, or -1 for none, got {wrong}$"
    ):
        OPERATOR(**arguments(topk_ids=ids))
