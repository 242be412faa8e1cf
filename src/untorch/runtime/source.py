"""What ``load`` takes: a path, or the contents of a file in memory; and checks of its options."""

from __future__ import annotations

import os
from typing import Any

from untorch import _core
from untorch.runtime.errors import ArgumentTypeError, FileOpenError, InvalidArgumentError

__all__ = ["check_load_options", "open_source"]

_MAX_PARALLEL, _MAX_SPIN = 1024, 1_000_000
_ZIP_MAGIC = b"PK\x03\x04"
_ALIGNMENT = 64


def open_source(source: Any, copy: bool) -> tuple[_core.Archive, str]:
    """The archive of ``load``'s argument, and the path that the program shows."""
    if isinstance(source, str | os.PathLike):
        encoded = os.fsencode(source)
        if b"\0" in encoded:
            raise InvalidArgumentError(f"load: source: expected no zero bytes in a path, got {os.fspath(source)!r}")
        try:
            return _core.open_archive(encoded, copy), os.fsdecode(encoded)
        except FileOpenError as error:
            error.filename = os.fspath(source)
            raise
    try:
        with memoryview(source) as view:
            contiguous, size = view.c_contiguous, view.nbytes
            start = bytes(view.cast("B")[:4]) if contiguous and size else b""
    except (TypeError, BufferError):
        raise ArgumentTypeError(
            "load: source: expected a path (str or os.PathLike), or the contents of a file (bytes, or another object "
            f"with the buffer protocol), got {type(source).__name__}"
        ) from None
    if not contiguous:
        raise InvalidArgumentError("load: source: expected contiguous memory, got a buffer with strides")
    if start != _ZIP_MAGIC:
        raise InvalidArgumentError(
            f"load: source: expected the contents of a .pt2 file, got {type(source).__name__} of {size} bytes that do "
            "not begin as one; a path has to be str or os.PathLike: os.fsdecode(path)"
        )
    # Only bytes never change, and only at an aligned address are its weights aligned as they are in the file.
    in_place = type(source) is bytes and not copy and _core.address_of(source) % _ALIGNMENT == 0
    return _core.open_memory(source, in_place), "<memory>"


def check_load_options(
    device: Any,
    num_runners: Any,
    num_threads: Any,
    dequantize_weights: Any,
    verify: Any,
    copy: Any,
    tf32: Any,
    spin_us: Any,
    weights: Any = None,
    cuda_graphs: Any = 0,
) -> None:
    """Raises ArgumentTypeError or InvalidArgumentError for a wrong option of ``load``."""
    for name, value, least, most, otherwise in (
        ("num_runners", num_runners, 1, _MAX_PARALLEL, ""),
        ("num_threads", num_threads, 0, _MAX_PARALLEL, ""),
        ("cuda_graphs", cuda_graphs, 0, _MAX_PARALLEL, ""),
        ("spin_us", 0 if spin_us is None else spin_us, 0, _MAX_SPIN, " (microseconds), or None"),
    ):
        text = f"load: {name}: expected an integer from {least} to {most}{otherwise}, got {value!r}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentTypeError(text)
        if not least <= value <= most:
            raise InvalidArgumentError(text)
    for name, value in (("dequantize_weights", dequantize_weights), ("verify", verify), ("copy", copy)):
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"load: {name}: expected True or False, got {value!r}")
    if tf32 is not None and not isinstance(tf32, bool):
        raise ArgumentTypeError(f"load: tf32: expected True, False or None, got {tf32!r}")
    if weights is not None and not isinstance(weights, str | os.PathLike):
        raise ArgumentTypeError(
            f"load: weights: expected the path of a .safetensors file or of a folder with some, got {weights!r}"
        )
    if weights is not None and (not os.fspath(weights) or "\0" in os.fsdecode(weights)):
        raise InvalidArgumentError(
            f"load: weights: expected the path of a .safetensors file or of a folder with some, got {weights!r}"
        )
    if device is not None and not isinstance(device, str):
        raise ArgumentTypeError(f"load: device: expected a string such as 'cpu' or 'cuda:0', got {device!r}")
