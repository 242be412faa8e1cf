"""Tests of merge_linears: which layers become one, which stay apart and why, values, and where the weights lie."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_graphs import assert_same, close, targets, unlift
from torch import fx, nn

import untorch
from untorch.export import ExportReport, export
from untorch.export.kept_sizes import keeps_sizes
from untorch.export.options import ExportOptions
from untorch.export.passes import PassReport, run_passes
from untorch.export.passes.merge_linears import MERGED, merge_linears
from untorch.export.passes.table import PASSES
from untorch.ops import int4, nvfp4, w8a8
from untorch.quant import quantize
from untorch.quant.w8a8 import W8A8Linear

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Attention(nn.Module):
    """GQA: q is wider than k and v; what follows reads views of views."""

    def __init__(self, bias: tuple[bool, bool, bool] = (False, False, False), width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(width, n, bias=b) for n, b in zip((2 * width, width, width), bias, strict=True)
        )
        self.o = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1] // 2
        q, k, v = (layer(x).view(*x.shape[:-1], -1, width).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        weights = (q * k).sum(-1, keepdim=True).softmax(1)
        return self.o((weights * v).transpose(1, 2).reshape(*x.shape[:-1], -1))


class Gated(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 48, layer: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.gate, self.up, self.down = layer(width, hidden), layer(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def merged(
    model: nn.Module, *args: Any, dynamic: Any = None, keep: tuple[str, ...] = (), **tolerance: float
) -> tuple[fx.GraphModule, PassReport]:
    module = unlift(model, *args, dynamic=dynamic)
    with torch.no_grad():
        expected = model(*args)
    report = merge_linears(module, keep)
    close(module)
    assert_same(module(*args), expected, **(tolerance or CLOSE))
    return module, report


def weights_of(module: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in [*module.named_parameters(), *module.named_buffers()]}


@pytest.mark.parametrize("bias", [(False,) * 3, (True,) * 3, (True, False, True)])
def test_q_k_and_v_become_one(bias: tuple[bool, bool, bool]) -> None:
    module, report = merged(Attention(bias), torch.randn(2, 5, 32))
    assert report == PassReport("merge_linears", changed=["linear + linear_1 + linear_2"])
    named = weights_of(module)
    assert named["q_k_v_weight"] == (128, 32)
    assert [name for name in named if name.split(".")[0] in "qkv"] == []
    has_bias = {name: shape for name, shape in named.items() if "bias" in name and name != "o.bias"}
    expected = {} if not any(bias) else {"q_k_v_bias": (128,)} if all(bias) else {"q_bias_k_weight_v_bias_bias": (128,)}
    assert has_bias == expected
    assert targets(module).count("linear") == 2


def test_gate_and_up_become_one_for_any_number_of_tokens() -> None:
    tokens = torch.export.Dim("tokens", min=2, max=64)
    model = Gated()
    module, report = merged(model, torch.randn(7, 32), dynamic=({0: tokens},))
    assert report.changed == ["linear + linear_1"] and not report.skipped
    x = torch.randn(3, 32)
    torch.testing.assert_close(module(x), model(x))


class LowRank(nn.Module):
    """A layer reads what one of two siblings gives, as gates of few columns are made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 24, bias=False), nn.Linear(32, 8, bias=False), nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).view(*x.shape[:-1], 3, 8).flatten(-2) * self.c(self.b(x))


