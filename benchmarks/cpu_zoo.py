"""The models of cpu_models.py at batch 1, with random weights: torchvision's, transformers', a U-Net, LSTM and GRU."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "RECURRENT", "load_model"]


class UNet(nn.Module):
    """Four levels, 32 channels at the first; a pixel's class out of two."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(5)]
        inputs = [3, *widths]
        self.down = nn.ModuleList(_double(inputs[i], widths[i]) for i in range(5))
        self.up = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in range(4))
        self.merge = nn.ModuleList(_double(widths[i + 1], widths[i]) for i in range(4))
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [n, 2, h, w] of an image [n, 3, h, w]."""
        kept = []
        for level in self.down[:-1]:
            x = level(x)
            kept.append(x)
            x = torch.max_pool2d(x, 2)
        x = self.down[-1](x)
        for i in range(3, -1, -1):
            x = self.merge[i](torch.cat([self.up[i](x), kept[i]], 1))
        result: torch.Tensor = self.last(x)
        return result


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
    return nn.Sequential(*layers)


def _import_torchvision() -> Any:
    """The module, also where its C++ operators do not load: they get stand-ins, which these models never call."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed: pip install -c constraints.txt torchvision")
    try:
        import torchvision  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except RuntimeError:
        text = pathlib.Path(spec.origin).with_name("_meta_registrations.py").read_text()
        library = torch.library.Library("torchvision", "FRAGMENT")
        names = {*re.findall(r"torchvision::(\w+)", text), *re.findall(r'register_meta\("(\w+)"', text)}
        for name in sorted(names):
            library.define(f"{name}(Tensor x) -> Tensor")
        _import_torchvision.library = library  # type: ignore[attr-defined]
        import torchvision
    return torchvision


class First(nn.Module):
    """The first result of a model, divided by a constant; inputs by position. A dtype inside, float32 outside."""

    def __init__(self, model: nn.Module, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.dtype, self.scale = torch.float32, 1.0

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given = [x.to(self.dtype) if x.is_floating_point() else x for x in inputs]
        if self.names:
            out = self.model(**dict(zip(self.names, given, strict=True)), return_dict=False)
        else:
            out = self.model(*given)
        while isinstance(out, tuple | list | dict):
            out = out["out"] if isinstance(out, dict) else out[0]
        result: torch.Tensor = out.float() / self.scale
        return result


Example = tuple[First, tuple[torch.Tensor, ...]]

# torchvision's, each with the side of its image.
VISION = {
    "resnet50": 224, "mobilenet_v3_large": 224, "efficientnet_b0": 224, "convnext_tiny": 224, "regnet_y_400mf": 224,
    "densenet121": 224, "squeezenet1_1": 224, "shufflenet_v2_x1_0": 224, "vit_b_16": 224, "swin_t": 224,
}  # fmt: skip

# transformers': configuration class, its arguments, model class, input, and the input's shape; tokens for input_ids.
_DECODER = {"use_cache": False, "vocab_size": 8192}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], str, str, tuple[int, ...]]] = {
    "dinov2_small": (
        "Dinov2Config", {"image_size": 224, "hidden_size": 384, "num_attention_heads": 6}, "Dinov2Model",
        "pixel_values", (1, 3, 224, 224),
    ),
    "clip_vision": ("CLIPVisionConfig", {}, "CLIPVisionModel", "pixel_values", (1, 3, 224, 224)),
    "segformer_b0": ("SegformerConfig", {}, "SegformerForSemanticSegmentation", "pixel_values", (1, 3, 512, 512)),
    "yolos_tiny": (
        "YolosConfig",
        {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": [384, 512]},
        "YolosForObjectDetection", "pixel_values", (1, 3, 384, 512),
    ),
    "bert_base": ("BertConfig", {}, "BertModel", "input_ids", (1, 128)),
    "distilbert": ("DistilBertConfig", {}, "DistilBertModel", "input_ids", (1, 64)),
    "t5_small_encoder": ("T5Config", {}, "T5EncoderModel", "input_ids", (1, 128)),
    "gpt2": ("GPT2Config", {"use_cache": False}, "GPT2LMHeadModel", "input_ids", (1, 128)),
    "llama_135m": (
        "LlamaConfig",
        {**_DECODER, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3},
        "LlamaForCausalLM", "input_ids", (1, 64),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_DECODER, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 64, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_experts": 16,
         "num_experts_per_tok": 4},
        "Qwen3MoeForCausalLM", "input_ids", (1, 64),
    ),
    "wav2vec2_base": ("Wav2Vec2Config", {}, "Wav2Vec2Model", "input_values", (1, 16000)),
    "whisper_tiny_encoder": (
        "WhisperConfig",
        {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536},
        "WhisperEncoder", "input_features", (1, 80, 3000),
    ),
}  # fmt: skip


def _vision(name: str, side: int) -> Example:
    return First(getattr(_import_torchvision().models, name)(weights=None)), (torch.randn(1, 3, side, side),)


def _transformers(config: str, options: dict[str, Any], model: str, argument: str, shape: tuple[int, ...]) -> Example:
    if importlib.util.find_spec("torchvision") is not None:
        _import_torchvision()  # transformers imports it where it finds it
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    kind = WhisperEncoder if model == "WhisperEncoder" else getattr(transformers, model)
    given = torch.randint(0, 1000, shape) if argument == "input_ids" else torch.randn(shape)
    return First(kind(getattr(transformers, config)(**options)), (argument,)), (given,)


def _deeplab() -> Example:
    models = _import_torchvision().models.segmentation
    model = models.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None)
    return First(model), (torch.randn(1, 3, 256, 256),)


def _unet() -> Example:
    return First(UNet()), (torch.randn(1, 3, 256, 256),)


RECURRENT: dict[str, Callable[..., nn.Module]] = {"gru": nn.GRU, "lstm": nn.LSTM}


def _recurrent(kind: Callable[..., nn.Module]) -> Example:
    return First(kind(128, 256, 2, batch_first=True)), (torch.randn(1, 200, 128),)


MODELS: dict[str, Callable[[], Example]] = {
    **{name: lambda name=name, side=side: _vision(name, side) for name, side in VISION.items()},  # type: ignore[misc]
    "unet": _unet,
    "deeplabv3_mobilenet": _deeplab,
    **{name: lambda entry=entry: _transformers(*entry) for name, entry in TRANSFORMERS.items()},  # type: ignore[misc]
    **{name: lambda kind=kind: _recurrent(kind) for name, kind in RECURRENT.items()},  # type: ignore[misc]
}


def load_model(name: str, dtype: torch.dtype = torch.float32) -> Example:
    """The model in inference, with statistics of batch norm that are not trivial, and its inputs, in float32.

    The largest output is 1, so that one tolerance serves all models of a dtype.
    """
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            with torch.no_grad():
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
        if isinstance(module, nn.Linear) and not module.weight.any():  # the head of torchvision's ViT
            nn.init.normal_(module.weight, 0, 0.02)
    model.eval().requires_grad_(False)
    with torch.no_grad():
        model.scale = float(model(*inputs).abs().max())
    model.dtype = dtype
    return model.to(dtype), inputs
