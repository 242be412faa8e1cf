"""GEMM on the GPU against float64 on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.native import shim
from tests.native.shim import F32, I32, Opt, ShimError, call, lib, use_torch_stream

F64 = torch.float64
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES, F64]
LAYOUTS = ["rows", "columns", "wide rows", "wide columns", "steps", "offset"]

# Half a unit in the last place of a result, and of the sums: those of a long sum are a little worse than one.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-22, F64: 2.0**-50}
SUMMING = {torch.bfloat16: 2.0**-20, torch.float16: 2.0**-20, torch.float32: 2.0**-20, F64: 2.0**-48}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of x on the GPU, in memory as ``layout`` says; what lies between them is NaN."""
    rows, cols = x.shape[-2:]
    lead = x.shape[:-2]

    def fresh(*shape: int) -> torch.Tensor:
        out = torch.empty((*lead, *shape), dtype=x.dtype, device="cuda")
        return out.fill_(float("nan") if x.is_floating_point() else 77)

    match layout:
        case "rows":
            out = fresh(rows, cols)
        case "columns":
            out = fresh(cols, rows).mT
        case "wide rows":
            out = fresh(rows, cols + 8)[..., :cols]
        case "wide columns":
            out = fresh(cols, rows + 8)[..., :rows].mT
        case "steps":
            out = fresh(2 * rows + 1, 3 * cols + 1)[..., 1::2, 1::3]
        case "offset":
            out = fresh(rows, cols + 3)[..., 3:]
        case _:
            raise ValueError(layout)
    return out.copy_(x)


def check(
    got: torch.Tensor, want: torch.Tensor, size: torch.Tensor, loose: float = 1.0, gemm: torch.Tensor | None = None
) -> None:
    """got against the float64 result; size is the sum of the magnitudes of what was added up.

    ``gemm``: what something else was added to. Some of cuBLAS's kernels round it first, for PyTorch as for us.
    """
    assert got.shape == want.shape
    dtype, got = got.dtype, got.cpu().double()
    rounded = want.abs() if gemm is None else want.abs() + gemm.abs()
    bound = (ROUNDING[dtype] * rounded + SUMMING[dtype] * size) * loose + 2.0**-24
    assert torch.equal(got.isnan(), want.isnan())
    error = (got - want).abs().nan_to_num()
    worst = (error - bound.nan_to_num()).argmax() if error.numel() else 0
    assert (error <= bound.nan_to_num()).all(), (
        f"{dtype} {tuple(want.shape)}: at {worst} got {got.flatten()[worst]}, expected {want.flatten()[worst]}"
    )


