"""Images from paths, bytes, arrays and Pillow images: RGB, upright."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError, file_error
from untorch.validation import refuse_url

__all__ = ["read_image"]


def read_image(
    source: Any, where: str, extra: str, *, max_pixels: int | None = None, formats: Sequence[str] | None = None
) -> Any:
    """A Pillow image, RGB: of a path, the bytes of a file, a Pillow image, or an array [height, width, 3] uint8.

    It is turned as its EXIF orientation says.

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
        return _upright(source, where, extra)
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
            raise file_error(f"{where}: there is no file {path}", 2, str(path))
        opened: Any = path
    elif isinstance(source, bytes):
        opened = io.BytesIO(source)
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
        raise InvalidArgumentError(f"{where}: expected an image that Pillow reads: {known}") from None
    except Exception as error:  # a damaged file may lead Pillow to any
        raise InvalidArgumentError(f"{where}: expected an image that Pillow reads: {error}") from None


def _upright(image: Any, where: str, extra: str) -> Any:
    return _import("PIL.ImageOps", where, extra).exif_transpose(image).convert("RGB")


def _import(module: str, where: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{where.partition(':')[0]}: an image needs the package pillow: pip install 'untorch[{extra}]'"
        ) from error
