"""Where times cut a window's tokens, and where the next window begins."""

from __future__ import annotations

import pytest

from untorch.speech.seq2seq_segments import Span, Window, split_window

T = 100  # the token of 0 seconds; half a second each


@pytest.mark.parametrize(
    ("tokens", "window"),
    [
        ([], Window([], None)),
        ([1, 2], Window([Span(0, 2, 0.0, 9.0)], None)),
        ([T, 1, 2], Window([Span(0, 3, 0.0, 9.0)], None)),
        ([T + 1, 1, T + 4], Window([Span(0, 3, 0.0, 2.0)], None)),
        # A pair, and a text that the window's end cuts.
        ([T, 1, T + 4, T + 5, 2, 3], Window([Span(0, 3, 0.0, 2.0)], 2.0)),
        ([T, 1, T + 4, T + 4], Window([Span(0, 3, 0.0, 2.0)], 2.0)),
        # A single time at the end: nobody speaks after it.
        ([T, 1, T + 4, T + 5, 2, T + 8], Window([Span(0, 3, 0.0, 2.0), Span(3, 6, 2.5, 4.0)], None)),
        ([T, 1, T + 2, T + 2, 2, T + 8, T + 9], Window([Span(0, 3, 0.0, 1.0), Span(3, 6, 1.0, 4.0)], 4.0)),
    ],
)
def test_split(tokens: list[int], window: Window) -> None:
    assert split_window(tokens, T, 0.5, 9.0) == window
