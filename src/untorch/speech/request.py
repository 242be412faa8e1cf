"""What a transcription is asked for, beside the audio."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TranscriptionRequest"]


@dataclass(frozen=True)
class TranscriptionRequest:
    """None: as the model decides. task: "transcribe" or "translate". timestamps: segments with times are wanted.

    deadline: of time.monotonic().
    """

    task: str = "transcribe"
    language: str | None = None
    prompt: str | None = None
    temperature: float | None = None
    seed: int | None = None
    deadline: float | None = None
    timestamps: bool = False