def reference(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = a.cpu().double(), b.cpu().double()
    return a @ b, a.abs() @ b.abs()


SIZES = st.one_of(st.integers(0, 20), st.sampled_from([24, 32, 33, 40, 48, 64, 72, 96, 100, 128, 256, 257, 320]))


@settings(max_examples=400, deadline=None)
@given(
    m=SIZES, n=SIZES, k=SIZES, dtype=st.sampled_from(FLOATS), a_layout=st.sampled_from(LAYOUTS),
    b_layout=st.sampled_from(LAYOUTS), out_layout=st.sampled_from(LAYOUTS),
    added=st.sampled_from(["scalar", "vector", "row", "column", "full", "full columns", "out"]),
    alpha=st.sampled_from([1.0, -0.5, 2.0, 0.0]), beta=st.sampled_from([1.0, 0.0, 0.5, -1.0]),
)  # fmt: skip
@example(m=64, n=256, k=64, dtype=torch.float16, a_layout="rows", b_layout="columns", out_layout="rows",
         added="vector", alpha=1.0, beta=1.0)  # fmt: skip
@example(m=0, n=3, k=4, dtype=torch.float32, a_layout="rows", b_layout="rows", out_layout="rows", added="vector",
         alpha=1.0, beta=1.0)  # fmt: skip
def test_addmm(m: int, n: int, k: int, dtype: torch.dtype, a_layout: str, b_layout: str, out_layout: str, added: str,
               alpha: float, beta: float) -> None:  # fmt: skip
    a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=1)
    shape = {"scalar": (), "vector": (n,), "row": (1, n), "column": (m, 1)}.get(added, (m, n))
    self = random(*shape, dtype=dtype, seed=2)
    gemm, size = reference(a, b)
    want = alpha * gemm
    if beta == 0.0:
        self = torch.full_like(self, float("nan"))  # must not be read
    else:
        want = want + beta * self.double()
        size = abs(alpha) * size + self.double().abs()
    out = laid(torch.full((m, n), float("nan"), dtype=dtype), out_layout)
    if added == "out":
        out.copy_(self)
        given = out
    else:
        given = laid(self, "columns") if added == "full columns" else self.cuda()
    call("aoti_torch_cuda_addmm_out", out, given, laid(a, a_layout), laid(b, b_layout), beta, alpha)
    check(out, want, size, gemm=None if beta == 0.0 else alpha * gemm)


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(0, 5), m=SIZES, n=SIZES, k=SIZES, dtype=st.sampled_from(FLOATS),
    a_layout=st.sampled_from(LAYOUTS), b_layout=st.sampled_from(LAYOUTS), out_layout=st.sampled_from(LAYOUTS),
    expand=st.sampled_from(["", "a", "b"]), beta=st.sampled_from([None, 0.0, 1.0, 2.0]),
    added=st.sampled_from(["vector", "matrix", "full"]),
)  # fmt: skip
def test_batches(batch: int, m: int, n: int, k: int, dtype: torch.dtype, a_layout: str, b_layout: str,
                 out_layout: str, expand: str, beta: float | None, added: str) -> None:  # fmt: skip
    a, b = random(batch, m, k, dtype=dtype), random(batch, k, n, dtype=dtype, seed=1)
    if expand == "a" and batch:
        a = a[:1].expand(batch, m, k)
    if expand == "b" and batch:
        b = b[:1].expand(batch, k, n)
    left, right = laid(a, a_layout), laid(b, b_layout)
    if expand == "a" and batch:
        left = left[:1].expand(batch, m, k)
    if expand == "b" and batch:
        right = right[:1].expand(batch, k, n)
    want, size = reference(a, b)
    gemm = None
    out = laid(torch.full((batch, m, n), float("nan"), dtype=dtype), out_layout)
    if beta is None:
        call("aoti_torch_cuda_bmm_out", out, left, right)
    else:
        self = random(*{"vector": (n,), "matrix": (m, n)}.get(added, (batch, m, n)), dtype=dtype, seed=2)
        call("aoti_torch_cuda_baddbmm_out", out, self.cuda(), left, right, beta, 0.5)
        gemm = 0.5 * want
        want = gemm + beta * self.double()
        size = size + beta * self.double().abs()
    check(out, want, size, gemm=gemm if beta else None)


@pytest.mark.parametrize("dtype", FLOATS)
def test_mm_plus_mm(dtype: torch.dtype) -> None:
    """a · b + c · d, and other names that say no device; the first is rounded before the second is added, as PyTorch's."""
    a, c = random(40, 300, dtype=dtype), random(40, 72, dtype=dtype, seed=1)
    b, d = random(300, 56, dtype=dtype, seed=2), random(72, 56, dtype=dtype, seed=3)
    out = torch.full((40, 56), float("nan"), dtype=dtype, device="cuda")
    call("aoti_torch__mm_plus_mm_out", out, a.cuda(), laid(b, "columns"), c.cuda(), d.cuda())
    (first, first_size), (second, second_size) = reference(a, b), reference(c, d)
    check(out, first + second, first_size + second_size, gemm=first)
    call("aoti_torch_mm_out", out, a.cuda(), b.cuda())
    check(out, first, first_size)
    call("aoti_torch_addmm_out", out, d[:1].cuda(), a.cuda(), b.cuda(), F32(0.5), F32(2.0))
    check(out, 2 * first + 0.5 * d[:1].double(), 2 * first_size + d[:1].double().abs(), gemm=2 * first)
    call("aoti_torch_bmm_out", out[None], a.cuda()[None], b.cuda()[None])
    check(out, first, first_size)


