"""The kernels of recurrent layers in Triton's interpreter, against the references; and that they compile for GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreter import INTERPRETED, run_interpreted
from tests.native.state_batches import channel_decays, conv_batch, delta_batch, without_beta
from untorch.ops.causal_conv1d import causal_conv1d
from untorch.ops.gated_delta_rule import gated_delta_rule

pytest.importorskip("triton")

# Triton 3.6's interpreter takes arrays of one element for numbers, and computes nonsense with bfloat16.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
compiling = pytest.mark.skipif(INTERPRETED, reason="Triton interprets")


def placed(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the operator for GPUs."""
    return given | {"offset": torch.tensor([given["offset"]])}


def verify(given: dict[str, Any]) -> None:
    from untorch.ops.linear_attention import launch

    is_conv = "x" in given
    plain, reference = (dict(given, states=given["states"].clone()) for _ in range(2))
    launched = launch.launch_causal_conv1d if is_conv else launch.launch_gated_delta_rule
    got = launched(**placed(plain), wrap=lambda kernel: kernel)
    expected = causal_conv1d(**reference) if is_conv else gated_delta_rule(**reference)
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(plain["states"], reference["states"], rtol=2e-5, atol=2e-5)


def random_lengths(rng: np.random.Generator, most: int) -> list[tuple[int, int]]:
    lengths = []
    for _ in range(rng.integers(1, 5)):
        tokens = int(rng.integers(0, most))
        lengths.append((tokens, tokens + int(rng.choice([0, 0, 1, 100]))))
    return lengths


@interpreted
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(10, 30))]
)
def test_any_convolution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given = conv_batch(
        random_lengths(rng, 40), int(rng.choice([4, 20, 150])), int(rng.choice([1, 2, 3, 4, 7])),
        (torch.float32, torch.float16)[seed % 2], int(rng.integers(0, 4)), int(rng.choice([0, 16, 64])), seed,
        seed % 3 == 0,
    )  # fmt: skip
    given["silu"] = bool(rng.integers(2))
    if rng.integers(2):
        given["bias"] = None
    verify(given)


@interpreted
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(10, 30))]
)
def test_any_delta_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads_k = int(rng.choice([1, 2]))
    given = delta_batch(
        random_lengths(rng, 9), heads_k * int(rng.choice([1, 3])), heads_k, int(rng.choice([8, 19, 64])),
        int(rng.choice([8, 20, 70])), (torch.float32, torch.float16)[seed % 2], int(rng.integers(0, 4)),
        int(rng.choice([0, 16, 64])), seed, seed % 3 == 0,
    )  # fmt: skip
    if rng.integers(2):
        given = channel_decays(given)
    if rng.integers(2):
        given = without_beta(given)
    verify(given)


@interpreted
def test_a_slot_out_of_range_writes_nothing() -> None:
    from untorch.ops.linear_attention import launch

    for given in (conv_batch([(2, 5)], 8, 4), delta_batch([(2, 5)], 2, 2, 8, 8)):
        given["state_slots"] = torch.tensor([3], dtype=torch.int32)
        states = given["states"].clone()
        launched = launch.launch_causal_conv1d if "x" in given else launch.launch_gated_delta_rule
        launched(**placed(given), wrap=lambda kernel: kernel)
        assert torch.equal(given["states"], states)


def compiled(kernel: Any, capability: int, constants: dict[str, Any], dtype: str) -> Any:
    """The kernel for a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        **dict.fromkeys(("slots_ptr", "ends_ptr", "lengths_ptr"), "*i32"), "offset_ptr": "*i64",
        **dict.fromkeys(("states_ptr", "g_ptr", "beta_ptr"), "*fp32"),
    }  # fmt: skip
    signature, attributes = {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, f"*{dtype}") if name.endswith("_ptr") else "i64"
        if name.startswith("stride_") or name.endswith("_ptr"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2})


@compiling
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles(capability: int, dtype: str) -> None:
    from untorch.ops.linear_attention import kernels

    for width in (3, 4):
        values = {
            "CHANNELS": 8192, "WIDTH": width, "BIAS": width == 3, "SILU": width == 4, "BLOCK_T": 16, "BLOCK_C": 128,
        }  # fmt: skip
        compiled(kernels.causal_conv1d_kernel, capability, values, dtype)
    common = {"SCALE": 0.1, "EPSILON": 1e-6, "HEADS": 32, "GROUP": 2, "WIDTH": 128, "WIDTH_V": 128}
    for rule in (
        {"CHANNEL_DECAY": False, "BETA": True, "L2NORM": True, "BLOCK_K": 128, "BLOCK_V": 32},
        {"CHANNEL_DECAY": True, "BETA": True, "L2NORM": True, "BLOCK_K": 128, "BLOCK_V": 32},
        {"CHANNEL_DECAY": False, "BETA": False, "L2NORM": False, "WIDTH": 256, "WIDTH_V": 64, "BLOCK_K": 256,
         "BLOCK_V": 16},
    ):  # fmt: skip
        done = compiled(kernels.gated_delta_rule_kernel, capability, common | rule, dtype)
        assert done.metadata.shared <= 48 << 10


@compiling
def test_pytorch_sees_what_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its analysis fails, PyTorch takes every argument for written: it would copy the states at each layer."""
    import triton
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
    from triton.backends.compiler import GPUTarget

    from untorch.ops.linear_attention import launch

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    written: dict[str, list[str]] = {}

    class Wrapped:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launched(*args: Any, **named: Any) -> None:
                names = [parameter.name for parameter in self.kernel.params]
                given = dict(zip(names, args, strict=False)) | {k: v for k, v in named.items() if k in names}
                tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
                numbers = kernel_side_table.add_constant_args({k: v for k, v in given.items() if k not in tensors})
                number = kernel_side_table.add_kernel(self.kernel)
                written[self.kernel.__name__] = get_mutated_tensors(number, numbers, tensors, {})

            return launched

    launch.launch_causal_conv1d(**placed(conv_batch([(3, 5)], 64, 4, torch.bfloat16)), wrap=Wrapped)
    launch.launch_gated_delta_rule(**placed(delta_batch([(3, 5)], 4, 2, 64, 64, torch.bfloat16)), wrap=Wrapped)
    assert written == {
        "causal_conv1d_kernel": ["states_ptr", "out_ptr"], "gated_delta_rule_kernel": ["states_ptr", "out_ptr"],
    }  # fmt: skip


@compiling
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@compiling
@pytest.mark.exhaustive
def test_further_batches_in_the_interpreter() -> None:
    run_interpreted(__file__, "exhaustive")
