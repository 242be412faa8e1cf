"""Tiny Qwen3-MoE and gpt-oss with their experts and linear layers in NVFP4: a file that runs without torch gives what
eager gives.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.native.nvfp4_experts import random_experts
from untorch.archive import MANIFEST, ArchiveReader
from untorch.ops.nvfp4_layout import dequantize_nvfp4
from untorch.ops.nvfp4_moe import OPERATOR
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


def qwen3_moe() -> nn.Module:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=3,
        max_position_embeddings=64, decoder_sparse_step=1, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).eval()


def gpt_oss() -> nn.Module:
    """With biases and attention sinks that count, and values beyond the limit."""
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=3, max_position_embeddings=64,
        sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            nn.init.normal_(parameter, std=3.0 if "experts" in name else 0.5)
    return model


@pytest.mark.filterwarnings("ignore")
def test_gpt_oss_experts_with_the_quantised_weights() -> None:
    """transformers' module, given the weights that NVFP4 holds, computes the same, so biases, order and gate are right."""
    model = gpt_oss()
    plain = [layer.mlp.experts for layer in model.model.layers]
    quantize(model, "nvfp4", include="*experts", progress=False)
    for layer, experts in zip(model.model.layers, plain, strict=True):
        moe = layer.mlp.experts.moe
        gates = [
            dequantize_nvfp4(moe.w13[:, rows], moe.w13_scale[:, rows], moe.w13_global[:, half], torch.float32)
            for half, rows in enumerate((slice(0, 48), slice(48, 96)))
        ]
        down = dequantize_nvfp4(moe.w2, moe.w2_scale, moe.w2_global, torch.float32)
        with torch.no_grad():
            experts.gate_up_proj[..., 0::2], experts.gate_up_proj[..., 1::2] = (gate.mT for gate in gates)
            experts.down_proj.copy_(down.mT)
            x, weights = torch.randn(11, 64) * 4, torch.rand(11, 3)
            index = torch.rand(11, 8).topk(3).indices
            index[2, 1] = 8  # elsewhere
            got = layer.mlp.experts(x, index, weights)
            weights[2, 1], index[2, 1] = 0.0, 0
            want = experts(x, index, weights)
            both = x @ experts.gate_up_proj[index[0, 0]] + experts.gate_up_proj_bias[index[0, 0]]
        assert (both.abs() > experts.limit).any()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


class Calls(nn.Module):
    """The operator with some of its arguments left out."""

    def __init__(self) -> None:
        super().__init__()
        for i, tensor in enumerate(random_experts(4, 32, 16, True)):
            self.register_buffer(f"w{i}", tensor)
        self.register_buffer("bias", torch.randn(4, 32))

    def forward(self, x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = x, factors, ids, self.w0, self.w1, self.w2, self.w3, self.w4, self.w5
        return (
            OPERATOR(*given),
            OPERATOR(*given, w2_bias=self.bias, swiglu_limit=math.inf),
            OPERATOR(*given, swiglu_alpha=-0.5, swiglu_limit=0.25),
            OPERATOR(*given, None, None, 1.0, 0.5),
        )


@pytest.mark.filterwarnings("ignore")
def test_arguments_left_out(tmp_path: Path) -> None:
    """What generated code passes for a default, for no tensor, and for infinity."""
    import untorch
    from untorch.export import export

    model = Calls().eval()
    args = torch.randn(5, 32), torch.rand(5, 2), torch.randint(-1, 4, (5, 2), dtype=torch.int32)
    export(model, args, tmp_path / "calls.pt2", progress=False)
    with untorch.load(tmp_path / "calls.pt2") as program:
        results = program(*(tensor.numpy() for tensor in args))
    for got, want in zip(results, model(*args), strict=True):
        torch.testing.assert_close(torch.from_numpy(numpy.asarray(got)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [qwen3_moe, pytest.param(gpt_oss, marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore")
def test_without_torch(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    from untorch.export import check, export

    model = make()
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