@pytest.mark.parametrize("dtype", FLOATS[:3])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (14336, 4096), (4096, 14336), (1000, 2048), (512, 520), (8, 8192)])
def test_small_m(n: int, k: int, layout: str, dtype: torch.dtype) -> None:
    b = random(k, n, dtype=dtype, seed=1)
    weight = laid(b, layout)
    bias = random(n, dtype=dtype, seed=2)
    for m in (1, 2, 3, 4, 5, 8, 9, 13, 16, 17):
        a = random(m, k, dtype=dtype)
        want, size = reference(a, b)
        out, again = (torch.full((m, n), float("nan"), dtype=dtype, device="cuda") for _ in range(2))
        for to in (out, again):
            call("aoti_torch_cuda_addmm_out", to, bias.cuda(), a.cuda(), weight, 1.0, 1.0)
        check(out, want + bias.double(), size + bias.double().abs())
        assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(300, 500, 700), (512, 512, 512), (129, 255, 1030), (2000, 3, 4096)])
def test_larger(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=1)
    want, size = reference(a, b)
    for a_layout in ("rows", "columns", "steps"):
        for b_layout in ("rows", "columns", "wide rows"):
            out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
            call("aoti_torch_cuda_mm_out", out, laid(a, a_layout), laid(b, b_layout))
            check(out, want, size)


@pytest.mark.parametrize("m", [1, 8, 16, 40, 600])
@pytest.mark.parametrize("dtype", FLOATS)
def test_not_finite(m: int, dtype: torch.dtype) -> None:
    a, b = random(m, 64, dtype=dtype), random(64, 96, dtype=dtype, seed=1)
    a[0, 3], b[5, 7] = float("nan"), float("inf")
    want, _ = reference(a, b)
    out = torch.empty(m, 96, dtype=dtype, device="cuda")
    call("aoti_torch_cuda_mm_out", out, a.cuda(), b.cuda())
    got = out.cpu().double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


def test_many_batches() -> None:
    a, b = random(70000, 2, 24, dtype=torch.float16), random(70000, 24, 3, dtype=torch.float16, seed=1)
    out = torch.empty(70000, 2, 3, dtype=torch.float16, device="cuda")
    call("aoti_torch_cuda_bmm_out", out, a.cuda(), b.cuda())
    check(out, *reference(a, b))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", [1, 16, 300])
def test_mm_dtype(m: int, dtype: torch.dtype) -> None:
    a, b = random(m, 256, dtype=dtype), random(256, 64, dtype=dtype, seed=1)
    out = torch.empty(m, 64, device="cuda")
    call("aoti_torch_cuda_mm_dtype_out", out, a.cuda(), b.cuda(), I32(6))
    check(out, *reference(a, b))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["rows", "columns", "wide rows", "steps"])
@pytest.mark.parametrize(("m", "k"), [(7, 5), (1000, 512), (64, 2048), (5, 0), (0, 5)])
def test_addmv(m: int, k: int, layout: str, dtype: torch.dtype) -> None:
    a, x, self = random(m, k, dtype=dtype), random(k, dtype=dtype, seed=1), random(m, dtype=dtype, seed=2)
    want, size = reference(a, x[:, None])
    for vector, added in [(x.cuda(), self), (x.cuda().repeat_interleave(2)[::2], self[:1] if m else self)]:
        got = call("aoti_torch_cuda_addmv", added.cuda(), laid(a, layout), vector, 0.5, 2.0, returns=1)
        check(got, 2 * want[:, 0] + 0.5 * added.double(), 2 * size[:, 0] + added.double().abs())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("batch", "m", "k", "n"), [(3, 4, 5, 6), (0, 4, 5, 6), (4, 40, 64, 80), (2, 3, 0, 4)])
