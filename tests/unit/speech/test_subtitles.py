"""SubRip and WebVTT."""

from __future__ import annotations

from untorch.speech import Segment, to_srt, to_vtt

SEGMENTS = [Segment(" one\n\ntwo ", 0.0, 1.5), Segment("a --> b & <c>", 3599.9996, 7325.25)]


def test_srt() -> None:
    assert to_srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,500\none two\n\n2\n01:00:00,000 --> 02:02:05,250\na -> b & <c>\n\n"
    )
    assert to_srt([]) == ""


def test_vtt() -> None:
    assert to_vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\none two\n\n"
        "01:00:00.000 --> 02:02:05.250\na -&gt; b &amp; &lt;c&gt;\n\n"
    )
