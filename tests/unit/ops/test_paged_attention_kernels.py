"""The paged attention kernels in Triton's interpreter, against the reference; and that they compile for GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreter import INTERPRETED, run_interpreted
from tests.native.test_paged_attention import KV, batch, special_rows
from untorch.ops.kv_pages import LARGEST_CODE
from untorch.ops.paged_attention import paged_attention

pytest.importorskip("triton")

# Triton 3.6's interpreter takes arrays of one element for numbers, and computes nonsense with bfloat16.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
compiling = pytest.mark.skipif(INTERPRETED, reason="Triton interprets")


def launch(
    given: dict[str, Any], processors: int = 8, rows: int = 16, block_m: int = 16, block_n: int = 16
) -> torch.Tensor:
    from untorch.ops.attention.configs import DecodeConfig, PrefillConfig
    from untorch.ops.attention.paged_configs import PagedConfig
    from untorch.ops.attention.paged_launch import launch_paged

    config = PagedConfig(PrefillConfig(block_m, block_n, 4, 2), DecodeConfig(block_n, 4, 2, 1), rows, 2)
    return launch_paged(**placed(given), wrap=lambda kernel: Skipping(kernel), config=config, processors=processors)


def verify(given: dict[str, Any], processors: int = 8, **tiles: int) -> None:
    plain, reference = dict(given, pool=given["pool"].clone()), dict(given, pool=given["pool"].clone())
    got, expected = launch(plain, processors, **tiles), paged_attention(**reference)
    tolerance = TOLERANCE[given["q"].dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    raw, expected_raw = plain["pool"].view(torch.uint8), reference["pool"].view(torch.uint8)
    torch.testing.assert_close(raw, expected_raw, rtol=0, atol=0)


def placed(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the operator for GPUs."""
    offset = given["offset"]
    return given | {"offset": torch.tensor([offset]), "aligned": offset % 16 == 0, "wgmma": False}