def test_addbmm(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    a, b = random(batch, m, k, dtype=dtype), random(batch, k, n, dtype=dtype, seed=1)
    self = random(n, dtype=dtype, seed=2)
    want, size = reference(a, b)
    got = call("aoti_torch_cuda_addbmm", self.cuda(), laid(a, "columns"), b.cuda(), 0.5, 2.0, returns=1)
    check(got, 2 * want.sum(0) + 0.5 * self.double(), 2 * size.sum(0) + self.double().abs())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m", [1, 16, 64, 700])
@pytest.mark.parametrize("gelu", [False, True])
def test_addmm_activation(m: int, gelu: bool, dtype: torch.dtype) -> None:
    a, b = random(m, 72, dtype=dtype), random(72, 96, dtype=dtype, seed=1)
    gemm, size = reference(a, b)
    for self, beta in [(random(96, dtype=dtype, seed=2), 1.0), (random(m, 96, dtype=dtype, seed=2), 0.5)]:
        got = call(
            "aoti_torch_cuda__addmm_activation", self.cuda(), a.cuda(), b.cuda(), beta, 1.0, I32(gelu), returns=1
        )
        want = gemm + beta * self.double()
        want = torch.nn.functional.gelu(want, approximate="tanh") if gelu else want.relu()
        # cuBLAS's gelu of float32 is not exact to the last place.
        check(got, want, size + self.double().abs(), loose=8 if dtype != F64 else 1)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 4, 5), (40, 48, 64), (1, 1, 1), (3, 4, 0), (0, 4, 2), (65, 130, 99),
                                           (17, 1000, 1024), (512, 512, 4096)])  # fmt: skip
