"""Denoisers of diffusion pipelines, U-Nets and transformers, and the decoder of an autoencoder, as methods' modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = [
    "ClassPredictor", "Decoder", "FluxPredictor", "JointPredictor", "MaskedPredictor", "PooledPredictor", "Predictor",
    "UNetPredictor",
]  # fmt: skip


class Predictor(nn.Module):
    """forward(latents [batch, channels, height, width], timestep [1], conditions …) → as latents; float32.

    size: height and width of the image in pixels.
    """

    def __init__(self, model: Any, size: tuple[int, int]) -> None:
        super().__init__()
        self.model, self.size = model, size
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.train(model.training)


class UNetPredictor(Predictor):
    """Of Stable Diffusion 1 and 2. hidden: [batch, sequence, width]."""

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Noise, or what the schedule's prediction says."""
        text = hidden.to(self.dtype)
        found: torch.Tensor = self.model(latents.to(self.dtype), timestep, encoder_hidden_states=text).sample
        return found.float()


class PooledPredictor(Predictor):
    """Of Stable Diffusion XL, with the image's size, which is that of its training, too, without a crop.

    pooled: [batch, projection].
    """

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, hidden: torch.Tensor, pooled: torch.Tensor
    ) -> torch.Tensor:
        """Noise, or what the schedule's prediction says."""
        numbers = torch.tensor([[*self.size, 0, 0, *self.size]], dtype=self.dtype, device=latents.device)
        given = {"text_embeds": pooled.to(self.dtype), "time_ids": numbers.expand(latents.shape[0], -1)}
        found: torch.Tensor = self.model(
            latents.to(self.dtype), timestep, encoder_hidden_states=hidden.to(self.dtype), added_cond_kwargs=given
        ).sample
        return found.float()


class JointPredictor(Predictor):
    """Of Stable Diffusion 3, whose attention is over text and image. pooled: [batch, projections]."""

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, hidden: torch.Tensor, pooled: torch.Tensor
    ) -> torch.Tensor:
        """The velocity."""
        found: torch.Tensor = self.model(
            latents.to(self.dtype), encoder_hidden_states=hidden.to(self.dtype),
            pooled_projections=pooled.to(self.dtype), timestep=timestep.expand(latents.shape[0]),
        ).sample  # fmt: skip
        return found.float()


class MaskedPredictor(Predictor):
    """Of PixArt. attention_mask: [batch, sequence], 1 for tokens and 0 for padding."""

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, hidden: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Noise, or what the schedule's prediction says; without the variance that the model learned."""
        batch = latents.shape[0]
        given: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
        if self.model.use_additional_conditions:
            ratio = self.size[0] / self.size[1]
            for name, values in (("resolution", self.size), ("aspect_ratio", (ratio,))):
                numbers = torch.tensor([values], dtype=self.dtype, device=latents.device)
                given[name] = numbers.expand(batch, -1)
        found: torch.Tensor = self.model(
            latents.to(self.dtype), encoder_hidden_states=hidden.to(self.dtype), timestep=timestep.expand(batch),
            added_cond_kwargs=given, encoder_attention_mask=attention_mask,
        ).sample  # fmt: skip
        return found[:, : latents.shape[1]].float()


class ClassPredictor(Predictor):
    """Of DiT. class_labels: [batch] int64."""

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, class_labels: torch.Tensor) -> torch.Tensor:
        """Noise, or what the schedule's prediction says; without the variance that the model learned."""
        times = timestep.expand(latents.shape[0])
        found: torch.Tensor = self.model(latents.to(self.dtype), timestep=times, class_labels=class_labels).sample
        return found[:, : latents.shape[1]].float()


class FluxPredictor(Predictor):
    """Of Flux, which reads 2 × 2 latents as one. pooled: [batch, width]. guidance: [1], the scale of guidance."""

    def forward(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        hidden: torch.Tensor,
        pooled: torch.Tensor,
        guidance: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The velocity."""
        batch, channels, height, width = latents.shape
        rows, columns = height // 2, width // 2
        packed = latents.to(self.dtype).view(batch, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
        places = torch.zeros(rows, columns, 3, dtype=self.dtype, device=latents.device)
        places[..., 1] += torch.arange(rows, device=latents.device)[:, None]
        places[..., 2] += torch.arange(columns, device=latents.device)[None]
        found: torch.Tensor = self.model(
            packed.reshape(batch, rows * columns, channels * 4), encoder_hidden_states=hidden.to(self.dtype),
            pooled_projections=pooled.to(self.dtype), timestep=timestep.to(self.dtype).expand(batch) / 1000,
            guidance=None if guidance is None else guidance.expand(batch), img_ids=places.view(-1, 3),
            txt_ids=torch.zeros(hidden.shape[1], 3, dtype=self.dtype, device=latents.device),
        ).sample  # fmt: skip
        unpacked = found.view(batch, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return unpacked.reshape(batch, channels, height, width).float()


class Decoder(nn.Module):
    """forward(latents [1, channels, height, width]) → pixels [1, 3, height, width] from -1 to 1; float32."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.factor, self.shift = float(model.config.scaling_factor), float(model.config.shift_factor or 0)
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.post, self.decoder = model.post_quant_conv, model.decoder
        self.train(model.training)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """The autoencoder's decoder, in one piece."""
        given = (latents / self.factor + self.shift).to(self.dtype)
        found: torch.Tensor = self.decoder(given if self.post is None else self.post(given))
        return found.float()