class Skipping:
    """A kernel whose launch with an empty grid does nothing, as in a package."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.kernel[grid] if grid[0] else lambda *args, **named: None


def random_batch(seed: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and tiles that a seed chooses."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    lengths = []
    decodes = rng.random() < 0.4
    for _ in range(rng.integers(1, 5)):
        length = int(rng.integers(1, 130))
        lengths.append((1 if decodes else int(rng.integers(0, min(length, 40) + 1)), length))
    heads_kv = pick(1, 2, 3)
    given = batch(
        lengths, heads_kv * pick(1, 2, 4, 7, 20), heads_kv, pick(8, 20, 24, 32, 48, 64), pick(8, 16, 20, 32),
        pick(16, 32, 48), pick(torch.float32, torch.float16), int(rng.integers(0, 4)), pick(0, 5, 64), seed,
        pick(*KV),
    )  # fmt: skip
    heads = given["q"].shape[1]
    given["window"], given["chunk"], given["softcap"] = pick(0, 0, 1, 17, 60), pick(0, 0, 16, 37), pick(0.0, 2.5)
    given["sinks"] = pick(None, torch.linspace(-2, 2, heads))
    given["alibi"] = pick(None, torch.linspace(0.01, 0.5, heads))
    if rng.random() < 0.3:  # a layer that reads what another one wrote
        given["k"] = given["v"] = None
    tiles = {"processors": pick(1, 8, 40), "rows": pick(16, 32), "block_m": pick(16, 64), "block_n": pick(16, 32, 64)}
    return given, tiles


@interpreted
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(8, 40))]
)
def test_any_batch(seed: int) -> None:
    given, tiles = random_batch(seed)
    verify(given, **tiles)


@interpreted
@pytest.mark.parametrize("processors", [1, 64])
@pytest.mark.parametrize(("lengths", "padding"), [
    ([(1, 1)], 0),
    ([(0, 5)], 3),
    ([(0, 5), (0, 7), (3, 9)], 0),  # no more tokens than sequences, and one of several
    ([(0, 5)] * 20 + [(18, 30)], 0),
    ([(1, 200), (1, 3), (40, 77), (17, 17), (16, 50)], 4),
    ([(1, 64)] * 6, 2),
])  # fmt: skip
def test_ragged(lengths: list[tuple[int, int]], padding: int, processors: int) -> None:
    verify(batch(lengths, 4, 2, 16, 16, padding=padding), processors)


WIDTHS = [(576, 512, 16), (192, 128, 4), (256, 256, 2), (96, 96, 2)]


@interpreted
@pytest.mark.parametrize(
    ("width", "width_v", "heads", "kv"),
    [
        pytest.param(*sizes, kv, marks=() if at % len(KV) == i else pytest.mark.exhaustive)
        for i, kv in enumerate(KV)
        for at, sizes in enumerate(WIDTHS)
    ],
)
def test_widths(width: int, width_v: int, heads: int, kv: torch.dtype | None) -> None:
    verify(batch([(1, 40), (20, 35)], heads, 1, width, width_v, dtype=torch.float16, kv=kv), 4)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, for what is not finite
@pytest.mark.parametrize("kv", KV[1:])
def test_codes_of_special_rows(kv: torch.dtype) -> None:
    given = batch([(70, 70)], 2, 1, 24, 20, kv=kv)
    special_rows(given)
    reference = dict(given, pool=given["pool"].clone())
    paged_attention(**reference)
    launch(given)
    assert torch.equal(given["pool"].view(torch.uint8), reference["pool"].view(torch.uint8))


@interpreted
@pytest.mark.parametrize("kv", KV)
def test_pages_behind_the_window_may_hold_anything(kv: torch.dtype | None) -> None:
    given = batch([(1, 100), (20, 90)], 2, 1, 16, 16, kv=kv)
    given["window"] = 10
    for row, first in ((0, 90), (1, 61)):
        for page in given["block_table"][row, : first // 16].tolist():
            given["pool"].view(torch.uint8)[page] = 255  # NaN in floats, FP8 and scales
    verify(given, 16, block_n=64)


@interpreted
@pytest.mark.parametrize("kv", KV)
def test_slots_and_pages_out_of_range(kv: torch.dtype | None) -> None:
    given = batch([(3, 20)], 2, 1, 16, 16, kv=kv)
    before = given["pool"].clone()
    given["slot_mapping"] = torch.tensor([-1, -7, before.shape[0] * 16])
    given["block_table"][:] = torch.tensor([-5, 1 << 30, 3], dtype=torch.int32)
    given["seqlens_k"][:] = 1000
    got = launch(given, 2)
    assert torch.equal(given["pool"].view(torch.uint8), before.view(torch.uint8)) and got.isfinite().all()


@interpreted
def test_strided_queries_and_keys() -> None:
    given = batch([(5, 20), (1, 9)], 4, 2, 16, 16)
    for name in ("q", "k", "v"):
        given[name] = given[name].transpose(0, 1).contiguous().transpose(0, 1)
    verify(given)


SHARED = {80: 166912, 89: 101376, 90: 232448, 120: 101376}  # 86 has 89's


TRITON_TYPES = {None: None, torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv"}


def compiled(
    kernel: Any, capability: int, constants: dict[str, Any], warps: int, stages: int, dtype: str, kv: str | None = None
) -> Any:
    """The kernel for a GPU that need not be here, with strides that are multiples of 16. kv: the pool's type."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        "table_ptr": "*i32", "ends_ptr": "*i32", "lengths_ptr": "*i32", "slots_ptr": "*i64",
        "offset_ptr": "*i64", "pool_ptr": f"*{kv or dtype}",
        **dict.fromkeys(("sinks_ptr", "alibi_ptr", "parts_ptr", "peaks_ptr", "totals_ptr"), "*fp32"),
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
    source = ASTSource(kernel, signature, {k: v for k, v in constants.items() if k in signature}, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@compiling
@pytest.mark.slow
@pytest.mark.parametrize(("width", "width_v", "group"), [
    (80, 80, 1), (128, 128, 4), (192, 128, 1), (256, 256, 2), (576, 512, 128),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles(capability: int, dtype: str, width: int, width_v: int, group: int) -> None:
    compile_all(capability, dtype, width, width_v, group, None)


@compiling
@pytest.mark.slow
@pytest.mark.parametrize(("width", "width_v", "group"), [(128, 128, 4), (576, 512, 128)])
@pytest.mark.parametrize(("capability", "dtype", "kv"), [
    (80, "bf16", torch.int8), (80, "fp16", torch.int8), (89, "bf16", torch.float8_e4m3fn), (90, "bf16", torch.int8),
    (90, "bf16", torch.float8_e4m3fn), (120, "bf16", torch.float8_e4m3fn), (120, "fp32", torch.int8),
])  # fmt: skip
def test_codes_compile(capability: int, dtype: str, width: int, width_v: int, group: int, kv: torch.dtype) -> None:
    compile_all(capability, dtype, width, width_v, group, kv)


def compile_all(capability: int, dtype: str, width: int, width_v: int, group: int, kv: torch.dtype | None) -> None:
    from untorch.ops.attention import paged
    from untorch.ops.attention.configs import block_width
    from untorch.ops.attention.paged_configs import paged_config, split_width

    size = 4 if dtype == "fp32" else 2
    if size == 4 and width > 256:
        with pytest.raises(ValueError, match="expected heads of at most 256 for keys and 256 for values on a GPU in"):
            paged_config(capability, size, width, width_v, group)
        return
    config = paged_config(capability, size, width, width_v, group)
    block_d, rest = split_width(width)
    few_heads = min(group, config.rows)
    common = {
        "SCALE": 0.1, "SOFTCAP": 0.0, "WINDOW": 0, "CHUNK": 0, "SINKS": False, "ALIBI": False, "HEADS_KV": 2,
        "GROUP": group, "BLOCK": 16, "WIDTH": width, "WIDTH_V": width_v, "BLOCK_D": block_d, "BLOCK_REST": rest,
        "BLOCK_DV": block_width(width_v), "ALIGNED": True, "PRECISE": size == 4,
        "LARGEST": 0.0 if kv is None else LARGEST_CODE[kv],
    }  # fmt: skip
    variants = [common]
    if capability == 90 and width == 128 and kv is None:
        variants.append(common | {"SOFTCAP": 30.0, "WINDOW": 100, "CHUNK": 64, "SINKS": True, "ALIBI": True})
        variants.append(common | {"BLOCK": 128})
    for values in variants:
        decode, prefill = config.decode, config.prefill
        done = compiled(
            paged.paged_decode, capability,
            values | {
                "GROUP_TILE": few_heads, "BLOCK_M": config.rows, "BLOCK_N": decode.block_n,
            },
            decode.num_warps, decode.num_stages, dtype, TRITON_TYPES[kv],
        )  # fmt: skip
        assert done.metadata.shared <= SHARED[capability], "decode"
        done = compiled(
            paged.paged_prefill, capability,
            values | {
                "GROUP_TILE": min(group, prefill.block_m), "FEW": config.rows // few_heads,
                "BLOCK_M": prefill.block_m, "BLOCK_N": prefill.block_n,
            },
            prefill.num_warps, prefill.num_stages, dtype, TRITON_TYPES[kv],
        )  # fmt: skip
        assert done.metadata.shared <= SHARED[capability], "prefill"
        if capability == 90 and size == 2:
            assert "wgmma.mma_async" in done.asm["ptx"]
    values = common | {"BLOCK_D": block_width(width), "BLOCK_T": 16}
    compiled(paged.write_pages, capability, values, 4, 1, dtype, TRITON_TYPES[kv])
    values = {
        "HEADS": 2 * group, "BLOCK_Q": 2, "WIDTH_V": width_v, "BLOCK_DV": block_width(width_v), "BLOCK_S": 32,
        "WINDOW": 0, "CHUNK": 0, "BLOCK": 16, "BLOCK_N": decode.block_n,
    }  # fmt: skip
    compiled(paged.paged_combine, capability, values, 4, 1, dtype)


@compiling
def test_fp8_is_for_gpus_that_convert_it() -> None:
    from untorch.ops.attention.paged_configs import paged_config

    with pytest.raises(ValueError, match="paged_attention") as caught:
        paged_config(86, 2, 128, 128, 4, fp8=True)
    assert str(caught.value) == (
        "paged_attention: expected a GPU of sm_89 or newer for keys and values in FP8, got sm_86: use int8 "
        "(kv_dtype='int8')"
    )
    assert paged_config(89, 2, 128, 128, 4, fp8=True) == paged_config(86, 2, 128, 128, 4)


@compiling
@pytest.mark.parametrize("kv", KV)
def test_pytorch_sees_what_they_write(kv: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its analysis fails, PyTorch takes every argument for written: it would copy the pool at each layer."""
    import triton
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
    from triton.backends.compiler import GPUTarget

    from untorch.ops.attention.paged_configs import paged_config
    from untorch.ops.attention.paged_launch import launch_paged

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

    given = batch([(1, 40), (20, 35)], 4, 2, 64, 64, dtype=torch.bfloat16, kv=kv)
    launch_paged(**placed(given), wrap=Wrapped, config=paged_config(90, 2, 64, 64, 2), processors=132)
    assert written == {
        "write_pages": ["pool_ptr"], "paged_decode": ["out_ptr", "parts_ptr", "peaks_ptr", "totals_ptr"],
        "paged_combine": ["out_ptr"], "paged_prefill": ["out_ptr"],
    }  # fmt: skip


@compiling
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@compiling
@pytest.mark.exhaustive
def test_further_batches_in_the_interpreter() -> None:
    run_interpreted(__file__, "exhaustive")
