"""``Int4Experts`` in the place of transformers' modules of experts: values, layouts, what is reported and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.quant.test_experts import Experts, Model
from untorch.export import export
from untorch.export.host_cpu import resolve_host_cpus
from untorch.export.method import Method
from untorch.export.quantize import quantize_methods
from untorch.export.target import resolve_targets
from untorch.progress import Progress
from untorch.quant import Int4Experts, QuantizeOptions, QuantizeRules, quantize
from untorch.quant.swiglu import SwiGLU
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError


class Transposed(nn.Module):
    """gpt-oss's: [E, K, 2·I], gate and up in turns, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.alpha, self.limit = 4, 1.702, 7.0
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 96) * 0.2)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 96))
        self.down_proj = nn.Parameter(torch.randn(4, 48, 32) * 0.2)
        self.down_proj_bias = nn.Parameter(torch.randn(4, 32))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for m in range(x.shape[0]):
            for e, weight in zip(index[m].tolist(), weights[m], strict=True):
                act = self._apply_gate(x[m] @ self.gate_up_proj[e] + self.gate_up_proj_bias[e])
                y[m] += weight * (act @ self.down_proj[e] + self.down_proj_bias[e])
        return y


def dequantised(made: Int4Experts, plain: nn.Module, interleaved: bool) -> None:
    """``plain`` gets the weights that ``made`` stands for."""
    upper, lower = made.dequantize()
    if interleaved:
        upper = torch.stack(upper.chunk(2, 1), 2).flatten(1, 2)
        upper, lower = upper.mT, lower.mT
    with torch.no_grad():
        plain.gate_up_proj.copy_(upper)
        plain.down_proj.copy_(lower)


@pytest.mark.parametrize("make", [Experts, Transposed])
@pytest.mark.parametrize("method", ["hqq", "rtn", "symmetric"])
def test_the_weights_that_it_says(make: Any, method: str) -> None:
    torch.manual_seed(0)
    model, plain = Model(make()), make()
    plain.load_state_dict(model.experts.state_dict())
    before = {name: p.detach().clone() for name, p in model.experts.named_parameters()}
    report = quantize(model, "int4", group_size=32, method=method, progress=False)
    made = model.experts
    assert isinstance(made, Int4Experts) and model.again[0] is made
    assert f"num_experts=4, hidden_size=32, intermediate_size=48, group_size=32, method='{method}'" in repr(made)
    _, gate_up, down = report.layers
    assert gate_up.names == ("experts.gate_up_proj", "again.0.gate_up_proj")
    assert (gate_up.shape, down.shape) == ((4 * 96, 32), (4 * 32, 48))
    assert (gate_up.packed_shape, down.packed_shape) == ((384, 128), (128, 128))
    assert (gate_up.quantized_dtype, gate_up.group_size, gate_up.method) == ("int4", 32, method)
    assert gate_up.nbytes_after + down.nbytes_after == made.weight_nbytes
    assert 0 < gate_up.error < 0.12 and 0 < down.error < 0.12
    dequantised(made, plain, make is Transposed)
    for name in ("gate_up_proj", "down_proj"):
        wrong = (plain.get_parameter(name).detach() - before[name]).norm() / before[name].norm()
        assert abs(float(wrong) - (gate_up if name == "gate_up_proj" else down).error) < 1e-5
    x, index, weights = torch.randn(6, 32), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    with torch.no_grad():
        torch.testing.assert_close(made(x, index, weights), plain(x, index, weights), rtol=1e-4, atol=1e-4)
        # An index of num_experts is an expert elsewhere; others are refused.
        index[:, 1] = 4
        alone = made(x, index[:, :1], weights[:, :1])
        assert torch.equal(made(x, index, weights), alone)
        with pytest.raises(ValueError, match="topk_ids: expected experts from 0 to 3, or -1 for none, got 4"):
            made(x, index + 1, weights)
        with pytest.raises(InvalidArgumentError, match="Int4Experts: expected 32 features in the last dimension"):
            made(x[:, :16], index, weights)


