"""Whisper's layers with keys and values in mutable buffers: modules of the methods encode and decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Decode", "Encode", "WhisperDecoder"]


class WhisperDecoder(nn.Module):
    """The decoder's layers, one sequence, ``max_target_positions`` tokens.

    Buffers of each layer: keys and values of the tokens [1, heads, positions, width], and of the sound [1, heads,
    max_source_positions, width].
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        decoder, config = model.model.decoder, model.config
        self.embed_tokens, self.embed_positions = decoder.embed_tokens, decoder.embed_positions
        self.layers, self.layer_norm, self.proj_out = decoder.layers, decoder.layer_norm, model.proj_out
        self.heads = int(config.decoder_attention_heads)
        self.positions = int(config.max_target_positions)
        width, dtype = int(config.d_model) // self.heads, decoder.embed_tokens.weight.dtype
        for i in range(len(self.layers)):
            for kind, length in (("self", self.positions), ("cross", int(config.max_source_positions))):
                for part in ("keys", "values"):
                    zeros = torch.zeros(1, self.heads, length, width, dtype=dtype)
                    self.register_buffer(f"{kind}_{part}_{i}", zeros)
        self.train(model.training)

    def reset(self) -> None:
        """Zeros."""
        for buffer in self.buffers():
            buffer.zero_()

    def attend_to(self, hidden: torch.Tensor) -> None:
        """hidden [1, max_source_positions, d_model]: the sound's keys and values are kept."""
        for i, layer in enumerate(self.layers):
            attention: Any = layer.encoder_attn
            getattr(self, f"cross_keys_{i}").copy_(self._split(attention.k_proj(hidden)))
            getattr(self, f"cross_values_{i}").copy_(self._split(attention.v_proj(hidden)))

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """input_ids [1, n], position [1] of the first → logits [1, vocabulary] of the last, float32."""
        places = position + torch.arange(input_ids.shape[1], device=position.device)
        mask = torch.arange(self.positions, device=places.device)[None, :] <= places[:, None]
        hidden = self.embed_tokens(input_ids) + self.embed_positions.weight[places]
        for i, layer in enumerate(self.layers):
            parts: Any = layer
            keys, values = getattr(self, f"self_keys_{i}"), getattr(self, f"self_values_{i}")
            inputs = parts.self_attn_layer_norm(hidden)
            keys.index_copy_(2, places, self._split(parts.self_attn.k_proj(inputs)))
            values.index_copy_(2, places, self._split(parts.self_attn.v_proj(inputs)))
            hidden = hidden + self._attend(parts.self_attn, inputs, keys, values, mask)
            inputs = parts.encoder_attn_layer_norm(hidden)
            sound = getattr(self, f"cross_keys_{i}"), getattr(self, f"cross_values_{i}")
            hidden = hidden + self._attend(parts.encoder_attn, inputs, *sound, None)
            inputs = parts.final_layer_norm(hidden)
            hidden = hidden + parts.fc2(parts.activation_fn(parts.fc1(inputs)))
        logits: torch.Tensor = self.proj_out(self.layer_norm(hidden[:, -1])).float()
        return logits

    def _split(self, projected: torch.Tensor) -> torch.Tensor:
        """[1, n, d_model] → [1, heads, n, width]."""
        return projected.view(*projected.shape[:-1], self.heads, -1).transpose(1, 2)

    def _attend(
        self, attention: Any, inputs: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        queries = self._split(attention.q_proj(inputs))
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=attention.scaling)
        output: torch.Tensor = attention.out_proj(found.transpose(1, 2).flatten(2))
        return output


class Encode(nn.Module):
    """forward(features [1, n_mels, frames] float32) → logits [1, vocabulary] of what follows the start token."""

    def __init__(self, model: Any, decoder: WhisperDecoder, start: int) -> None:
        super().__init__()
        self.encoder, self.decoder = model.model.encoder, decoder
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.start = start
        self.train(model.training)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Keeps the sound's keys and values; the token's own are written over by decode."""
        self.decoder.attend_to(self.encoder(features.to(self.dtype)).last_hidden_state)
        token = torch.full((1, 1), self.start, dtype=torch.int64, device=features.device)
        logits: torch.Tensor = self.decoder(token, torch.zeros_like(token[0]))
        return logits


class Decode(nn.Module):
    """forward(input_ids [1, n] int64, position [1] int64) → logits [1, vocabulary] of the last token."""

    def __init__(self, decoder: WhisperDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.train(decoder.training)

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """position: of the first token. Those before it were decoded."""
        logits: torch.Tensor = self.decoder(input_ids, position)
        return logits
