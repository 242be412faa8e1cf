"""Models that torchao's own quantizers changed: what computes them, and the results beside eager's of the same model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import untorch
from tests.torchao_library import torchao
from tests.unit.export.passes.pass_graphs import targets
from untorch.export import export
from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.report import PassReport

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and torchao's own

# What is computed in floating point if it is in a graph.
FLOATS = ("linear", "conv1d", "conv2d", "conv_transpose2d.input", "matmul", "bmm", "addmm", "packed_linear",
          "packed_convolution", "untorch.packed_linear", "untorch.packed_convolution")  # fmt: skip


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32, bias=False), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(F.gelu(self.down(F.relu(self.up(x))) + x))
        return y


class Convolutions(nn.Module):
    """A stem with pooling, a residual block, a depthwise layer with hard swish, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.first, self.norm1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.depthwise, self.point = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 24, 1)
        self.relu, self.relu1, self.relu2 = nn.ReLU(), nn.ReLU(), nn.ReLU(inplace=True)
        self.swish, self.head = nn.Hardswish(), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.relu(self.norm(self.stem(x))), 2)
        y = self.norm2(self.second(self.relu1(self.norm1(self.first(x)))))
        x = self.relu2(y + x)
        x = self.point(self.swish(self.depthwise(x)))
        y: torch.Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return y


class Encoder(nn.Module):
    """A layer of BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.norm, self.up, self.down, self.norm2 = (
            nn.LayerNorm(32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.LayerNorm(32),
        )

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], 2, 16).transpose(1, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        q, k, v = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / 4.0, -1)
        x = self.norm(x + self.out(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape)))
        y: torch.Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return y


class Transposed(nn.Module):
    """Transposed convolutions whose windows touch, overlap, and lie apart; the last one with output padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.touch, self.overlap = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ConvTranspose2d(8, 8, 3, 2, 1)
        self.apart = nn.ConvTranspose2d(8, 4, (1, 4), stride=(2, 3), padding=(0, 2), output_padding=(0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.overlap(F.relu(self.touch(F.relu(self.first(x))))))
        return F.relu(self.apart(x))


class Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, stride=2)
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(F.silu(self.second(F.relu(self.first(x)))).mean(-1))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.layer(x)[0])
        return y


MODELS: dict[str, tuple[type[nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (Mlp, lambda: torch.randn(5, 32)),
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 16, 16)),
    "encoder": (Encoder, lambda: torch.randint(0, 50, (2, 6))),
    "transposed": (Transposed, lambda: torch.randn(2, 3, 7, 6)),
    "lines": (Lines, lambda: torch.randn(2, 8, 20)),
    "recurrent": (Recurrent, lambda: torch.randn(2, 5, 16)),
}


def quantizer(name: str) -> Any:
    kind, *words = name.split()
    options = {f"is_{word}": True for word in words}
    if kind == "embeddings":
        return torchao("quantization.pt2e.quantizer.embedding_quantizer").EmbeddingQuantizer()
    if kind == "x86":
        x86 = torchao("quantization.pt2e.quantizer.x86_inductor_quantizer")
        made = x86.X86InductorQuantizer()
        return made.set_global(x86.get_default_x86_inductor_quantization_config(**options))
    xnnpack = torchao("testing.pt2e._xnnpack_quantizer")
    return xnnpack.XNNPACKQuantizer().set_global(xnnpack.get_symmetric_quantization_config(**options))


def quantised(model: str, by: str, **options: Any) -> tuple[fx.GraphModule, torch.Tensor]:
    pt2e = torchao("quantization.pt2e.quantize_pt2e")
    make, data = MODELS[model]
    torch.manual_seed(0)
    module, x, trains = make(), data(), "qat" in by
    graph = torch.export.export(module.train(trains), (x,)).module()
    with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(None):
        prepared = (pt2e.prepare_qat_pt2e if trains else pt2e.prepare_pt2e)(graph, quantizer(by))
        for _ in range(3):
            prepared(data())
        if trains:
            torchao("quantization.pt2e").move_exported_model_to_eval(prepared)
        converted: fx.GraphModule = pt2e.convert_pt2e(prepared, **options)
    return converted, x


def passed(model: fx.GraphModule, x: torch.Tensor) -> tuple[fx.GraphModule, dict[str, PassReport]]:
    with torch.no_grad():
        module = torch.export.export(model, (x,)).module()
    assert isinstance(module, fx.GraphModule)
    reports = run_passes(module, ExportOptions(), "cpu", "forward", None)
    return module, {report.name: report for report in reports}


def floats(module: fx.GraphModule) -> list[str]:
    return [name for name in targets(module) if name in FLOATS]


