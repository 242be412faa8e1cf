"""What a package says of its speech model: rate, front end, decoder, vocabulary or prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from untorch.runtime.errors import InvalidFileError, UnsupportedError
from untorch.speech.resample import HIGHEST_RATE, LOWEST_RATE
from untorch.speech.seq2seq_settings import Seq2SeqSettings, read_seq2seq

if TYPE_CHECKING:
    from untorch.runtime.program import Program

__all__ = ["DECODERS", "FORMAT_VERSION", "SpeechSettings", "read_settings"]

FORMAT_VERSION = 1
DECODERS = ("ctc", "causal_lm", "seq2seq")
_MOST_SAMPLES = 1 << 26  # of a call


@dataclass(frozen=True)
class SpeechSettings:
    """Of a package of ``untorch.export.speech_to_text``.

    Attributes:
        decoder: "ctc": logits of frames. "causal_lm": a language model that reads embeddings of the sound.
            "seq2seq": an encoder, and a decoder that attends to it.
        method: Of the package: waveform or features in, logits or embeddings out. Of "seq2seq": the encoder, which
            gives the logits of the first token.
        sampling_rate: In hertz.
        chunk_samples: Samples of a call. For "ctc", the most; for others, audio is padded to a multiple of it.
        languages: The languages that may be asked for, ISO 639-1; empty: "ctc": not known; others: any.
        normalize: The waveform has mean 0 and variance 1.
        n_fft, hop_length, n_mels, mel_filters: Of the log-mel spectrogram; mel_filters names a file of the package:
            float32 [n_fft / 2 + 1, n_mels].
        min_samples, overlap_samples, frame_samples: "ctc": the fewest of a call, those that a call sees of its
            neighbours on each side, those from one frame to the next.
        vocabulary: "ctc": names a file of the package: a JSON list of strings by id.
        blank_id, word_delimiter, lower_case: "ctc": of the vocabulary.
        template: "causal_lm": the prompt: token ids, "audio", and texts in which "{language}" is filled, which are left
            out where no language is given.
        placeholder: "causal_lm": the token in whose place there are embeddings.
        seq2seq: Of "seq2seq": the decoder and its tokens.
    """

    decoder: str
    method: str
    sampling_rate: int
    chunk_samples: int
    architecture: str = ""
    languages: tuple[str, ...] = ()
    normalize: bool = False
    n_fft: int = 0
    hop_length: int = 0
    n_mels: int = 0
    mel_filters: str = ""
    min_samples: int = 1
    overlap_samples: int = 0
    frame_samples: int = 0
    vocabulary: str = ""
    blank_id: int = 0
    word_delimiter: str = "|"
    lower_case: bool = False
    template: tuple[int | str, ...] = ()
    placeholder: int = 0
    seq2seq: Seq2SeqSettings | None = None

    @property
    def window_frames(self) -> int:
        """Of the spectrogram of chunk_samples."""
        return self.chunk_samples // self.hop_length

    def read_filters(self, program: Program) -> NDArray[np.float32]:
        """The mel filters [n_fft / 2 + 1, n_mels]. Raises InvalidFileError."""
        data, bins = program._program.entry(self.mel_filters), self.n_fft // 2 + 1
        if len(data) != bins * self.n_mels * 4:
            raise InvalidFileError(
                f"{program.path}: {self.mel_filters}: expected {bins} × {self.n_mels} float32, got {len(data)} bytes"
            )
        return np.frombuffer(data, np.float32).reshape(bins, self.n_mels)

    def to_json(self) -> dict[str, Any]:
        """The manifest's member "speech"."""
        return {
            "format_version": FORMAT_VERSION,
            **vars(self),
            "languages": [*self.languages],
            "template": [*self.template],
            "seq2seq": None if self.seq2seq is None else self.seq2seq.to_json(),
        }


def read_settings(manifest: Mapping[str, Any], path: str) -> SpeechSettings:
    """Of a program's manifest. Raises InvalidFileError; UnsupportedError for a newer format."""
    section = manifest.get("speech")
    if not isinstance(section, Mapping):
        raise InvalidFileError(
            f"{path} holds no speech model: packages that transcribe are made by untorch.export.speech_to_text"
        )
    version = section.get("format_version")
    if version != FORMAT_VERSION or section.get("decoder") not in DECODERS:
        raise UnsupportedError(
            f"{path}: its speech model has format {version!r} and decoder {section.get('decoder')!r}, this untorch "
            f"reads {FORMAT_VERSION} with {', '.join(DECODERS)}: export it again, or upgrade untorch"
        )
    try:
        settings = SpeechSettings(
            decoder=str(section["decoder"]),
            method=str(section["method"]),
            sampling_rate=int(section["sampling_rate"]),
            chunk_samples=int(section["chunk_samples"]),
            architecture=str(section["architecture"]),
            languages=tuple(str(one) for one in section["languages"]),
            normalize=bool(section["normalize"]),
            n_fft=int(section["n_fft"]),
            hop_length=int(section["hop_length"]),
            n_mels=int(section["n_mels"]),
            mel_filters=str(section["mel_filters"]),
            min_samples=int(section["min_samples"]),
            overlap_samples=int(section["overlap_samples"]),
            frame_samples=int(section["frame_samples"]),
            vocabulary=str(section["vocabulary"]),
            blank_id=int(section["blank_id"]),
            word_delimiter=str(section["word_delimiter"]),
            lower_case=bool(section["lower_case"]),
            template=tuple(item if isinstance(item, str) else int(item) for item in section["template"]),
            placeholder=int(section["placeholder"]),
            seq2seq=read_seq2seq(section["seq2seq"]) if section["decoder"] == "seq2seq" else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidFileError(f"{path}: the manifest's speech model is damaged: {error!r}") from None
    problem = _problem(settings)
    if problem is not None:
        raise InvalidFileError(f"{path}: the manifest's speech model is damaged: {problem}")
    return settings


def _problem(settings: SpeechSettings) -> str | None:
    if not LOWEST_RATE <= settings.sampling_rate <= HIGHEST_RATE:
        return f"sampling_rate: {settings.sampling_rate}"
    if not 1 <= settings.chunk_samples <= _MOST_SAMPLES:
        return f"chunk_samples: {settings.chunk_samples}"
    if settings.decoder == "ctc":
        frame, overlap = settings.frame_samples, settings.overlap_samples
        if frame < 1 or overlap < 0 or overlap % frame or settings.chunk_samples % frame:
            return f"frame_samples: {frame}, overlap_samples: {overlap}"
        if not 1 <= settings.min_samples <= settings.chunk_samples or 2 * overlap >= settings.chunk_samples:
            return f"min_samples: {settings.min_samples}, overlap_samples: {overlap}"
        return None
    if not 2 <= settings.n_fft <= 1 << 16 or settings.n_fft % 2 or not 1 <= settings.hop_length <= settings.n_fft:
        return f"n_fft: {settings.n_fft}, hop_length: {settings.hop_length}"
    if not 1 <= settings.n_mels <= 4096 or settings.chunk_samples % settings.hop_length:
        return f"n_mels: {settings.n_mels}, chunk_samples: {settings.chunk_samples}"
    own = settings.seq2seq
    if own is not None and own.languages and not set(settings.languages) <= own.languages.keys():
        return f"languages: {settings.languages}"
    if settings.chunk_samples <= settings.n_fft // 2:
        return f"chunk_samples: {settings.chunk_samples}"
    if settings.decoder == "causal_lm" and settings.template.count("audio") != 1:
        return 'template: expected one "audio"'
    return None
