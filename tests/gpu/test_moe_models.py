"""Tiny mixtures of experts from transformers in half types, exported by untorch and by PyTorch, like eager on the GPU.

In float32 they are among the conformance tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import untorch
from tests.conformance.transformers_models import TRANSFORMERS
from tests.gpu.models import stock
from untorch.export import export

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
# A few roundings in a row, of logits of about 1.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Of the tokens. Where two experts score alike, a rounding decides which one a token goes to.
SHARE = 0.9


def model_of(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    case = TRANSFORMERS[name]()
    return case.module.to(dtype).eval().requires_grad_(False), case.args


def check(path: Path, name: str, dtype: torch.dtype) -> None:
    model, args = model_of(name, dtype)
    on_gpu = [x.cuda() for x in args]
    with torch.no_grad():
        [expected] = model.cuda()(*on_gpu)
    with untorch.load(path) as program:
        [got] = program(*on_gpu)
        found = torch.from_dlpack(got).clone()
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    close = ((found - expected).abs() <= TOLERANCES[dtype] * (1 + expected.abs())).all(-1)
    assert float(close.float().mean()) >= SHARE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_by_untorch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, args = model_of(name, dtype)
    export(model, args, tmp_path / "moe.pt2", device="cuda", progress=False)
    check(tmp_path / "moe.pt2", name, dtype)


HEADER = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h"


@pytest.mark.skipif(
    "aoti_torch_cuda__grouped_mm(" not in HEADER.read_text(), reason="this torch's own packages of it do not compile"
)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_by_pytorch(name: str, folder: Path) -> None:
    model, args = model_of(name, torch.bfloat16)
    path = stock(folder, f"stock_{name}", model.cuda(), tuple(x.cuda() for x in args))
    check(path, name, torch.bfloat16)
