"""A package's image encoder: images to embeddings, and prompts with images to prompts with embeddings."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.images import read_image
from untorch.llm.prompt import Prompt
from untorch.llm.vision.patches import Patches, cut_patches
from untorch.llm.vision.positions import image_positions
from untorch.llm.vision.settings import VisionSettings
from untorch.llm.vision.tables import encoder_tables
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["ImageEncoder"]

_MOST_BYTES = 256 << 20  # of embeddings that are kept


class ImageEncoder:
    """Embeddings are kept, the least recently used go first: a conversation shows its images again each turn.

    method: patches and tables of one image to embeddings [units, hidden]. position_rows: as in Settings.
    """

    def __init__(self, settings: VisionSettings, method: Callable[..., Any], position_rows: int) -> None:
        self.settings, self._method, self._position_rows = settings, method, position_rows
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, images: Sequence[Any]) -> list[Patches]:
        """The patches of paths, bytes, Pillow images or arrays. Raises InvalidArgumentError."""
        if not isinstance(images, Sequence) or isinstance(images, str | bytes):
            raise ArgumentTypeError(f"prompt: images: expected a list of images, got {type(images).__name__}")
        return [cut_patches(read_image(image, "prompt: images", "llm"), self.settings) for image in images]

    def expand(self, tokens: Sequence[int], images: Sequence[Any], most: int) -> Prompt:
        """A prompt in which each placeholder is replaced by an image's embeddings. most: of its tokens.

        Raises InvalidArgumentError if there are more or fewer placeholders than images, or too many tokens.
        """
        placeholder, found = self.settings.placeholder, self.read(images)
        count = sum(token == placeholder for token in tokens)
        if count != len(found):
            raise InvalidArgumentError(
                f"prompt: images: expected {count}, one for each token {placeholder} of the prompt, got {len(found)}"
            )
        units = [len(patches.pixels) for patches in found]
        length = len(tokens) - count + sum(units)
        if length > most:
            raise InvalidArgumentError(
                f"prompt: expected at most {most} tokens, got {length}, {sum(units)} of them of images: use fewer or "
                "smaller images"
            )
        ids: list[int] = []
        embeddings: dict[int, NDArray[np.float32]] = {}
        placed: list[tuple[int, int, int]] = []
        rest = iter(found)
        for token in tokens:
            if token == placeholder:
                patches = next(rest)
                embeddings[len(ids)] = self.encode(patches)
                placed.append((len(ids), patches.rows, patches.columns))
                ids += [placeholder] * len(patches.pixels)
            else:
                ids.append(int(token))
        return Prompt(ids, embeddings, image_positions(length, placed) if self._position_rows > 1 else None)

    def encode(self, patches: Patches) -> NDArray[np.float32]:
        """Embeddings [units, hidden]."""
        digest = hashlib.blake2b(patches.pixels.tobytes(), digest_size=16)
        digest.update(patches.rows.to_bytes(8, "little"))
        key = digest.digest()
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        rows: Any = self._method(patches.pixels, *encoder_tables(patches.rows, patches.columns, self.settings))
        found = np.asarray(rows.numpy() if hasattr(rows, "numpy") else rows, np.float32)
        found.flags.writeable = False
        with self._lock:
            if key not in self._kept:
                self._kept[key] = found
                self._bytes += found.nbytes
            while self._bytes > _MOST_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found

    def rehearse(self) -> None:
        """Takes the memory of the largest image."""
        settings = self.settings
        side = max(int((settings.max_pixels / settings.unit**2) ** 0.5), 1)
        values = 3 * settings.temporal_patch_size * settings.patch_size**2
        pixels = np.zeros((side * side, settings.merge_size**2, values), np.float32)
        self._method(pixels, *encoder_tables(side, side, settings))
