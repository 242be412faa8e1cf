"""The models of gpu_models.py, at real sizes with random weights: torchvision, timm, transformers, torchaudio, layers.

Each entry makes a module and its example inputs, in float32 on the CPU. What needs a package that is not installed is
left out by gpu_models.py, which says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]
MODELS: dict[str, Callable[[], Example]] = {}


def _add(name: str) -> Callable[[Callable[[], Example]], Callable[[], Example]]:
    def add(make: Callable[[], Example]) -> Callable[[], Example]:
        MODELS[name] = make
        return make

    return add


def images(batch: int, side: int = 224) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, side, side),)


# torchvision and timm.

VISION = {
    "resnet50": 2, "mobilenet_v3_small": 1, "mobilenet_v3_large": 8, "efficientnet_b0": 1, "regnet_y_400mf": 1,
    "densenet121": 1, "squeezenet1_1": 1, "shufflenet_v2_x1_0": 1, "inception_v3": 1, "vgg16": 1, "convnext_tiny": 1,
    "maxvit_t": 1, "swin_t": 1, "vit_b_16": 1,
}  # fmt: skip
TIMM = {
    "tf_efficientnetv2_s": 1, "repvgg_b0": 1, "edgenext_small": 1, "mixer_b16_224": 1, "coatnet_0_rw_224": 1,
    "deit_small_patch16_224": 4, "resnest50d": 1,
}  # fmt: skip


def _vision(name: str, batch: int) -> None:
    @_add(name)
    def make() -> Example:
        import torchvision

        options = {"init_weights": True} if name == "inception_v3" else {}
        side = 299 if name == "inception_v3" else 224
        model = torchvision.models.get_model(name, weights=None, **options)
        if name == "vit_b_16":  # its head is zeros
            nn.init.normal_(model.heads.head.weight, 0, 0.02)
        return model, images(batch, side)


def _timm(name: str, batch: int) -> None:
    @_add(name)
    def make() -> Example:
        import timm

        return timm.create_model(name, pretrained=False), images(batch)


for _name, _batch in VISION.items():
    _vision(_name, _batch)
for _name, _batch in TIMM.items():
    _timm(_name, _batch)


class _Entry(nn.Module):
    """One entry of a model's dictionary of results."""

    def __init__(self, model: nn.Module, key: str) -> None:
        super().__init__()
        self.model = model
        self.key = key

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)[self.key]
        return out


@_add("deeplabv3_resnet50")
def deeplab() -> Example:
    import torchvision

    model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)
    return _Entry(model, "out"), images(1, 320)


@_add("r2plus1d_18")
def video() -> Example:
    import torchvision

    return torchvision.models.video.r2plus1d_18(weights=None), (torch.randn(1, 3, 8, 112, 112),)


