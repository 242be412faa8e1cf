"""What a package says of its image encoder: how images are cut into patches, and which tables the encoder reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from untorch.runtime.errors import InvalidFileError, UnsupportedError

__all__ = ["FORMAT_VERSION", "TABLES", "VisionSettings", "read_vision"]

FORMAT_VERSION = 1
TABLES = ("axes", "position_grid", "windows")  # in the order of the encoder's arguments
_MOST_PIXELS = 1 << 28


@dataclass(frozen=True)
class VisionSettings:
    """Of a package of ``untorch.export.causal_lm(…, images=True)``.

    Attributes:
        method: Of the package: patches and tables of one image in, embeddings [units, hidden] out.
        placeholder: The token in whose place there are embeddings.
        patch_size: Pixels of a patch's side.
        temporal_patch_size: Frames of a patch: an image is repeated.
        merge_size: Patches of a unit's side. A unit is one token of the language model.
        min_pixels, max_pixels: Of an image, after it was resized.
        resample: Pillow's number of the filter.
        rescale: What bytes are multiplied by.
        mean, deviation: Of the normalisation, by channel.
        tables: Of ``TABLES``, those that the encoder reads beside the patches.
        grid_side: For "position_grid": of the square of learned positions.
        window_side: For "windows": units.
    """

    method: str
    placeholder: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    resample: int
    rescale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    tables: tuple[str, ...]
    grid_side: int = 0
    window_side: int = 0

    @property
    def unit(self) -> int:
        """Pixels of a unit's side."""
        return self.patch_size * self.merge_size

    def to_json(self) -> dict[str, Any]:
        """The manifest's member "vision"."""
        return {
            "format_version": FORMAT_VERSION, **vars(self), "mean": [*self.mean], "deviation": [*self.deviation],
            "tables": [*self.tables],
        }  # fmt: skip


def read_vision(manifest: Mapping[str, Any], path: str) -> VisionSettings | None:
    """Of a program's manifest; None: it has no image encoder. Raises InvalidFileError; UnsupportedError."""
    section = manifest.get("vision")
    if section is None:
        return None
    damaged = f"{path}: the manifest's image encoder is damaged"
    if not isinstance(section, Mapping):
        raise InvalidFileError(f"{damaged}: {section!r:.80}")
    version, tables = section.get("format_version"), section.get("tables", ())
    if version != FORMAT_VERSION or not set(tables) <= set(TABLES):
        raise UnsupportedError(
            f"{path}: its image encoder has format {version!r} and tables {', '.join(map(str, tables))}, this untorch "
            f"reads {FORMAT_VERSION} with {', '.join(TABLES)}: export it again, or upgrade untorch"
        )
    try:
        settings = VisionSettings(
            method=str(section["method"]),
            placeholder=int(section["placeholder"]),
            patch_size=int(section["patch_size"]),
            temporal_patch_size=int(section["temporal_patch_size"]),
            merge_size=int(section["merge_size"]),
            min_pixels=int(section["min_pixels"]),
            max_pixels=int(section["max_pixels"]),
            resample=int(section["resample"]),
            rescale=float(section["rescale"]),
            mean=tuple(float(value) for value in section["mean"]),
            deviation=tuple(float(value) for value in section["deviation"]),
            tables=tuple(str(name) for name in tables),
            grid_side=int(section["grid_side"]),
            window_side=int(section["window_side"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidFileError(f"{damaged}: {error!r}") from None
    sizes = (settings.patch_size, settings.temporal_patch_size, settings.merge_size, settings.min_pixels)
    if (
        min(sizes) < 1
        or max(sizes[:3]) > 1 << 10
        or not settings.min_pixels <= settings.max_pixels <= _MOST_PIXELS
        or settings.placeholder < 0
        or not 0 <= settings.resample <= 5
        or len(settings.mean) != 3
        or len(settings.deviation) != 3
        or not all(settings.deviation)
        or ("position_grid" in settings.tables) != (settings.grid_side > 0)
        or ("windows" in settings.tables) != (settings.window_side > 0)
    ):
        raise InvalidFileError(f"{damaged}: a size is wrong")
    return settings
