"""Models exported once are right at every size that they allow, drawn by hypothesis."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import untorch
from untorch.export import export

from .models import CASES, Case
from .test_conformance import FAST_BUILD

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports

Loaded = tuple[nn.Module, untorch.Program]


def load(case: Case, path: pathlib.Path) -> Loaded:
    export(case.module, case.args, path, dynamic_shapes=case.dynamic_shapes, progress=False, inductor=FAST_BUILD)
    return case.module, untorch.load(path)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    torch.manual_seed(0)
    module, program = load(CASES["transformer_encoder"](), tmp_path_factory.mktemp("sizes") / "encoder.pt2")
    with program:
        yield module, program


@pytest.fixture(scope="module")
def convolution(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    torch.manual_seed(0)
    module, program = load(CASES["conv1d_dilated_grouped"](), tmp_path_factory.mktemp("sizes") / "conv.pt2")
    with program:
        yield module, program


def check(loaded: Loaded, x: torch.Tensor) -> None:
    module, program = loaded
    with torch.no_grad():
        expected = module(x)
    torch.testing.assert_close(torch.from_numpy(program(x.numpy())), expected, rtol=1e-4, atol=1e-5)


@given(batch=st.integers(1, 32), length=st.integers(2, 128), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_encoder_at_any_batch_and_length(encoder: Loaded, batch: int, length: int, seed: int) -> None:
    check(encoder, torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(seed)))


@given(length=st.integers(10, 200), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_convolution_at_any_length(convolution: Loaded, length: int, seed: int) -> None:
    check(convolution, torch.randn(2, 4, length, generator=torch.Generator().manual_seed(seed)))


@given(
    size=st.one_of(
        st.tuples(st.integers(33, 40), st.integers(2, 128)),
        st.tuples(st.integers(1, 32), st.sampled_from([0, 1, 129, 500])),
    )
)
@settings(max_examples=20, deadline=None)
def test_sizes_out_of_range_are_refused(encoder: Loaded, size: tuple[int, int]) -> None:
    _, program = encoder
    with pytest.raises(untorch.InvalidArgumentError, match="expected float32"):
        program(torch.zeros(*size, 32).numpy())
