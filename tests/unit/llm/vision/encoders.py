"""An encoder's settings for tests: units of 8 × 8 pixels."""

from __future__ import annotations

from typing import Any

from untorch.llm.vision.settings import VisionSettings


def settings(**fields: Any) -> VisionSettings:
    given: dict[str, Any] = {
        "method": "encode_image", "placeholder": 9, "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
        "min_pixels": 64, "max_pixels": 4096, "resample": 3, "rescale": 1 / 255, "mean": (0.5, 0.5, 0.5),
        "deviation": (0.25, 0.25, 0.25), "tables": ("axes",),
    }  # fmt: skip
    return VisionSettings(**{**given, **fields})
