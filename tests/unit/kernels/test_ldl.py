"""LDL factors against PyTorch."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import check, run_both

from untorch.runtime.errors import ModelError
from untorch.runtime.registry import find_kernel

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.complex64, torch.complex128])
BATCHES = st.sampled_from([(), (3,), (2, 1), (0,)])
quick = settings(max_examples=40, deadline=None)


@quick
@given(BATCHES, st.integers(0, 8), DTYPES, st.booleans(), st.booleans(), st.integers(0, 20))
def test_factor_and_solve(batch, n, dtype, hermitian, small_diagonal, seed):
    a = torch.randn(*batch, n, n, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    a = a + (a.mH if hermitian else a.mT)
    if small_diagonal:  # asks for blocks of two rows
        a = a - torch.diag_embed(torch.diagonal(a, dim1=-2, dim2=-1)) * 0.9
    if a.numel() == 0:
        return
    check("linalg_ldl_factor_ex", a, hermitian=hermitian, factor=10)
    factors, pivots, _ = torch.linalg.ldl_factor_ex(a, hermitian=hermitian)
    b = torch.randn(*batch, n, 2, dtype=dtype, generator=torch.Generator().manual_seed(1))
    condition = float(torch.linalg.cond(a).max())
    check("linalg_ldl_solve", factors, pivots, b, hermitian=hermitian, factor=10 * condition)


def test_a_singular_matrix():
    a = torch.diag(torch.tensor([1.0, 0.0, 2.0]))
    assert run_both("linalg_ldl_factor_ex", a)[0][2] == run_both("linalg_ldl_factor_ex", a)[1][2] == 2
    with pytest.raises(ModelError, match=r"linalg_ldl_factor_ex: matrix 0 of the batch is singular \(info 2\)"):
        find_kernel("aten::linalg_ldl_factor_ex")(numpy.diag([1.0, 0.0, 2.0]), check_errors=True)