def test_what_its_constructor_refuses() -> None:
    model = Model(Experts())
    quantize(model, "int4", group_size=32, method="rtn", progress=False)
    made = model.experts
    assert isinstance(made, Int4Experts)
    tensors = made.w13, made.w13_scale_and_zero, made.w2, made.w2_scale_and_zero
    for changed, text in (
        ({"group_size": 48}, "Int4Experts: group_size: expected 32, 64, 128 or 256, got 48"),
        ({"intermediate_size": 40}, "Int4Experts: w13: expected a multiple of 80 outputs, two times intermediate, got"),
        ({"intermediate_size": 12}, "Int4Experts: intermediate: expected a multiple of 8 above 0, got 12"),
        ({"swiglu": SwiGLU(limit=-1.0)}, "Int4Experts: swiglu_limit: expected a number above 0, or None for no limit"),
    ):
        options: dict[str, Any] = {"intermediate_size": 48, "group_size": 32, "method": "rtn", **changed}
        with pytest.raises(InvalidArgumentError) as error:
            Int4Experts(*tensors, **options)
        assert str(error.value).startswith(text)


@pytest.mark.parametrize("make", [Experts, Transposed])
@pytest.mark.parametrize("options", [{"dtype": "int4"}, {"*": "int4"}])
def test_for_gpus_as_for_cpus(options: dict[str, Any], make: Any) -> None:
    """The same tensors: a file for both has them once."""
    [target] = resolve_targets("cuda", "sm_90", resolve_host_cpus("portable")[0])
    wanted = QuantizeRules.read(options) if "*" in options else QuantizeOptions.read(options)
    model, made = Model(make()), []
    for method in (Method("m", model, (), target=target), Method("m", model, ())):
        [done] = quantize_methods([method], {"m": wanted}, Progress(False))
        assert isinstance(done.model, nn.Module)
        assert done.quantization is not None
        assert done.quantization.skipped == {}
        experts = done.model.get_submodule("experts")
        assert isinstance(experts, Int4Experts)
        made.append(experts)
    for name, tensor in made[0].named_buffers():
        assert torch.equal(tensor, made[1].get_buffer(name))
    # The layout that the GPU's kernels are for.
    assert made[0].w13.shape[2:] == made[0].w2.shape[2:] == (32, 4)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3"])
def test_experts_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.conformance.language_models import make_model

    model = make_model(name)
    report = quantize(model, "int4", group_size=32, method="rtn", target="cuda", progress=False)
    experts = [part for part in model.modules() if isinstance(part, Int4Experts)]
    assert experts and not [layer for layer in report.skipped if layer.endswith("experts")]
    assert (experts[0].w13_bias is not None) == (name == "GptOss")
    assert (experts[0].swiglu.limit is not None) == (name == "GptOss")


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(32, 32), Experts()
        self.register_buffer("index", torch.tensor([[0, 1], [3, 3], [2, 0]]))
        self.register_buffer("factors", torch.rand(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(self.first(x), self.index, self.factors)
        return y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
def test_quantised_in_place_and_exported_for_a_gpu(tmp_path: Path) -> None:
    model = Routed()
    quantize(model, "int4", method="rtn", progress=False)
    report = export(model, (torch.randn(3, 32),), tmp_path / "m.pt2", device="cuda", arch="sm_90", progress=False)
    assert {"aoti_torch_cuda_int4_moe", "aoti_torch_cuda_int4_linear"} <= set(report.methods["forward"].operators)
    linear = nn.Sequential(nn.Linear(32, 32))
    quantize(linear, "int8", method="rtn", progress=False)
    with pytest.raises(UnsupportedError) as error:
        export(linear, (torch.randn(3, 32),), tmp_path / "n.pt2", device="cuda", arch="sm_90", progress=False)
    assert str(error.value).startswith("method 'forward': operator untorch.int8_linear.default")
    reason = "linear layers in int8 for CPUs (Int8Linear) have no kernel for GPUs: leave it to export(…, quantize="
    assert f": {reason}" in str(error.value)
