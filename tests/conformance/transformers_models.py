"""Tiny random-weight configurations of transformers' architectures."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from .models import Case

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TRANSFORMERS: dict[str, Callable[[], Case]] = {}


def architecture(fn: Callable[[], Case]) -> Callable[[], Case]:
    TRANSFORMERS[fn.__name__] = fn
    return fn


class Call(nn.Module):
    """Calls a model with keyword arguments and gives the named fields of its result."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...], **fixed: Any) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs, self.fixed = model, inputs, outputs, fixed

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.model(**dict(zip(self.inputs, args, strict=True)), **self.fixed)
        return tuple(result[name] for name in self.outputs)


BATCH, LENGTH = Dim("batch", min=1, max=64), Dim("length", min=2, max=64)


def _ids(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    if batch > 1:
        mask[-1, length // 2 :] = 0
    return torch.randint(3, 90, (batch, length)), mask


def _text(model: nn.Module, outputs: tuple[str, ...] = ("last_hidden_state",), **fixed: Any) -> Case:
    return Case(
        Call(model.eval(), ("input_ids", "attention_mask"), outputs, **fixed),
        _ids(2, 12),
        dynamic_shapes=(({0: BATCH, 1: LENGTH}, {0: BATCH, 1: LENGTH}),),
        samples=[(_ids(1, 5), {}), (_ids(3, 33), {})],
        rtol=1e-4,
        atol=1e-4,
    )


SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@architecture
def bert() -> Case:
    from transformers import BertConfig, BertModel

    return _text(BertModel(BertConfig(**SMALL)))


@architecture
def roberta() -> Case:
    from transformers import RobertaConfig, RobertaModel

    return _text(RobertaModel(RobertaConfig(**SMALL, max_position_embeddings=80)))


@architecture
def distilbert() -> Case:
    from transformers import DistilBertConfig, DistilBertModel

    return _text(DistilBertModel(DistilBertConfig(vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=64)))


@architecture
def t5_encoder() -> Case:
    from transformers import T5Config, T5EncoderModel

    return _text(T5EncoderModel(T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)))


@architecture
def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=80)
    return _text(GPT2LMHeadModel(config), ("logits",), use_cache=False)


def _decoder(config: type, model: type, **extra: Any) -> Case:
    settings = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 80, **extra}
    return _text(model(config(**settings)), ("logits",), use_cache=False)


@architecture
def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _decoder(LlamaConfig, LlamaForCausalLM)


@architecture
def qwen2() -> Case:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _decoder(Qwen2Config, Qwen2ForCausalLM)


@architecture
def qwen3() -> Case:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _decoder(Qwen3Config, Qwen3ForCausalLM, head_dim=8)


@architecture
def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    return _decoder(MixtralConfig, MixtralForCausalLM, num_local_experts=4)


@architecture
def qwen3_moe() -> Case:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return _decoder(Qwen3MoeConfig, Qwen3MoeForCausalLM, head_dim=8, **experts)


@architecture
def gpt_oss() -> Case:
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _decoder(GptOssConfig, GptOssForCausalLM, head_dim=8, rope_parameters={"rope_theta": 1e4}, **experts)


@architecture
def vit() -> Case:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    )
    images = Dim("images", min=1, max=16)
    return Case(
        Call(ViTModel(config).eval(), ("pixel_values",), ("last_hidden_state", "pooler_output")),
        (torch.randn(2, 3, 32, 32),),
        dynamic_shapes=(({0: images},),),
        samples=[((torch.randn(3, 3, 32, 32),), {})],
        rtol=1e-4,
        atol=1e-4,
    )


@architecture
def clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    text = {**SMALL, "max_position_embeddings": 40, "eos_token_id": 2}
    vision = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()
    ids, mask = _ids(2, 10)
    return Case(
        Call(
            model, ("input_ids", "attention_mask", "pixel_values"), ("logits_per_image", "text_embeds", "image_embeds")
        ),
        (ids, mask, torch.randn(3, 3, 32, 32)),
        rtol=1e-4,
        atol=1e-4,
    )


@architecture
def whisper_encoder() -> Case:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=50,
    )
    return Case(
        Call(WhisperEncoder(config).eval(), ("input_features",), ("last_hidden_state",)),
        (torch.randn(2, 16, 100),),
        rtol=1e-4,
        atol=1e-4,
    )


@architecture
def wav2vec2() -> Case:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2), conv_kernel=(10, 3, 2), num_feat_extract_layers=3, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, mask_time_prob=0.0,
    )  # fmt: skip
    return Case(
        Call(Wav2Vec2Model(config).eval(), ("input_values",), ("last_hidden_state", "extract_features")),
        (torch.randn(2, 1600),),
        rtol=1e-4,
        atol=1e-4,
    )
