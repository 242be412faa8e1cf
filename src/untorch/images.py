"""Images from paths, bytes, arrays and Pillow images: RGB, upright."""

from __future__ import annotations

import importlib
import io
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError
from untorch.validation import missing_file, refuse_url

__all__ = ["read_image"]


def read_image(
    source: Any, where: str, extra: str, *, max_pixels: int | None = None, formats: Sequence[str] | None = None
) -> Any:
    """A Pillow image, RGB: of a path, the bytes of a file, a Pillow image, or an array [height, width, 3] uint8.

    It is turned as its EXIF orientation says. Of several frames it is the first. Transparency is left out. Values of
    16 bits, 32 bits and floats are taken as from 0 to 255, as Pillow and transformers do; a warning says so of others.

    Args:
        source: The image.
        where: For errors.
        extra: The extra of untorch that brings Pillow.
        max_pixels: Of a file: those of a larger image are not decoded. None: as Pillow bounds them.
        formats: Of a file: Pillow's names of formats. None: all that Pillow reads.

    Raises:
        InvalidArgumentError: It is no image, or too large.
        FileMissingError: There is no such file. Also a FileNotFoundError.
        UnsupportedError: Pillow is not installed.
    """
    module = _import("PIL.Image", where, extra)
    if isinstance(source, module.Image):
        if 0 in source.size:
            raise InvalidArgumentError(f"{where}: expected an image with pixels, got {source.width} × {source.height}")
        try:
            return _upright(source, where, extra)
        except MemoryError:
            raise
        except Exception as error:  # its file is read now, and may be damaged or closed
            raise InvalidArgumentError(f"{where}: expected an image that Pillow reads: {error}") from None
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or 0 in source.shape:
            raise InvalidArgumentError(
                f"{where}: expected an array [height, width, 3] of uint8, got {source.dtype} {list(source.shape)}"
            )
        return module.fromarray(source)
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if not os.path.isfile(path):
            refuse_url(where, path)
            raise missing_file(where, path)
        opened: Any = path
        got = str(path)
    elif isinstance(source, bytes):
        opened = io.BytesIO(source)
        got = f"{len(source)} bytes that begin with {source[:8]!r}" if source else "no bytes"
    else:
        raise ArgumentTypeError(
            f"{where}: expected a path, bytes, a Pillow image, an array, or a list of them, got {type(source).__name__}"
        )
    try:
        with module.open(opened, formats=formats) as image:
            width, height = image.size
            if max_pixels is not None and width * height > max_pixels:
                raise InvalidArgumentError(
                    f"{where}: expected an image of at most {max_pixels} pixels, got {width} × {height}"
                )
            return _upright(image, where, extra)
    except (InvalidArgumentError, MemoryError):
        raise
    except module.UnidentifiedImageError:
        known = "a format that Pillow knows" if formats is None else ", ".join(formats)
        raise InvalidArgumentError(f"{where}: expected an image that Pillow reads: {known}; got {got}") from None
    except Exception as error:  # a damaged file may lead Pillow to any
        raise InvalidArgumentError(f"{where}: expected an image that Pillow reads: {error}; got {got}") from None


def _upright(image: Any, where: str, extra: str) -> Any:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        _warn_of_range(image, where)
    return _import("PIL.ImageOps", where, extra).exif_transpose(image).convert("RGB")


def _warn_of_range(image: Any, where: str) -> None:
    """Pillow clips values to 8 bits: 16-bit images become white, floats up to 1 black."""
    low, high = image.getextrema()
    if low < 0 or high > 255 or (image.mode == "F" and low < high <= 1):
        warnings.warn(
            # Without the values: Python remembers each text that it has shown.
            f"{where}: expected values from 0 to 255, got others in an image of Pillow's mode {image.mode}, which are "
            "clipped: scale it to 8 bits",
            stacklevel=4,
        )


def _import(module: str, where: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{where.partition(':')[0]}: an image needs the package pillow: pip install 'untorch[{extra}]'"
        ) from error
