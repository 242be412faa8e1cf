"""``NVFP4MoE``: what it gives the operator, what it refuses, and that its tensors keep their dtypes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from untorch.ops.nvfp4_moe import OPERATOR
from untorch.quant.moe import NVFP4MoE
from untorch.runtime.errors import InvalidArgumentError


def weights(experts: int = 4, k: int = 32, width: int = 48, columns: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def packed(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).to(torch.float8_e4m3fn)

    return [
        packed(experts, 2 * width, k // 2), scale(experts, 2 * width, k // 16),
        packed(experts, k, width // 2), scale(experts, k, width // 16),
        torch.rand((experts,) if columns is None else (experts, columns), generator=generator),
        torch.rand(experts, generator=generator),
    ]  # fmt: skip


@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(), (0,), (5,), (2, 3), (2, 0, 3)])
def test_it_flattens_and_converts(rows: tuple[int, ...], dtype: torch.dtype, columns: int | None) -> None:
    given = weights(columns=columns)
    moe = NVFP4MoE(*given)
    x = torch.randn(*rows, 2, 32).to(dtype).transpose(-1, -2).contiguous().transpose(-1, -2)  # not contiguous
    topk_weights, topk_ids = torch.rand(*rows, 2, 4).to(dtype).topk(3)
    y = moe(x, topk_weights, topk_ids)
    expected = OPERATOR(
        x.reshape(-1, 32).contiguous(), topk_weights.reshape(-1, 3).float(), topk_ids.reshape(-1, 3).int(), *given
    )
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert torch.equal(y.reshape(-1, 32), expected)


def test_one_token_without_a_batch() -> None:
    moe = NVFP4MoE(*weights())
    x, topk_weights, topk_ids = torch.randn(32), torch.rand(2), torch.tensor([1, -1])
    assert torch.equal(moe(x, topk_weights, topk_ids), moe(x[None], topk_weights[None], topk_ids[None])[0])
    nothing = moe(x, topk_weights[:0], topk_ids[:0])
    assert torch.equal(nothing, torch.zeros(32))


def test_sizes() -> None:
    moe = NVFP4MoE(*weights())
    assert (moe.num_experts, moe.hidden_size, moe.intermediate_size) == (4, 32, 48)
    assert repr(moe) == "NVFP4MoE(num_experts=4, hidden_size=32, intermediate_size=48)"
    # 4 experts of 3 · 32 · 48 weights in half a byte, with a byte for each 16, and two factors each.
    assert moe.weight_nbytes == 4 * (3 * 32 * 48 // 2 + 3 * 32 * 48 // 16 + 2 * 4)
    assert len(list(moe.parameters())) == 0


GPT_OSS = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}


def test_biases_and_numbers_reach_the_operator() -> None:
    given, biases = weights(), (torch.randn(4, 96), torch.randn(4, 32))
    x, factors, ids = torch.randn(5, 32), torch.rand(5, 2), torch.randint(0, 4, (5, 2))
    y = NVFP4MoE(*given, *biases, **GPT_OSS)(x, factors, ids)
    assert torch.equal(y, OPERATOR(x, factors, ids.int(), *given, *biases, 1.702, 1.0, 7.0))
    silu = NVFP4MoE(*given)(x, factors, ids)
    for options in ({"w13_bias": biases[0]}, {"w2_bias": biases[1]}, *({name: GPT_OSS[name]} for name in GPT_OSS)):
        small = {name: 0.1 if name == "swiglu_limit" else value for name, value in options.items()}
        other = NVFP4MoE(*given, **small)(x, factors, ids)
        assert torch.equal(other, OPERATOR(x, factors, ids.int(), *given, **small)) and not torch.equal(other, silu)


def test_biases_are_described_kept_and_not_counted() -> None:
    biases = {"w13_bias": torch.randn(4, 96), "w2_bias": torch.randn(4, 32)}
    moe = NVFP4MoE(*weights(), **biases, **GPT_OSS)
    sizes = "num_experts=4, hidden_size=32, intermediate_size=48"
    assert repr(moe) == f"NVFP4MoE({sizes}, biases=w13_bias+w2_bias, swiglu=(1.702, 1.0, 7.0))"
    assert moe.weight_nbytes == NVFP4MoE(*weights()).weight_nbytes
    assert repr(NVFP4MoE(*weights(), w2_bias=biases["w2_bias"])) == f"NVFP4MoE({sizes}, biases=w2_bias)"
    assert set(moe.state_dict()) - set(NVFP4MoE(*weights()).state_dict()) == set(biases)
    for name, bias in biases.items():
        assert torch.equal(moe.half().get_buffer(name), bias)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"w13_bias": torch.ones(4, 32)}, "w13_bias: expected contiguous float32 [4, 96], got float32 [4, 32]"),
        ({"w2_bias": torch.ones(4, 32, dtype=torch.bfloat16)}, "w2_bias: expected contiguous float32 [4, 32], got bfl"),
        ({"w2_bias": torch.ones(4, 32, device="meta")}, "w2_bias: expected the device of w13, cpu, got meta"),
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha: expected a finite number of float32, got nan"),
        ({"swiglu_beta": 1e300}, "swiglu_beta: expected a finite number of float32, got 1e+300"),
        ({"swiglu_limit": 0}, "swiglu_limit: expected a number above 0, or None for no limit, got 0"),
    ],
)
def test_biases_and_numbers_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        NVFP4MoE(*weights(), **options)
    assert str(error.value).startswith(f"NVFP4MoE: {text}")


def test_converting_the_module_leaves_the_format() -> None:
    given = weights()
    parent = torch.nn.Sequential(NVFP4MoE(*given), torch.nn.Linear(32, 8)).to(torch.bfloat16)
    assert parent[1].weight.dtype == torch.bfloat16
    for old, new in zip(given, parent[0].buffers(), strict=True):
        assert new.dtype == old.dtype
        assert torch.equal(new.view(torch.uint8), old.view(torch.uint8))
    assert {tensor.device.type for tensor in parent.half().to("meta")[0].buffers()} == {"meta"}


def test_its_state_comes_back() -> None:
    moe, other = NVFP4MoE(*weights()), NVFP4MoE(*(torch.zeros_like(tensor) for tensor in weights()))
    other.load_state_dict(moe.state_dict())
    given = torch.randn(3, 32), torch.rand(3, 2), torch.randint(0, 4, (3, 2))
    assert moe(*given).any()
    assert torch.equal(other(*given), moe(*given))
    assert torch.equal(copy.deepcopy(moe)(*given), moe(*given))


CALL: dict[str, torch.Tensor] = {
    "hidden_states": torch.ones(3, 32),
    "topk_weights": torch.ones(3, 2),
    "topk_ids": torch.zeros(3, 2, dtype=torch.int64),
}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"hidden_states": torch.ones(3, 31)}, "hidden_states: expected 32 in the last dimension, got (3, 31)"),
        ({"hidden_states": torch.tensor(1.0)}, "hidden_states: expected 32 in the last dimension, got ()"),
        ({"topk_ids": torch.ones(3, 2)}, "topk_ids: expected integers, got torch.float32"),
        ({"topk_ids": torch.ones(3, 2).bool()}, "topk_ids: expected integers, got torch.bool"),
        ({"topk_weights": torch.ones(3, 2).int()}, "topk_weights: expected floating point, got torch.int32"),
        (
            {"topk_ids": torch.zeros(2, 3, 2).long()},
            "topk_ids: expected the dimensions of hidden_states (3, 32) but for the last, got (2, 3, 2)",
        ),
        (
            {"topk_weights": torch.ones(4, 2)},
            "topk_weights: expected the dimensions of hidden_states (3, 32) but for the last, got (4, 2)",
        ),
        ({"topk_weights": torch.tensor(1.0)}, "topk_weights: expected the dimensions of hidden_states (3, 32) but for"),
    ],
)
def test_calls_that_are_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        NVFP4MoE(*weights())(**(CALL | changed))
    assert str(error.value).startswith(f"NVFP4MoE: {text}")


@pytest.mark.parametrize("wrong", [4, -2, 2**32 + 1, -(2**32)])
def test_an_id_that_int32_would_fold_is_refused(wrong: int) -> None:
    ids = torch.tensor([[0, 1], [2, 3], [wrong, 0]])
    with pytest.raises(ValueError, match="expected experts from 0 to 3, or -1 for none"):
        NVFP4MoE(*weights())(**(CALL | {"topk_ids": ids}))


def test_weights_that_do_not_fit_are_refused() -> None:
    given = weights()
    given[3] = given[3][:, :, :2].contiguous()
    with pytest.raises(
        InvalidArgumentError, match=r"^NVFP4MoE: w2_scale: expected contiguous float8_e4m3fn \[4, 32, 3\]"
    ):
        NVFP4MoE(*given)
    given = weights()
    given[1] = given[1].to("meta")
    with pytest.raises(InvalidArgumentError, match="NVFP4MoE: w13_scale: expected the device of w13, cpu, got meta"):
        NVFP4MoE(*given)
