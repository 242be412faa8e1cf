"""Audio files and arrays as mono samples."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from untorch.runtime.errors import FileMissingError, InvalidArgumentError, UnsupportedError
from untorch.speech import read_audio, resample

soundfile = pytest.importorskip("soundfile")

RATE = 16000
SOUND = (np.sin(np.arange(4000) / 9) * 0.5).astype(np.float32)


def encoded(sound: np.ndarray = SOUND, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> bytes:
    data = io.BytesIO()
    soundfile.write(data, sound, rate, format=kind, subtype=subtype)
    return data.getvalue()


@pytest.mark.parametrize(
    ("kind", "subtype", "error"),
    [("WAV", "FLOAT", 0), ("WAV", "PCM_16", 4e-5), ("FLAC", "PCM_24", 1e-6), ("OGG", "VORBIS", 0.1), ("WAV", "ULAW", 0.03)],
)  # fmt: skip
def test_formats(kind: str, subtype: str, error: float, tmp_path: Path) -> None:
    data = encoded(kind=kind, subtype=subtype)
    (tmp_path / "a").write_bytes(data)
    for source in (data, io.BytesIO(data), tmp_path / "a", str(tmp_path / "a")):
        found = read_audio(source, RATE)
        assert found.dtype == np.float32
        assert np.abs(found - SOUND).max() <= error


def test_channels_and_rates() -> None:
    stereo = np.stack([SOUND, -SOUND / 2], 1)
    found = read_audio(encoded(stereo, 44100, subtype="FLOAT"), RATE)
    np.testing.assert_allclose(found, resample(SOUND / 4, 44100, RATE), atol=1e-6)
    np.testing.assert_allclose(read_audio(stereo, RATE, source_rate=44100), found, atol=1e-6)


def test_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("untorch.speech.audio._BLOCK", 999)
    np.testing.assert_array_equal(read_audio(encoded(subtype="FLOAT"), RATE), SOUND)


def test_arrays() -> None:
    np.testing.assert_array_equal(read_audio(SOUND.astype(np.float64), RATE), SOUND)
    whole = read_audio(np.array([-32768, 0, 16384], np.int16), RATE)
    assert whole.tolist() == [-1, 0, 0.5]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (b"", "audio: expected a file that libsndfile reads"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio: expected a file that libsndfile reads"),
        (encoded(np.empty(0, np.float32)), "audio: expected samples, got none"),
        (encoded(rate=2000), "audio: expected a rate from 4000 to 384000 Hz and 1 to 64 channels, got 2000 Hz and 1"),
        (encoded(np.zeros((9, 65), np.float32)), "got 16000 Hz and 65"),
        (encoded(np.array([0, np.nan], np.float32), subtype="FLOAT"), "audio: expected finite samples"),
        (encoded(np.zeros(2 * RATE + 1, np.float32)), "audio: expected at most 2 seconds, got more: cut it into parts"),
        (np.zeros(2 * RATE + 1), "audio: expected at most 2 seconds"),
        (np.zeros((2, 2, 2)), r"audio: expected an array \[n\] or \[n, channels\] of floats or int16, got float64"),
        (np.zeros(3, np.int32), "of floats or int16, got int32"),
        (np.zeros((3, 65), np.float32), r"audio: expected \[n, channels\] with 1 to 64 channels, got \[3, 65\]"),
        (np.zeros((2, 99), np.float32), r"got \[2, 99\]: pass its transpose"),
        (7, "audio: expected a path, bytes, a binary file or an array, got int"),
        ({"raw": SOUND}, "got dict: pass its samples as an array, and their rate as sampling_rate"),
        (io.StringIO("RIFF"), 'expected a binary file, got one that was opened as text: open it with "rb"'),
    ],
    # A file has the second in which it was written, and pytest-xdist wants the same names in all processes.
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_refusals(source: object, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        read_audio(source, RATE, max_seconds=2)  # type: ignore[arg-type]


def test_a_header_that_lies() -> None:
    """What it says of the length is not believed."""
    data = bytearray(encoded())
    at = data.index(b"data") + 4
    data[at : at + 4] = (0x7FFFFFFF).to_bytes(4, "little")
    assert len(read_audio(bytes(data), RATE, max_seconds=2)) == len(SOUND)


def test_a_rate_of_a_file() -> None:
    with pytest.raises(InvalidArgumentError, match="audio: source_rate: is for an array; a file says its own rate"):
        read_audio(encoded(), RATE, source_rate=8000)


def test_rates_of_arrays() -> None:
    expected = read_audio(SOUND, RATE, source_rate=8000)
    for rate in (8000.0, np.int64(8000), np.float32(8000)):
        np.testing.assert_array_equal(read_audio(SOUND, RATE, source_rate=rate), expected)  # type: ignore[arg-type]
    for wrong in ("8000", [8000], 0, -1, True, 8000.5, 3999, 400000, float("nan"), float("inf"), np.array([8000])):
        with pytest.raises(
            InvalidArgumentError, match="^audio: sampling_rate: expected a whole number from 4000 to 384000 Hz, got "
        ):
            read_audio(SOUND, RATE, source_rate=wrong)  # type: ignore[arg-type]


def test_no_file(tmp_path: Path) -> None:
    for url in ("https://example.org/a.wav", Path("s3://bucket/a.wav")):
        with pytest.raises(
            InvalidArgumentError, match="audio: expected a file, got the URL .*, which is not fetched: down"
        ):
            read_audio(url, RATE)
    with pytest.raises(FileMissingError, match="audio: there is no file"):
        read_audio(tmp_path / "none.wav", RATE)


def test_without_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(UnsupportedError, match=r"need the package soundfile: pip install 'untorch\[speech\]'"):
        read_audio(b"", RATE)
    assert len(read_audio(SOUND, RATE)) == len(SOUND)
