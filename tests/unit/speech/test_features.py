"""Features against transformers' feature extractors."""

from __future__ import annotations

import numpy as np
import pytest

from tests.speech_models import speech
from untorch.speech import LogMel, normalize

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(("mels", "seconds"), [(80, 3.0), (128, 1.0), (128, 0.5)])
def test_log_mel(mels: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels)
    sound = speech(seconds)
    wanted = extractor(sound, sampling_rate=16000, padding=True, truncation=False, return_tensors="np").input_features[
        0
    ]
    log_mel = LogMel(extractor.mel_filters, extractor.n_fft, extractor.hop_length)
    found = log_mel(sound)
    assert found.shape == wanted.shape
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    monkeypatch.setattr("untorch.speech.features._FRAMES", 7)
    np.testing.assert_allclose(log_mel(sound), found, atol=1e-6)


def test_silence() -> None:
    extractor = transformers.WhisperFeatureExtractor()
    found = LogMel(extractor.mel_filters)(np.zeros(1600, np.float32))
    np.testing.assert_allclose(found, -1.5, rtol=1e-6)


def test_normalize() -> None:
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    for sound in (speech(1.0) * 3 + 1, np.zeros(500, np.float32)):
        wanted = extractor(sound, sampling_rate=16000, return_tensors="np").input_values[0]
        np.testing.assert_allclose(normalize(sound), wanted, atol=1e-5)