def test_the_number_of_tokens_stays_dynamic() -> None:
    """Before torch 2.13, operators that are made of others ask for sizes where the pass runs them."""
    model, tokens = LowRank(), torch.export.Dim("tokens", min=2, max=64)
    module = unlift(model, torch.randn(1, 7, 32), dynamic=({1: tokens},))
    with keeps_sizes(module):
        report = merge_linears(module, ())
    close(module)
    assert report.changed == ["linear + linear_1"]
    x = torch.randn(1, 3, 32)
    torch.testing.assert_close(module(x), model(x))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=2, max_size=5), st.integers(1, 40),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.lists(st.integers(1, 3), min_size=0, max_size=3),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_any_sizes(layers: list[tuple[int, bool]], width: int, dtype: torch.dtype, batch: list[int]) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(width, n, bias, dtype=dtype) for n, bias in layers])

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [torch.tanh(layer(x)) for layer in self.layers]

    rough = 1e-5 if dtype.itemsize > 2 else 4e-2  # another order of sums, for another N
    module, report = merged(Heads(), torch.randn(*batch, width, dtype=dtype), rtol=rough, atol=rough)
    size = torch.empty(0, dtype=dtype).element_size()
    fit = [n for n, _ in layers if n * size % 16 == 0]
    assert len(report.changed) == (len(fit) > 1)
    assert len(report.skipped) == len(layers) - (len(fit) if len(fit) > 1 else 0)
    rows = [shape[0] for name, shape in weights_of(module).items() if name.endswith("_weight")]
    assert rows == ([sum(fit)] if len(fit) > 1 else [])


class Conv1D(nn.Module):
    """GPT-2's layer: the weight is [inputs, outputs]."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def test_gemms_with_a_constant_on_the_right() -> None:
    """The views of their input are equal, though not one."""
    module, report = merged(Gated(layer=Conv1D), torch.randn(2, 3, 32))
    assert report.changed == ["addmm + addmm_1"]
    assert weights_of(module)["gate_up_weight"] == (32, 96)


@pytest.mark.parametrize("turn", [lambda w: w.t(), lambda w: w.transpose(-1, 0), lambda w: w.permute(1, 0)])
def test_gemms_with_a_transposed_constant(turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ turn(self.weight)

    module, report = merged(Gated(layer=Turned), torch.randn(2, 3, 32))
    assert report.changed == ["matmul + matmul_1"]
    assert weights_of(module)["gate_up_weight"] == (96, 32)
    assert "gate.weight" not in weights_of(module)


@pytest.mark.parametrize("method", [{"dtype": "int4", "group_size": 32}, {"dtype": "nvfp4", "method": "rtn"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_layers(method: dict[str, Any], dtype: torch.dtype) -> None:
    """Rows of tiles are rows of outputs: nothing is quantised anew, so values are the same."""
    model = Gated(200, 99).to(dtype).eval()
    quantize(model, include=["gate", "up"], progress=False, **method)
    module, report = merged(model, torch.randn(3, 200).to(dtype), rtol=2e-2, atol=2e-2)
    operator, name = (int4.OPERATOR, "int4") if method["dtype"] == "int4" else (nvfp4.OPERATOR, "nvfp4")
    assert report.changed == [f"{name}_linear + {name}_linear_1"]
    [call] = [node for node in module.graph.nodes if node.target == operator]
    assert call.meta["val"].shape == (3, 208)
    assert weights_of(module)["gate_up_packed_weight"] == (26, 2, 32, 4)
    whole = module.get_buffer("gate_up_packed_weight")
    assert torch.equal(whole[:13], model.gate.packed_weight) and torch.equal(whole[13:], model.up.packed_weight)
    [(names, parts)] = module.meta[MERGED]
    assert names[0] == "gate_up_packed_weight" and parts[1][0] == "up.packed_weight"
    assert set(names) <= set(weights_of(module)) and not {n for part in parts for n in part} & set(weights_of(module))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_eight_bits(dtype: str) -> None:
    model = Gated(200, 100).to(torch.bfloat16).eval()
    quantize(model, dtype, include=["gate", "up"], target="cuda", progress=False)
    module, report = merged(model, torch.randn(3, 200).to(torch.bfloat16), rtol=2e-2, atol=2e-2)
    assert report.changed == ["w8a8_linear + w8a8_linear_1"]
    [call] = [node for node in module.graph.nodes if node.target == w8a8.OPERATOR]
    assert call.meta["val"].shape == (3, 224)
    named = weights_of(module)
    assert (named["gate_up_weight_values"], named["gate_up_scale"]) == ((224, 208), (224,))


@pytest.mark.parametrize("hidden", [128, 144])
def test_scales_of_blocks(hidden: int) -> None:
    """Of which none may begin within another layer's."""
    model = Gated(256, hidden).eval()
    for name in ("gate", "up"):
        values = torch.randn(hidden, 256).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-hidden // 128), 2) * 0.01
        setattr(model, name, W8A8Linear.from_values(values, scale, None, method="fp8"))
    module, report = merged(model, torch.randn(3, 256))
    assert report.changed == (["w8a8_linear + w8a8_linear_1"] if hidden == 128 else [])
    if hidden == 128:
        assert weights_of(module)["gate_up_scale"] == (2, 4)


