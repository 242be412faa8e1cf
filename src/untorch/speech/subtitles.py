"""Segments as subtitles: SubRip (SRT) and WebVTT."""

from __future__ import annotations

from collections.abc import Sequence

from untorch.speech.outputs import Segment

__all__ = ["to_srt", "to_vtt"]


def to_srt(segments: Sequence[Segment]) -> str:
    """SubRip: numbered cues, "00:00:01,500 --> 00:00:02,000"."""
    return "".join(
        f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_line(one)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def to_vtt(segments: Sequence[Segment]) -> str:
    """WebVTT: cues without numbers, "00:00:01.500 --> 00:00:02.000"."""
    cues = (f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{_escaped(_line(one))}\n\n" for one in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: Segment) -> str:
    """One line, as an empty one ends a cue."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(seconds: float, mark: str) -> str:
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
