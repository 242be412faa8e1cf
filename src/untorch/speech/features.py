"""What models read of a waveform: log-mel spectrograms as Whisper has them, and samples of mean 0 and variance 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

__all__ = ["LogMel", "normalize"]

_FRAMES = 4096  # that are transformed at a time
_FLOOR = 1e-10
_RANGE = 8.0  # in powers of ten: what is weaker than the loudest by more is raised to it


class LogMel:
    """The log-mel spectrogram of Whisper's front end, equal to transformers' WhisperFeatureExtractor.

    STFT with a periodic Hann window, reflected at both ends; power; mel filters; log10, no more than 8 below the
    largest value of the whole audio; (x + 4) / 4. The last frame is left out.

    Args:
        mel_filters: [n_fft / 2 + 1, n_mels].
        n_fft: Samples of the window.
        hop_length: Samples between two frames.
    """

    def __init__(self, mel_filters: NDArray[Any], n_fft: int = 400, hop_length: int = 160) -> None:
        self._filters = np.ascontiguousarray(mel_filters, np.float32)
        self.n_fft, self.hop_length = n_fft, hop_length
        self._window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)).astype(np.float32)

    def __call__(self, samples: NDArray[Any]) -> NDArray[np.float32]:
        """Of samples [n], n > n_fft / 2: [n_mels, n / hop_length]."""
        half = self.n_fft // 2
        padded = np.pad(np.asarray(samples, np.float32), half, mode="reflect")
        frames = sliding_window_view(padded, self.n_fft)[:: self.hop_length][:-1]
        found = np.empty((self._filters.shape[1], len(frames)), np.float32)
        for begin in range(0, len(frames), _FRAMES):
            spectrum = np.fft.rfft(frames[begin : begin + _FRAMES] * self._window, axis=1)
            power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
            found[:, begin : begin + _FRAMES] = (power @ self._filters).T
        np.log10(np.maximum(found, _FLOOR, out=found), out=found)
        np.maximum(found, found.max() - _RANGE, out=found)
        found += 4
        found /= 4
        return found


def normalize(samples: NDArray[Any]) -> NDArray[np.float32]:
    """Samples of mean 0 and variance 1, as transformers' Wav2Vec2FeatureExtractor makes them."""
    given = np.asarray(samples, np.float32)
    found: NDArray[np.float32] = (given - given.mean()) / np.sqrt(given.var() + np.float32(1e-7))
    return found.astype(np.float32)
