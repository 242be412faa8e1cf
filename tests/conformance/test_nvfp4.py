"""A tiny Qwen3-MoE with its experts and linear layers in NVFP4: a file that runs without torch gives what eager gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim

from untorch.quant import quantize, quantize_experts

# No torch.
RUN = """
import sys
sys.modules["torch"] = None
import numpy, untorch
inputs = numpy.load(sys.argv[2])
with untorch.load(sys.argv[1]) as program:
    numpy.savez(sys.argv[3], **{name: program(inputs[name]) for name in inputs})
"""


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, use_cache=False).logits
        return logits


def tiny() -> nn.Module:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=3,
        max_position_embeddings=64, decoder_sparse_step=1, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore")
def test_qwen3_moe(tmp_path: Path) -> None:
    from untorch.export import check, export

    model = tiny()
    reports = quantize_experts(model)
    assert [report.name for report in reports] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert all(report.nbytes_after < 0.3 * report.nbytes_before for report in reports)  # of float32
    assert all(0 < report.error_gate_up < 0.15 and 0 < report.error_down < 0.15 for report in reports)
    quantize(model, "nvfp4", include=["*_proj", "lm_head"], progress=False)
    length = Dim("length", min=2, max=32)
    path = tmp_path / "moe.pt2"
    export(Logits(model).eval(), (torch.randint(0, 96, (1, 9)),), path, dynamic_shapes=({1: length},), progress=False)
    names = {item.operator for item in check(path)}
    assert {"nvfp4_moe", "nvfp4_linear"} <= names
    inputs = {f"of_{n}": torch.randint(0, 96, (1, n)) for n in (2, 9, 32)}
    numpy.savez(tmp_path / "inputs.npz", **{name: x.numpy() for name, x in inputs.items()})
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    command = [python, "-c", RUN, *(str(tmp_path / name) for name in ("moe.pt2", "inputs.npz", "results.npz"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = numpy.load(tmp_path / "results.npz")
    for name, x in inputs.items():
        with torch.no_grad():
            expected = model(x, use_cache=False).logits.numpy()
        assert numpy.abs(results[name] - expected).max() <= 1e-4 * numpy.abs(expected).max()