@pytest.mark.parametrize("b_layout", ["rows", "columns", "wide columns"])
@pytest.mark.parametrize("a_layout", ["rows", "columns", "offset"])
def test_int_mm(m: int, n: int, k: int, a_layout: str, b_layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-128, 128, (m, k), generator=generator).to(torch.int8)
    b = torch.randint(-128, 128, (k, n), generator=generator).to(torch.int8)
    out = torch.full((m, n), 7, dtype=torch.int32, device="cuda")
    call("aoti_torch_cuda__int_mm_out", out, laid(a, a_layout), laid(b, b_layout))
    assert torch.equal(out.cpu(), (a.double() @ b.double()).int())


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32, E4M3])
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (17, 64, 128), (256, 512, 1024), (33, 48, 4096)])
def test_scaled_mm(m: int, n: int, k: int, bias: bool, rowwise: bool, types: tuple[torch.dtype, torch.dtype],
                   out_dtype: torch.dtype) -> None:  # fmt: skip
    if (rowwise and out_dtype == E4M3) or (bias and out_dtype == torch.float32):
        pytest.skip("refused: see the contract")
    a, b = random(m, k, dtype=torch.float32).to(types[0]), random(n, k, dtype=torch.float32, seed=1).to(types[1]).t()
    scale_a = torch.rand(m, 1) + 0.5 if rowwise else torch.tensor(0.25)
    scale_b = torch.rand(1, n) + 0.5 if rowwise else torch.tensor(2.0)
    added = random(n, dtype=torch.bfloat16 if out_dtype == E4M3 else out_dtype, seed=2) if bias else None
    want, size = reference(a.double(), b.double())
    scale = scale_a.double() * scale_b.double()
    want, size = want * scale, size * scale
    if added is not None:
        want, size = want + added.double(), size + added.double().abs()
    got = call("aoti_torch_cuda__scaled_mm", a.cuda(), b.cuda(), scale_a.cuda(), scale_b.cuda(),
               Opt(None if added is None else added.cuda()), Opt(None), Opt(shim.CODES[out_dtype], "int32"), I32(0),
               returns=1)  # fmt: skip
    assert got.dtype == out_dtype
    got = got.cpu().double()
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20, E4M3: 2.0**-3}[out_dtype]
    # The tensor cores sum a float8 GEMM in fewer bits than float32 has.
    bound = unit * want.abs() + 2.0**-11 * size + (2.0**-9 if out_dtype == E4M3 else 0)
    want = want.clamp(-448, 448) if out_dtype == E4M3 else want
    assert ((got - want).abs() <= bound).all()
    out = torch.empty(m, n, dtype=out_dtype, device="cuda")
    call("aoti_torch_cuda__scaled_mm_out", out, a.cuda(), b.cuda(), scale_a.cuda(), scale_b.cuda(),
         Opt(None if added is None else added.cuda()), Opt(None), Opt(None, "int32"), I32(1))  # fmt: skip
    assert ((out.cpu().double() - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("lengths", [[3, 0, 70, 64, 1], [128], [0, 0, 5], [16, 48, 32, 200]])
@pytest.mark.parametrize("a_layout", ["rows", "columns"])
@pytest.mark.parametrize("b_layout", ["rows", "columns", "offset"])
@pytest.mark.parametrize("kind", ["rows", "columns", "k", "batch"])
def test_grouped_mm(kind: str, a_layout: str, b_layout: str, lengths: list[int], dtype: torch.dtype) -> None:
    groups, total = len(lengths), sum(lengths)
    ends = torch.tensor(lengths).cumsum(0).int()
    spare = total + 5 if kind in ("rows", "columns") else total  # what lies behind the last group becomes 0
    a_shape = {"rows": (spare, 72), "k": (40, total)}.get(kind, (groups, 40, 72))
    b_shape = {"columns": (72, spare), "k": (total, 88)}.get(kind, (groups, 72, 88))
    a, b = random(*a_shape, dtype=dtype), random(*b_shape, dtype=dtype, seed=1)
    offs = Opt(None if kind == "batch" else ends.cuda())
    got = call("aoti_torch_cuda__grouped_mm", laid(a, a_layout), laid(b, b_layout), offs, Opt(None),
               Opt(None, "int32"), returns=1)  # fmt: skip
    start = 0
    if kind == "batch":
        check(got, *reference(a, b))
        return
    for g, end in enumerate(ends.tolist()):
        match kind:
            case "rows":
                check(got[start:end], *reference(a[start:end], b[g]))
            case "columns":
                check(got[:, start:end], *reference(a[g], b[:, start:end]))
            case _:
                check(got[g], *reference(a[:, start:end], b[start:end]))
        start = end
    if kind == "rows":
        assert (got[start:] == 0).all()
    elif kind == "columns":
        assert (got[:, start:] == 0).all()


# On sm_90 the WGMMA kernel takes what TMA can load: tiles for few and many rows a group, sizes that no tile divides, both
# orders of the weight, more groups than a warp has lanes. K = 68 is left to the kernel for any strides.
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("groups", "n", "k", "mean"),
    [
        (5, 72, 72, 3), (8, 200, 136, 20), (8, 128, 64, 100), (16, 256, 512, 300), (3, 1000, 1096, 500),
        (128, 768, 256, 8), (200, 64, 2048, 2), (1, 136, 200, 1), (4, 520, 8, 70), (1000, 8, 8, 1), (6, 100, 68, 50),
    ],
)  # fmt: skip
def test_moe_grouped_mm(groups: int, n: int, k: int, mean: int, transposed: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(groups + n)
    lengths = torch.randint(0, 2 * mean + 1, (groups,), generator=generator)
    lengths[torch.rand(groups, generator=generator) < 0.2] = 0
    ends = lengths.cumsum(0).int()
    a = random(int(ends[-1]) + 7, k, dtype=dtype)
    b = random(groups, n, k, dtype=dtype, seed=1).mT if transposed else random(groups, k, n, dtype=dtype, seed=1)
    on_gpu = b.mT.contiguous().cuda().mT if transposed else b.cuda()
    got = call("aoti_torch_cuda_moe_grouped_mm", a.cuda(), on_gpu, ends.cuda(), returns=1)
    assert got.is_contiguous()
    start = 0
    for g, end in enumerate(ends.tolist()):
        check(got[start:end], *reference(a[start:end], b[g]))
        start = end
    assert (got[start:] == 0).all()


def test_wrong_ends_are_cut() -> None:
    a, b = random(40, 64, dtype=torch.bfloat16), random(4, 64, 64, dtype=torch.bfloat16, seed=1)
    wrong, cut = torch.tensor([-3, 20, 10, 99]).int(), [0, 20, 20, 40]
    got = call("aoti_torch_cuda_moe_grouped_mm", a.cuda(), b.cuda(), wrong.cuda(), returns=1)
    for g, (start, end) in enumerate(zip([0, *cut], cut, strict=False)):
        check(got[start:end], *reference(a[start:end], b[g]))


@pytest.mark.parametrize("allowed", [False, True])
def test_float32_groups_and_tf32(allowed: bool) -> None:
    """Exact FMAs, or operands that were rounded to 10 bits of mantissa."""
    a, b = random(150, 264, dtype=torch.float32), random(3, 264, 136, dtype=torch.float32, seed=1)
    ends = torch.tensor([60, 61, 150]).int()
    lib.untorch_allow_tf32(int(allowed))
    try:
        got = call("aoti_torch_cuda_moe_grouped_mm", a.cuda(), b.cuda(), ends.cuda(), returns=1)
    finally:
        lib.untorch_allow_tf32(0)
    want = torch.cat([reference(a[s:e], b[g])[0] for g, (s, e) in enumerate([(0, 60), (60, 61), (61, 150)])])
    error = float((got.cpu().double() - want).abs().max())
    assert (1e-4 < error < 0.2) if allowed else error < 1e-4


def test_groups_in_a_graph() -> None:
    """The host reads no ends: a replay with others computes with them."""
    a, b = random(300, 128, dtype=torch.bfloat16).cuda(), random(4, 64, 128, dtype=torch.bfloat16, seed=1).mT
    on_gpu, ends = b.mT.contiguous().cuda().mT, torch.zeros(4, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        use_torch_stream()
        got = call("aoti_torch_cuda_moe_grouped_mm", a, on_gpu, ends, returns=1)
    use_torch_stream()
    for lengths in ([100, 0, 200, 0], [1, 2, 3, 4], [0, 0, 0, 300]):
        ends.copy_(torch.tensor(lengths).cumsum(0))
        graph.replay()
        start = 0
        for g, end in enumerate(ends.tolist()):
            check(got[start:end], *reference(a[start:end], b[g]))
            start = end
        assert (got[start:] == 0).all()


@pytest.mark.parametrize(("m", "n", "k"), [(4, 256, 512), (600, 512, 512)])
def test_in_a_graph(m: int, n: int, k: int) -> None:
    a, b = random(m, k, dtype=torch.float16).cuda(), random(k, n, dtype=torch.float16, seed=1).cuda()
    bias, out = random(n, dtype=torch.float16, seed=2).cuda(), torch.empty(m, n, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    # As untorch captures itself: what is used for the first time may still be loaded.
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        use_torch_stream()
        call("aoti_torch_cuda_addmm_out", out, bias, a, b, 1.0, 1.0)
    use_torch_stream()
    for seed in (3, 4):
        new = random(m, k, dtype=torch.float16, seed=seed)
        a.copy_(new)
        graph.replay()
        want, size = reference(new, b)
        check(out, want + bias.cpu().double(), size + bias.cpu().double().abs())


def test_eight_threads() -> None:
    cases = [(m, n, k, dtype) for m, n, k in [(1, 512, 256), (300, 256, 128), (40, 64, 96), (257, 130, 260)]
             for dtype in FLOATS]  # fmt: skip
    inputs = [
        (random(m, k, dtype=d), random(k, n, dtype=d, seed=1), random(n, dtype=d, seed=2)) for m, n, k, d in cases
    ]
    want = [reference(a, b) for a, b, _ in inputs]
    placed = [tuple(x.cuda() for x in case) for case in inputs]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                use_torch_stream()
                for turn in range(40):
                    i = (first + turn) % len(cases)
                    a, b, bias = placed[i]
                    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device="cuda")
                    call("aoti_torch_cuda_addmm_out", out, bias, a, b, 1.0, 1.0)
                    stream.synchronize()
                    check(out, want[i][0] + inputs[i][2].double(), want[i][1] + inputs[i][2].double().abs())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(2 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_tf32_only_when_allowed() -> None:
    a, b = random(512, 1024, dtype=torch.float32), random(1024, 512, dtype=torch.float32, seed=1)
    want, size = reference(a, b)
    out = torch.empty(512, 512, device="cuda")
    call("aoti_torch_cuda_mm_out", out, a.cuda(), b.cuda())
    check(out, want, size)
    lib.untorch_allow_tf32(1)
    try:
        call("aoti_torch_cuda_mm_out", out, a.cuda(), b.cuda())
    finally:
        lib.untorch_allow_tf32(0)
    error = ((out.cpu().double() - want).abs() / size).max()
    assert 2.0**-20 < error < 2.0**-10


def test_refusal_leaves_the_output_alone() -> None:
    out = torch.ones(2, 4, device="cuda")
    with pytest.raises(ShimError, match="the inner sizes differ"):
        call("aoti_torch_cuda_mm_out", out, torch.ones(2, 3, device="cuda"), torch.ones(4, 4, device="cuda"))
    assert (out == 1).all()