class _Detector(nn.Module):
    """Bounding boxes and scores after non-maximum suppression, for one image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = self.model([image])[0]
        return found["boxes"], found["scores"], found["labels"]


@_add("ssdlite320")
def detector() -> Example:
    import torchvision

    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    return _Detector(model), (torch.rand(3, 320, 320),)


# transformers.


class _Text(nn.Module):
    """The first result of a transformers model, its inputs by position."""

    def __init__(self, model: nn.Module, *names: str, **fixed: Any) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.fixed = fixed

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True)), **self.fixed, return_dict=False)[0]
        return out


def tokens(batch: int, length: int, vocabulary: int = 1000) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


# Encoders and decoders of text: configuration class, its arguments, model class, batch and length.
TEXT: dict[str, tuple[str, dict[str, Any], str, int, int]] = {
    "bert_base": ("BertConfig", {}, "BertModel", 1, 128),
    "distilbert": ("DistilBertConfig", {}, "DistilBertModel", 8, 128),
    "deberta_v3_small": (
        "DebertaV2Config",
        {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072,
         "relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
         "vocab_size": 30000},
        "DebertaV2Model", 1, 128,
    ),
    "modernbert_base": ("ModernBertConfig", {"reference_compile": False}, "ModernBertModel", 1, 256),
    "gpt2": ("GPT2Config", {"use_cache": False}, "GPT2LMHeadModel", 1, 128),
    "opt_125m": ("OPTConfig", {"use_cache": False}, "OPTForCausalLM", 1, 128),
    "qwen3_0_6b": (
        "Qwen3Config",
        {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "intermediate_size": 3072, "vocab_size": 32000, "use_cache": False},
        "Qwen3ForCausalLM", 1, 128,
    ),
    "gemma3_270m": (
        "Gemma3TextConfig",
        {"hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
         "head_dim": 256, "intermediate_size": 2048, "vocab_size": 32000, "use_cache": False},
        "Gemma3ForCausalLM", 1, 128,
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
         "head_dim": 64, "intermediate_size": 2048, "moe_intermediate_size": 512, "num_experts": 32,
         "num_experts_per_tok": 4, "vocab_size": 32000, "use_cache": False},
        "Qwen3MoeForCausalLM", 1, 128,
    ),
    "t5_small_encoder": ("T5Config", {}, "T5EncoderModel", 1, 128),
}  # fmt: skip


def _text(name: str, config: str, options: dict[str, Any], model: str, batch: int, length: int) -> None:
    @_add(name)
    def make() -> Example:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**options))
        return _Text(made, "input_ids"), (tokens(batch, length),)


for _name, _entry in TEXT.items():
    _text(_name, *_entry)


@_add("bart_base")
def bart() -> Example:
    import transformers

    config = transformers.BartConfig(
        d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
    )  # fmt: skip
    model = transformers.BartModel(config)
    return _Text(model, "input_ids", "decoder_input_ids"), (tokens(1, 128), tokens(1, 32))


# Vision and audio of transformers: configuration class, its arguments, model class, input's name and shape.
SIGNALS: dict[str, tuple[str, dict[str, Any], str, str, tuple[int, ...]]] = {
    "clip_vision": ("CLIPVisionConfig", {}, "CLIPVisionModel", "pixel_values", (1, 3, 224, 224)),
    "siglip_vision": ("SiglipVisionConfig", {}, "SiglipVisionModel", "pixel_values", (1, 3, 224, 224)),
    "dinov2_base": ("Dinov2Config", {"image_size": 224}, "Dinov2Model", "pixel_values", (1, 3, 224, 224)),
    "segformer_b0": ("SegformerConfig", {}, "SegformerForSemanticSegmentation", "pixel_values", (1, 3, 512, 512)),
    "wav2vec2_base": ("Wav2Vec2Config", {}, "Wav2Vec2Model", "input_values", (1, 16000)),
    "whisper_encoder": (
        "WhisperConfig",
        {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048},
        "WhisperEncoder", "input_features", (1, 80, 3000),
    ),
}  # fmt: skip


def _signal(name: str, config: str, options: dict[str, Any], model: str, argument: str, shape: tuple[int, ...]) -> None:
    @_add(name)
    def make() -> Example:
        import transformers
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        kind = WhisperEncoder if model == "WhisperEncoder" else getattr(transformers, model)
        return _Text(kind(getattr(transformers, config)(**options)), argument), (torch.randn(shape),)


for _name, _signal_entry in SIGNALS.items():
    _signal(_name, *_signal_entry)


# Audio front ends, recurrent layers, and blocks of diffusion models.


@_add("mel_spectrogram")
def mel() -> Example:
    import torchaudio

    return torchaudio.transforms.MelSpectrogram(16000, n_fft=400, hop_length=160, n_mels=80), (torch.randn(1, 32000),)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(256, 256, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0]
        return out


@_add("gru")
def gru() -> Example:
    return _Recurrent(nn.GRU), (torch.randn(1, 32, 256),)


@_add("lstm")
def lstm() -> Example:
    return _Recurrent(nn.LSTM), (torch.randn(1, 32, 256),)


class _Vocoder(nn.Module):
    """HiFi-GAN's generator: transposed 1-D convolutions, each followed by residual dilated ones."""

    def __init__(self) -> None:
        super().__init__()
        width = 256
        self.first = nn.Conv1d(80, width, 7, padding=3)
        self.up, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in ((8, 16), (8, 16), (2, 4), (2, 4)):
            self.up.append(nn.ConvTranspose1d(width, width // 2, kernel, rate, padding=(kernel - rate) // 2))
            width //= 2
            for size in (3, 7, 11):
                self.blocks.append(
                    nn.ModuleList(
                        nn.Conv1d(width, width, size, padding=d * (size - 1) // 2, dilation=d) for d in (1, 3, 5)
                    )
                )
        self.last = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for i, up in enumerate(self.up):
            x = up(nn.functional.leaky_relu(x, 0.1))
            total = torch.zeros_like(x)
            for j in range(3):
                y = x
                for convolution in self.blocks[3 * i + j]:  # type: ignore[union-attr]
                    y = y + convolution(nn.functional.leaky_relu(y, 0.1))
                total = total + y
            x = total / 3
        return torch.tanh(self.last(nn.functional.leaky_relu(x)))


@_add("hifigan")
def vocoder() -> Example:
    return _Vocoder(), (torch.randn(1, 80, 100),)


@_add("diffusion_unet")
def unet() -> Example:
    import diffusers

    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = diffusers.UNet2DConditionModel(
                sample_size=32, block_out_channels=(320, 640, 1280, 1280), cross_attention_dim=768
            )

        def forward(self, sample: torch.Tensor, step: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.model(sample, step, text, return_dict=False)[0]
            return out

    return Unet(), (torch.randn(1, 4, 32, 32), torch.tensor([10]), torch.randn(1, 77, 768))


@_add("diffusion_vae_decoder")
def vae() -> Example:
    import diffusers

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = diffusers.AutoencoderKL(
                block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4,
                down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            )  # fmt: skip

        def forward(self, latent: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.model.decode(latent, return_dict=False)[0]
            return out

    return Decoder(), (torch.randn(1, 4, 32, 32),)
