"""A tiny Qwen3-MoE with its experts and linear layers in NVFP4: a file that runs without torch gives what eager gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim

from untorch.archive import MANIFEST, ArchiveReader
from untorch.quant import quantize

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
    report = quantize(model, "nvfp4", include=["*experts", "*_proj", "lm_head"], progress=False)
    of_experts = [layer for layer in report.layers if ".experts." in layer.names[0]]
    assert [layer.names[0] for layer in of_experts] == [
        f"model.layers.{i}.mlp.experts.{part}_proj" for i in range(2) for part in ("gate_up", "down")
    ]
    assert all(layer.nbytes_after < 0.3 * layer.nbytes_before for layer in of_experts)  # of float32
    assert all(0 < layer.error < 0.15 for layer in of_experts)
    length = Dim("length", min=2, max=32)
    path = tmp_path / "moe.pt2"
    export(Logits(model).eval(), (torch.randint(0, 96, (1, 9)),), path, dynamic_shapes=({1: length},), progress=False)
    with ArchiveReader(path) as archive:
        entries = json.loads(archive.read(MANIFEST))["methods"]["forward"]["quantization"]
    packed = {entry["name"].rpartition("layers.")[2]: entry["packed_shape"] for entry in entries}
    assert packed["0.mlp.experts.moe.w13"] == [8 * 96, 64] and packed["1.mlp.experts.moe.w2"] == [8 * 64, 48]
    assert {entry["dtype"] for entry in entries} == {"nvfp4"}
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