@pytest.mark.parametrize(
    ("model", "by", "integers"),
    [
        ("mlp", "x86", 3),
        ("mlp", "x86 dynamic", 3),
        ("mlp", "xnnpack per_channel dynamic", 3),
        ("convolutions", "x86", 6),
        ("convolutions", "x86 dynamic", 6),
        ("convolutions", "xnnpack per_channel", 6),
        ("mlp", "x86 qat", 3),
        ("encoder", "xnnpack", 6),
        ("transposed", "xnnpack", 4),
        ("lines", "xnnpack", 3),
        ("recurrent", "x86", 1),
        *(
            pytest.param(model, by, count, marks=pytest.mark.exhaustive)
            for model, by, count in (
                ("mlp", "xnnpack", 3), ("mlp", "xnnpack dynamic", 3), ("mlp", "xnnpack per_channel qat", 3),
                ("convolutions", "xnnpack per_channel qat", 6), ("convolutions", "x86 qat", 6), ("convolutions", "xnnpack", 6),
                ("encoder", "x86", 6), ("encoder", "x86 dynamic", 6), ("encoder", "xnnpack per_channel dynamic", 6),
                ("lines", "xnnpack per_channel", 3), ("recurrent", "x86 dynamic", 1),
                ("recurrent", "x86 qat", 1), ("recurrent", "xnnpack per_channel", 1),
            )
        ),
    ],
)  # fmt: skip
def test_every_layer_is_computed_in_integers(model: str, by: str, integers: int) -> None:
    converted, x = quantised(model, by)
    with torch.no_grad():
        expected = converted(x)
        module, reports = passed(converted, x)
        got = module(x)
    assert floats(module) == []
    names = targets(module)
    assert sum(names.count(f"untorch.int8_{kind}") for kind in ("linear", "convolution")) == integers
    # A value between two steps may round to the other one; where the result is quantised, that is a whole step.
    step = (expected.max() - expected.min()).item() / 255
    assert (got - expected).abs().max().item() <= 1.01 * step
    assert (got - expected).abs().mean().item() <= 0.02 * step
    # Nothing that reads dequantised values is left out of the report.
    left = [
        node.name
        for node in module.graph.nodes
        if node.op == "call_function"
        and str(node.target).startswith("aten.")
        and any("dequantize" in str(source.target) for source in node.all_input_nodes)
    ]
    named = {name for report in reports.values() for name in report.skipped}
    assert [name for name in left if name not in named] == []


def test_rows_of_embeddings_are_dequantised_alone() -> None:
    converted, ids = quantised("encoder", "embeddings")
    with torch.no_grad():
        expected = converted(ids)
        module, reports = passed(converted, ids)
    assert reports["serve_pt2e_embeddings"].changed == ["embedding"]
    assert not any("dequantize" in name for name in targets(module))
    table = next(node for node in module.graph.nodes if node.target == torch.ops.aten.embedding.default)
    assert table.meta["val"].dtype == torch.uint8
    torch.testing.assert_close(module(ids), expected, rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_folded() -> None:
    converted, x = quantised("mlp", "x86", fold_quantize=False)
    with torch.no_grad():
        expected = converted(x)
        module, _ = passed(converted, x)
    assert floats(module) == []
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)


def test_weights_alone_are_named_and_stored_in_floating_point() -> None:
    """No file dequantises a constant at every call."""
    values, scales = torch.randint(-127, 128, (40, 24), dtype=torch.int8), torch.rand(40) / 100

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("values", values)
            self.register_buffer("scales", scales)
            self.register_buffer("zeros", torch.zeros(40, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            arguments = self.values, self.scales, self.zeros, 0, -128, 127, torch.int8
            return F.linear(x, torch.ops.quantized_decomposed.dequantize_per_channel.default(*arguments))

    torchao("quantization.pt2e.quantize_pt2e")  # registers the operators
    x = torch.randn(3, 24)
    module, reports = passed(torch.export.export(Layer(), (x,)).module(), x)  # type: ignore[arg-type]
    assert list(reports["serve_pt2e_linears"].skipped) == ["linear"]
    assert not any("dequantize" in name for name in targets(module) if not name.startswith("self."))
    torch.testing.assert_close(module(x), Layer()(x))


def test_the_file(tmp_path: Path) -> None:
    converted, x = quantised("transposed", "xnnpack")
    [got], report = exported_as_it_is(converted, x, tmp_path)
    with torch.no_grad():
        expected = converted(x)
    step = (expected.max() - expected.min()).item() / 255
    assert (got - expected).abs().max().item() <= 1.01 * step
    assert not any("aoti_torch_cpu_convolution" in name for name in report.operators)


def exported_as_it_is(model: fx.GraphModule, x: torch.Tensor, folder: Path) -> tuple[list[torch.Tensor], Any]:
    """A program of torch.export: converted modules have no ``eval``."""
    report = export(torch.export.export(model, (x,)), path=folder / "model.pt2", progress=False)
    with untorch.load(folder / "model.pt2") as program:
        return [torch.from_numpy(program(x.numpy())).clone()], report.methods["forward"]