def test_one_global_scale_for_a_matrix() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            from untorch.quant import quantize_nvfp4

            for name in "ab":
                for part, tensor in vars(quantize_nvfp4(torch.randn(8, 48))).items():
                    self.register_buffer(f"{name}_{part}", tensor)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def one(name: str) -> torch.Tensor:
                tensors = (getattr(self, f"{name}_{part}") for part in ("packed", "block_scale", "global_scale"))
                y: torch.Tensor = nvfp4.OPERATOR(x, *tensors)
                return y

            return one("a") * one("b")

    module, report = merged(Own(), torch.randn(2, 48))
    assert report.changed == ["nvfp4_linear + nvfp4_linear_1"]
    assert sorted(weights_of(module).values()) == [(16,), (16, 3), (16, 24)]


def skipped(model: nn.Module, *args: Any, keep: tuple[str, ...] = ()) -> dict[str, str]:
    """Why layers stay apart; the model has none that do not."""
    _, report = merged(model, *args, keep=keep)
    assert not report.changed
    return report.skipped


def test_a_tied_weight() -> None:
    class Tied(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + F.embedding(torch.tensor(3), self.up.weight)

    assert skipped(Tied(), torch.randn(2, 32)) == {
        "linear_1": "its weight is also read by embedding", "linear": "its siblings stay apart",
    }  # fmt: skip


def test_two_names_of_one_memory() -> None:
    class Tied(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(self.up.weight.detach()[4:8])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.table.sum()

    assert skipped(Tied(), torch.randn(2, 32))["linear_1"] == "its weight is also read by sum_1"


def test_siblings_with_one_weight() -> None:
    model = Gated()
    model.up.weight = model.gate.weight
    assert skipped(model, torch.randn(2, 32)) == dict.fromkeys(
        ("linear", "linear_1"), "its weight is also read by a sibling"
    )


def test_a_weight_that_the_model_writes() -> None:
    class Writes(Gated):
        def __init__(self) -> None:
            super().__init__()
            weight = self.up.weight.detach()
            del self.up.weight
            self.up.register_buffer("weight", weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.up.weight.mul_(1.0)
            return y

    assert skipped(Writes(), torch.randn(2, 32)) == {
        "linear_1": "the model writes its weight",
        "linear": "no other layer of its input that can be merged has its dtype and quantisation",
    }


def test_weights_that_are_kept_by_name() -> None:
    for keep in (("up",), ("*.up.weight",), ("nothing", "u?.weight")):
        found = skipped(nn.Sequential(Gated()), torch.randn(2, 32), keep=keep)
        assert found["linear_1"] == "the option keep_weights names it"
    _, report = merged(nn.Sequential(Gated()), torch.randn(2, 32), keep=("gate_up", "p", "up.bias"))
    assert report.changed


def test_another_quantisation() -> None:
    model = Gated(128, 128).eval()
    quantize(model, "int4", include=["gate"], progress=False)
    alone = "no other layer of its input that can be merged has its dtype and quantisation"
    assert skipped(model, torch.randn(2, 128)) == {"int4_linear": alone, "linear": alone}
    model = Gated(128, 128).eval()
    for name, size in (("gate", 32), ("up", 64)):
        quantize(model, "int4", group_size=size, include=[name], progress=False)
    assert skipped(model, torch.randn(2, 128)) == {"int4_linear": alone, "int4_linear_1": alone}


def test_adapters_stay_apart() -> None:
    """LoRA: the small layers read the same input, and rows of 4 floats; the adapters' second halves other ones."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a, self.b = nn.Linear(32, 48), nn.Linear(32, 2, bias=False), nn.Linear(2, 48, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.base(x) + self.b(self.a(x))
            return y

    found = skipped(Lora(), torch.randn(2, 32))
    assert found["linear_1"] == "its row of results has 8 bytes, no multiple of 16"


def test_a_result_of_the_model() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(32, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x).view(2, 4, 4), self.b(x) * self.c(x)

    _, report = merged(Both(), torch.randn(2, 32))
    assert report.changed == ["linear_1 + linear_2"]
    assert report.skipped == {"linear": "it is a result of the model, whose strides would change"}


def test_a_reader_that_needs_it_contiguous() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(32, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).view(-1).sum() + self.b(x) * self.c(x)

    _, report = merged(Flat(), torch.randn(2, 32))
    assert report.changed == ["linear_1 + linear_2"]
    assert report.skipped == {"linear": "view needs its result contiguous, which would be a copy"}


def test_writes_into_the_input_or_the_result() -> None:
    class Writes(Gated):
        def __init__(self, which: str) -> None:
            super().__init__()
            self.which = which

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            y, z = self.gate(x), self.up(x)
            (x if self.which == "input" else y).mul_(2)
            y = self.down(F.silu(y) * z)
            return y + x.sum()

    writes = skipped(Writes("input"), torch.randn(2, 32))
    assert writes == dict.fromkeys(("linear", "linear_1"), "the model writes its input")
    assert skipped(Writes("result"), torch.randn(2, 32))["linear"] == "the model writes its result"


def test_a_bias_that_is_computed() -> None:
    class Computed(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.linear(x, self.gate.weight, x.sum(0)[:1].expand(48)) * self.up(x))

    assert skipped(Computed(), torch.randn(2, 32))["linear"] == (
        "its bias is not a constant of one number for each output"
    )


def test_results_that_would_be_kept_for_long() -> None:
    """Cross-attention: all layers read the encoder's states."""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys = nn.ModuleList([nn.Linear(16, 48) for _ in range(12)])
            self.mix = nn.ModuleList([nn.Linear(48, 48) for _ in range(12)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.zeros(48)
            for key, mix in zip(self.keys, self.mix, strict=True):
                y = mix(y + torch.tanh(key(x)))
            return y

    module, report = merged(Cross(), torch.randn(2, 16))
    assert [len(text.split(" + ")) for text in report.changed] == [5, 5, 2]
    assert max(shape[0] for shape in weights_of(module).values()) <= 16 * 16


def test_layers_that_are_used_again() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Gated()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.block(self.block(x))
            return y

    module, report = merged(Twice(), torch.randn(2, 32))
    assert report.changed == ["linear + linear_1", "linear_3 + linear_4"]
    assert sum("gate_up_weight" in name for name in weights_of(module)) == 1


def test_memory_is_needed_once() -> None:
    """The caller's parameters become views of the whole, and two methods have one tensor."""
    model = Gated()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (unlift(model, torch.randn(2, 32)) for _ in range(2))
    for module in (first, second):
        assert merge_linears(module).changed
        close(module)
    whole = first.get_parameter("gate_up_weight")
    assert second.get_parameter("gate_up_weight").data_ptr() == whole.data_ptr()
    assert model.gate.weight.data_ptr() == whole.data_ptr()
    assert model.up.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert whole.untyped_storage().nbytes() == 96 * 32 * 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.gate.weight.requires_grad and model.gate.weight.is_contiguous()
    # The caller may export again.
    x = torch.randn(2, 32)
    again = unlift(model, x)
    assert merge_linears(again).changed
    close(again)
    torch.testing.assert_close(again(x), model(x))


def test_shared_memory_is_left_where_it_is() -> None:
    model = Gated()
    model.gate.weight.share_memory_()
    address = model.gate.weight.data_ptr()
    assert merge_linears(unlift(model, torch.randn(2, 32))).changed
    assert model.gate.weight.data_ptr() == address and model.gate.weight.is_shared()


def test_where_it_runs() -> None:
    [entry] = [entry for entry in PASSES if entry.name == "merge_linears"]
    assert entry.reason_not_to_run(ExportOptions(), "cuda") is None
    assert entry.reason_not_to_run(ExportOptions(), "cpu") == (
        "it runs by default for cuda only: the option passes switches it on"
    )
    assert entry.reason_not_to_run(ExportOptions(passes={"merge_linears": True}), "cpu") is None
    assert entry.reason_not_to_run(ExportOptions(passes={"merge_linears": False}), "cuda") == (
        "it is switched off by the option passes"
    )
    assert entry.default_text == "CUDA"


def test_the_option_that_keeps_names() -> None:
    for names in ("up", ["up"]):
        options = ExportOptions(keep_weights=names, passes={"merge_linears": True, "pack_linears": False})
        module = unlift(Gated(), torch.randn(2, 32))
        [report] = [r for r in run_passes(module, options) if r.name == "merge_linears"]
        assert report.skipped["linear_1"] == "the option keep_weights names it" and not report.changed


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportReport, nn.Module, torch.Tensor]:
    """One model as one method that merges, one that does not, and one in int4 that merges."""
    model, x = Gated(128, 96).eval(), torch.randn(3, 128)
    entries = {
        name: {"model": model, "args": (x,), "options": {"passes": {"merge_linears": merges}, "pack_linears": False}}
        for name, merges in (("whole", True), ("parts", False), ("int4", True))
    }
    path = tmp_path_factory.mktemp("merged") / "m.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = export(
            methods=entries, path=path, quantize={"int4": {"dtype": "int4", "group_size": 32}}, progress=False
        )  # fmt: skip
    return path, report, model, x


@pytest.mark.slow
def test_a_file_has_one_tensor(file: tuple[Path, ExportReport, nn.Module, torch.Tensor]) -> None:
    """The parts are not beside it: a method that reads them reads views of the whole."""
    path, report, model, x = file
    changed = {
        name: next(done.changed for done in method.passes if done.name == "merge_linears")
        for name, method in report.methods.items()
    }
    assert changed == {"whole": ["linear + linear_1"], "parts": [], "int4": ["int4_linear + int4_linear_1"]}
    with untorch.load(path) as program:
        manifest = program.manifest
        for name in ("whole", "parts"):
            found = torch.from_numpy(program[name](x.numpy()).copy())
            torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)
        found = torch.from_numpy(program["int4"](x.numpy()).copy())
        assert 0 < (found - model(x)).norm() < 0.3 * model(x).norm()
    constants = {name: {c["fqn"]: c for c in m["constants"]} for name, m in manifest["methods"].items()}
    whole, apart = constants["whole"], constants["parts"]
    assert whole["gate_up_weight"]["weight"] == apart["up.weight"]["weight"] == apart["gate.weight"]["weight"]
    assert apart["up.weight"]["storage_offset"] == 96 * 128
    dense = {c["weight"] for c in (*whole.values(), *apart.values())}
    nbytes = sum(manifest["weights"][number]["nbytes"] for number in dense)
    assert nbytes == 4 * sum(p.numel() for p in model.parameters()) + 4 * 2 * 96  # biases as one and as two


def test_the_manifest_of_quantised_layers(file: tuple[Path, ExportReport, nn.Module, torch.Tensor]) -> None:
    with untorch.load(file[0]) as program:
        method = program.manifest["methods"]["int4"]
    entries = {entry["name"]: entry for entry in method["quantization"]}
    assert set(entries) == {"down", "gate, up"}
    both = entries["gate, up"]
    assert both["tensors"] == ["gate_up_packed_weight", "gate_up_scale_and_zero"]
    assert both["packed_shape"] == both["shape"] == [192, 128] and both["method"] == "hqq"
    assert both["nbytes"] == 192 * 64 + 4 * 192 * 8
    assert set(both["tensors"]) <= {constant["fqn"] for constant in method["constants"]}
