"""Voxtral (Whisper's encoder, a projector, a Llama decoder) as three methods, from its configuration: random weights.

audio_encoder    mel features [1, 128, 3000] to audio embeddings [375, hidden]
token_embedding  tokens [1, n] to embeddings [1, n, hidden]
text_decoder     embeddings [1, n, hidden] to the logits of the next token [1, vocabulary]; keeps keys and values
"""

from __future__ import annotations

from typing import Any

__all__ = ["PROMPT", "build_model", "decoder", "examples", "methods"]


PROMPT = 388  # positions: 375 of audio, and the instruction around them

# What the published model says where transformers' defaults differ.
_TEXT = {"num_attention_heads": 32, "max_position_embeddings": 131072, "tie_word_embeddings": False}
_TINY_TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_TINY_AUDIO = {
    "vocab_size": 99, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_mel_bins": 8, "max_source_positions": 32,
}  # fmt: skip


def build_model(tiny: bool = False, dtype: str = "bfloat16", device: str = "cpu", layers: int | None = None) -> Any:
    """transformers' model with random weights; ``layers``: other numbers of them than it has."""
    import torch
    import transformers

    depth = {} if layers is None else {"num_hidden_layers": layers}
    config = transformers.VoxtralConfig(
        text_config={"model_type": "llama", **(_TINY_TEXT if tiny else _TEXT), **depth},
        audio_config={"model_type": "voxtral_encoder", **(_TINY_AUDIO if tiny else {}), **depth},
        audio_token_id=24,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            return transformers.VoxtralForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(before)


def decoder(model: Any, length: int) -> Any:
    """The text decoder on embeddings, with a cache of ``length`` positions."""
    from static_cache import with_cache

    return with_cache(model, length)


def methods(model: Any, length: int) -> dict[str, Any]:
    """The three methods as ``untorch.export.export`` takes them."""
    import torch
    from torch.export import Dim

    class AudioEncoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.audio_tower = model.model.audio_tower
            self.multi_modal_projector = model.model.multi_modal_projector

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            hidden = self.audio_tower(features).last_hidden_state
            return self.multi_modal_projector(hidden.reshape(-1, self.audio_tower.config.intermediate_size))

    class TokenEmbedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = model.get_input_embeddings()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.embedding(tokens)

    features, tokens, embeddings = examples(model)
    n = Dim("n", min=1, max=length)
    return {
        "audio_encoder": (AudioEncoder().eval(), (features,)),
        "token_embedding": {"model": TokenEmbedding().eval(), "args": (tokens,), "dynamic_shapes": ({1: n},)},
        "text_decoder": {
            "model": decoder(model, length),
            "args": (embeddings,),
            "dynamic_shapes": ({1: Dim("n", min=1, max=length)},),
        },
    }


def examples(model: Any) -> tuple[Any, Any, Any]:
    """An input of each method: mel features, tokens, embeddings."""
    import torch

    config, parameter = model.config, next(model.parameters())
    audio = config.audio_config
    features = torch.randn(1, audio.num_mel_bins, 2 * audio.max_source_positions, device=parameter.device)
    tokens = torch.randint(0, config.text_config.vocab_size, (1, 9), device=parameter.device)
    embeddings = torch.randn(1, 9, config.text_config.hidden_size, device=parameter.device)
    return features.to(parameter.dtype), tokens, embeddings.to(parameter.dtype)
