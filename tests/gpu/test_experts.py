"""Files with NVFP4 and int4 MoE layers against eager PyTorch: any routing, also in a CUDA graph; a whole model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import untorch
from tests.conformance import test_nvfp4 as models
from tests.native.int4_experts import Experts
from tests.native.nvfp4_experts import random_experts, random_swiglu
from untorch.export import export
from untorch.quant import Int4Experts, NVFP4MoE, quantize
from untorch.quant.swiglu import SwiGLU

K, EXPERTS = 256, 16
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4}  # of the largest value


class Block(nn.Module):
    """A router and its experts, as Qwen3's or as gpt-oss's."""

    def __init__(self, kind: str, dtype: torch.dtype, biased: bool) -> None:
        super().__init__()
        self.router = nn.Linear(K, EXPERTS, bias=False, dtype=torch.float32)
        self.norm = nn.LayerNorm(K, dtype=dtype)
        self.is_int4 = kind == "int4"
        swiglu = random_swiglu(EXPERTS, K, 128)
        biases = (swiglu.w13_bias, swiglu.w2_bias) if biased else ()
        if self.is_int4:
            activation = SwiGLU(swiglu.alpha, swiglu.beta, swiglu.limit) if biased else SwiGLU()
            packed = Experts(EXPERTS, K, 128, 64, scales=dtype).packed
            self.experts: Any = Int4Experts(
                *packed, *biases, intermediate_size=128, group_size=64, method="rtn", swiglu=activation
            )
        else:
            numbers = {"alpha": swiglu.alpha, "beta": swiglu.beta, "limit": swiglu.limit} if biased else {}
            named: Any = {f"swiglu_{name}": number for name, number in numbers.items()}
            self.experts = NVFP4MoE(*random_experts(EXPERTS, K, 128, True), *biases, **named)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        topk_weights, topk_ids = self.router(x.float()).softmax(-1).topk(4)
        routing = (topk_ids, topk_weights) if self.is_int4 else (topk_weights, topk_ids)
        y: torch.Tensor = self.norm(x) + self.experts(x, *routing)
        return y


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["nvfp4", "int4"])
def test_a_file_computes_what_the_module_does(kind: str, dtype: torch.dtype, biased: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Block(kind, dtype, biased).eval().requires_grad_(False)
    report = export(
        model, (torch.randn(5, K, dtype=dtype),), tmp_path / "model.pt2", device="cuda",
        dynamic_shapes=({0: Dim("tokens", min=1, max=4096)},), progress=False,
    )  # fmt: skip
    assert f"aoti_torch_cuda_{kind}_moe" in report.methods["forward"].operators
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


@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [models.qwen3_moe, models.gpt_oss])
def test_a_model_in_int4(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """The logits of a file are those of the quantised module on the CPU; bfloat16 may choose other experts."""
    pytest.importorskip("transformers")
    model = models.Logits(make().to(dtype)).eval().requires_grad_(False)
    options: dict[str, Any] = {"dtype": "int4", "group_size": 32, "method": "rtn"}
    tokens = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    report = export(model, (tokens,), tmp_path / "m.pt2", device="cuda", quantize=options, progress=False)
    assert "aoti_torch_cuda_int4_moe" in report.methods["forward"].operators
    rounded = copy.deepcopy(model).to("cpu")
    quantize(rounded, "int4", group_size=32, method="rtn", progress=False)
    want = rounded.float()(tokens) if dtype == torch.float32 else rounded(tokens).float()
    with untorch.load(tmp_path / "m.pt2") as program:
        got = torch.from_dlpack(program(tokens.cuda())).clone().cpu().float()
    close = (got - want).abs() <= (1e-3 if dtype == torch.float32 else 5e-2) * want.abs().max()
    assert float(close.all(-1).float().mean()) >= (1.0 if dtype == torch.float32 else 0.8)
