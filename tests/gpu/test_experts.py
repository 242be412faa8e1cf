"""Files with NVFP4 MoE layers against eager PyTorch: any routing, also in a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import untorch
from tests.native.nvfp4_experts import random_experts, random_swiglu
from untorch.export import export
from untorch.quant import NVFP4MoE

K, EXPERTS = 256, 16
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4}  # of the largest value


class Block(nn.Module):
    """A router and its experts, as Qwen3's or as gpt-oss's."""

    def __init__(self, dtype: torch.dtype, biased: bool) -> None:
        super().__init__()
        self.router = nn.Linear(K, EXPERTS, bias=False, dtype=torch.float32)
        self.norm = nn.LayerNorm(K, dtype=dtype)
        weights = random_experts(EXPERTS, K, 128, True)
        self.experts = NVFP4MoE(*weights)
        if biased:
            swiglu = random_swiglu(EXPERTS, K, 128)
            self.experts = NVFP4MoE(
                *weights, swiglu.w13_bias, swiglu.w2_bias, swiglu_alpha=swiglu.alpha, swiglu_beta=swiglu.beta,
                swiglu_limit=swiglu.limit,
            )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        topk_weights, topk_ids = self.router(x.float()).softmax(-1).topk(4)
        return self.norm(x) + self.experts(x, topk_weights, topk_ids)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_file_computes_what_the_module_does(dtype: torch.dtype, biased: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Block(dtype, biased).eval().requires_grad_(False)
    report = export(
        model, (torch.randn(5, K, dtype=dtype),), tmp_path / "model.pt2", device="cuda",
        dynamic_shapes=({0: Dim("tokens", min=1, max=4096)},), progress=False,
    )  # fmt: skip
    assert "aoti_torch_cuda_nvfp4_moe" in report.methods["forward"].operators
    model = model.cuda()

    def compare(got: untorch.Tensor, x: torch.Tensor) -> None:
        want = model(x)
        size = float(want.abs().max())
        torch.testing.assert_close(torch.from_dlpack(got), want, rtol=0, atol=TOLERANCE[dtype] * size)

    with untorch.load(tmp_path / "model.pt2") as program:
        for tokens in (1, 7, 64, 500):
            x = torch.randn(tokens, K, dtype=dtype, device="cuda")
            compare(program.forward(x), x)
        with program.forward.graph(torch.zeros(32, K, dtype=dtype, device="cuda")) as graph:
            for seed in range(3):
                torch.manual_seed(seed)
                x = torch.randn(32, K, dtype=dtype, device="cuda")
                compare(graph(x), x)
