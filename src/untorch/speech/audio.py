"""Audio files as mono samples at a model's rate: WAV, FLAC, OGG, MP3, by soundfile."""

from __future__ import annotations

import io
import math
import os
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError
from untorch.speech.resample import HIGHEST_RATE, LOWEST_RATE, resample
from untorch.validation import missing_file, refuse_url

__all__ = ["AudioSource", "read_audio"]

AudioSource = str | os.PathLike[str] | bytes | BinaryIO | NDArray[Any]
_BLOCK = 1 << 20  # samples of all channels that are decoded at a time
_MOST_CHANNELS = 64


def read_audio(
    source: AudioSource, sampling_rate: int, *, source_rate: int | None = None, max_seconds: float = 3600.0
) -> NDArray[np.float32]:
    """Mono samples [n], float32, at ``sampling_rate``: channels are averaged, other rates converted.

    Args:
        source: A path, the bytes of a file, a binary file object, or an array of samples [n] or [n, channels]: floats
            from -1 to 1, or int16.
        sampling_rate: In hertz.
        source_rate: Of an array. Default: ``sampling_rate``. A file says its own.
        max_seconds: Longer audio is refused. What a file decodes to may be far larger than the file.

    Raises:
        InvalidArgumentError: It is no audio, it is empty or too long, or its samples are not finite.
        FileMissingError: There is no such file. Also a FileNotFoundError.
        UnsupportedError: A file needs the package soundfile.
    """
    if isinstance(source, np.ndarray):
        samples, rate = _of_array(source), sampling_rate if source_rate is None else _read_rate(source_rate)
    elif source_rate is not None:
        raise InvalidArgumentError("audio: source_rate: is for an array; a file says its own rate")
    else:
        samples, rate = _of_file(source, max_seconds)
    if not len(samples):
        raise InvalidArgumentError("audio: expected samples, got none")
    if len(samples) > max_seconds * rate:
        raise _too_long(max_seconds)
    if not np.isfinite(samples).all():
        raise InvalidArgumentError("audio: expected finite samples, got NaN or infinity")
    return resample(samples, rate, sampling_rate)


def _read_rate(given: Any) -> int:
    """Of an array. Whole floats are rates, too: some libraries give them."""
    is_number = isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool)
    if not is_number or not LOWEST_RATE <= given <= HIGHEST_RATE or given != int(given):
        raise InvalidArgumentError(
            f"audio: sampling_rate: expected a whole number from {LOWEST_RATE} to {HIGHEST_RATE} Hz, got {given!r:.80}"
        )
    return int(given)


def _of_array(given: NDArray[Any]) -> NDArray[np.float32]:
    is_int16 = given.dtype == np.int16
    if given.ndim not in (1, 2) or not (given.dtype.kind == "f" or is_int16):
        raise InvalidArgumentError(
            f"audio: expected an array [n] or [n, channels] of floats or int16, got {given.dtype} {list(given.shape)}"
        )
    if given.ndim == 2 and not 1 <= given.shape[1] <= _MOST_CHANNELS:
        raise InvalidArgumentError(
            f"audio: expected [n, channels] with 1 to {_MOST_CHANNELS} channels, got {list(given.shape)}"
            + (": pass its transpose" if 1 <= len(given) <= _MOST_CHANNELS < given.shape[1] else "")
        )
    samples = given.astype(np.float32)
    if is_int16:
        samples /= 32768
    return samples if samples.ndim == 1 else _mix(samples)


def _of_file(source: Any, max_seconds: float) -> tuple[NDArray[np.float32], int]:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise UnsupportedError(
            "audio: files need the package soundfile: pip install 'untorch[speech]', or give an array of samples"
        ) from error
    if isinstance(source, bytes | bytearray | memoryview):
        source = io.BytesIO(source)
    elif isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if not os.path.isfile(path):
            refuse_url("audio", path)
            raise missing_file("audio", path)
        source = path
    elif not hasattr(source, "read"):
        raise InvalidArgumentError(
            f"audio: expected a path, bytes, a binary file or an array, got {type(source).__name__}"
            + (": pass its samples as an array, and their rate as sampling_rate" if isinstance(source, dict) else "")
        )
    elif isinstance(source, io.TextIOBase):
        raise ArgumentTypeError('audio: expected a binary file, got one that was opened as text: open it with "rb"')
    try:
        with soundfile.SoundFile(source) as file:
            rate, channels = int(file.samplerate), int(file.channels)
            if not LOWEST_RATE <= rate <= HIGHEST_RATE or not 1 <= channels <= _MOST_CHANNELS:
                raise InvalidArgumentError(
                    f"audio: expected a rate from {LOWEST_RATE} to {HIGHEST_RATE} Hz and 1 to {_MOST_CHANNELS} "
                    f"channels, got {rate} Hz and {channels}"
                )
            blocks: list[NDArray[np.float32]] = []
            most, count = math.ceil(max_seconds * rate), 0
            # The header's number of frames may be wrong: what counts is what is decoded.
            while len(block := file.read(max(1, _BLOCK // channels), dtype="float32", always_2d=True)):
                count += len(block)
                if count > most:
                    raise _too_long(max_seconds)
                blocks.append(_mix(block))
    except soundfile.SoundFileError as error:
        reason = str(getattr(error, "error_string", error)).rstrip(".")
        raise InvalidArgumentError(
            f"audio: expected a file that libsndfile reads (WAV, FLAC, OGG, MP3 …): {reason}"
        ) from None
    return np.concatenate(blocks) if blocks else np.empty(0, np.float32), rate


def _mix(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, channels] → [n]: the average."""
    return samples[:, 0].copy() if samples.shape[1] == 1 else samples.mean(1, dtype=np.float32)


def _too_long(most: float) -> InvalidArgumentError:
    return InvalidArgumentError(f"audio: expected at most {most:g} seconds, got more: cut it into parts")
