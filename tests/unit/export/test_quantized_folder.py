"""Hugging Face folders with quantised linear layers: which layers become ours, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from untorch.export import export_folder
from untorch.export.lm.build import causal_lm
from untorch.export.quantized_folder import dequantize_layers_for_gpus, from_pretrained
from untorch.quant import Int4Linear, W8A8Linear, quantize_fp8, quantize_int8
from untorch.runtime.errors import InvalidFileError, UnsupportedError

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and transformers' own

SIZES = {
    "vocab_size": 96, "hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n, k = weight.shape
    rows, columns = -(-n // 128), -(-k // 128)
    padded = nn.functional.pad(weight.float(), (0, columns * 128 - k, 0, rows * 128 - n))
    parts = padded.reshape(rows, 128, columns, 128)
    scale = parts.abs().amax((1, 3)) / 448
    values = (parts / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.reshape(rows * 128, columns * 128)[:n, :k].contiguous(), scale


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """In int4, as compressed-tensors has it."""
    n, k = weight.shape
    groups = weight.float().reshape(n, k // 32, 32)
    scale = groups.abs().amax(-1) / 7
    q = ((groups / scale.unsqueeze(-1)).round() + 8).clamp(0, 15).reshape(n, k // 8, 8).long()
    words = (q << (4 * torch.arange(8))).sum(-1)
    return {
        "weight_packed": torch.where(words >= 1 << 31, words - (1 << 32), words).int(),
        "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor([n, k]),
    }  # fmt: skip


def tensors_of(weight: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    if form == "pack-quantized":
        return packed(weight)
    if form == "fp8":
        values, scale = blocks(weight)
        return {"weight": values, "weight_scale_inv": scale.to(torch.bfloat16)}
    values, scale = quantize_int8(weight) if form == "int-quantized" else quantize_fp8(weight)
    return {"weight": values, "weight_scale": scale.unsqueeze(1)}


def config_of(form: str) -> dict[str, Any]:
    if form == "fp8":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {}, "ignore": ["lm_head"]}


def folder_of(path: Path, form: str) -> tuple[Path, Any]:
    """A folder, and the model in floating point."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).to(torch.bfloat16).eval()
    model.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.load_file(file).items()}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        for field, tensor in tensors_of(tensors.pop(name), form).items():
            tensors[name.removesuffix("weight") + field] = tensor
    safetensors.save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": config_of(form)}))
    return path, model


@pytest.mark.parametrize("form", ["fp8", "float-quantized", "int-quantized", "pack-quantized"])
@pytest.mark.parametrize("base", [False, True])
def test_linear_layers_become_ours(form: str, base: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, plain = folder_of(tmp_path, form)
    capfd.readouterr()
    kind = transformers.AutoModel if base else transformers.AutoModelForCausalLM
    model = from_pretrained(kind, folder, None).eval()
    assert "UNEXPECTED" not in "".join(capfd.readouterr())
    layers = {name: part for name, part in model.named_modules() if name.endswith("proj")}
    assert len(layers) == 14
    assert {type(part) for part in layers.values()} == {Int4Linear if form == "pack-quantized" else W8A8Linear}
    assert {layer.method for layer in layers.values()} == {form}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    embedding = model.get_input_embeddings().weight
    assert torch.equal(embedding, plain.get_input_embeddings().weight)
    if form == "fp8":
        file = safetensors.load_file(folder / "model.safetensors")
        found = layers["layers.1.mlp.up_proj" if base else "model.layers.1.mlp.up_proj"]
        values, scale = (file[f"model.layers.1.mlp.up_proj.{name}"] for name in ("weight", "weight_scale_inv"))
        factors = scale.float().repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :160]
        assert torch.equal(found.dequantize(), values.float() * factors)
    if not base:
        assert model.lm_head.weight is embedding
        ids = torch.arange(8).unsqueeze(0)
        expected = plain(ids).logits.float()
        error = (model(ids).logits.float() - expected).norm() / expected.norm()
        assert error < (0.3 if form == "pack-quantized" else 0.1)


def test_a_dtype_and_folders_that_are_not_quantised(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "q", "fp8")
    model = from_pretrained(transformers.AutoModelForCausalLM, folder, torch.float16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).save_pretrained(tmp_path / "plain")
    model = from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "plain", None)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("by_recipe", [False, True])
def test_layers_for_gpus_are_refused_for_cpus(by_recipe: bool, tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "q", "fp8")
    call, options = (export_folder, {"task": "text-generation"}) if by_recipe else (causal_lm, {})
    with pytest.raises(UnsupportedError) as error:
        call(folder, tmp_path / "m.pt2", **options)
    assert str(error.value) == (
        "causal_lm: model: model.layers.0.self_attn.q_proj is in fp8 for GPUs (W8A8Linear), which has no kernel for CPUs: "
        "export it with device='cuda', or give a folder and quantize='int8' or 'int4', which round its weights anew"
    )


@pytest.mark.slow
def test_layers_for_gpus_are_rounded_anew_for_cpus(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "q", "fp8")
    model = from_pretrained(transformers.AutoModelForCausalLM, folder, None).eval()
    values = model.model.layers[1].mlp.up_proj.dequantize()
    dequantize_layers_for_gpus(model)
    up = model.model.layers[1].mlp.up_proj
    assert (type(up), up.weight.dtype, up.bias) == (nn.Linear, torch.bfloat16, None)
    assert torch.equal(up.weight, values.bfloat16())
    assert not any(isinstance(part, W8A8Linear) for part in model.modules())
    report = causal_lm(folder, tmp_path / "m.pt2", quantize="int8", progress=False)
    [quantized] = [method.quantization for method in report.methods.values() if method.quantization][:1]
    assert {layer.quantized_dtype for layer in quantized.layers} == {"int8"}
    assert any(layer.names[0].endswith("layers.1.mlp.up_proj") for layer in quantized.layers)


def test_experts_and_what_the_folder_lacks(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, "fp8")
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.load_file(file).items()}
    lacking = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    safetensors.save_file(lacking, file, metadata={"format": "pt"})
    with pytest.raises(InvalidFileError, match="it lacks model.norm.weight, or has another shape"):
        from_pretrained(transformers.AutoModelForCausalLM, folder, None)
    name = "model.layers.0.mlp.experts.0.up_proj"
    up = "model.layers.0.mlp.up_proj"
    tensors |= {f"{name}.{field}": tensors[f"{up}.{field}"].clone() for field in ("weight", "weight_scale_inv")}
    safetensors.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedError, match=f"{name}: the file's experts are quantised \\(fp8\\), and linear layers"
    ):
        from_pretrained(transformers.AutoModelForCausalLM, folder, None)
