"""A window's tokens as segments: where Whisper's times cut them, and where the next window begins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Span", "Window", "split_window"]


@dataclass(frozen=True)
class Span:
    """tokens [begin, end) of a window: a segment from ``start`` to ``stop``, seconds from the window's begin."""

    begin: int
    end: int
    start: float
    stop: float


@dataclass(frozen=True)
class Window:
    """advance: seconds from this window's begin to the next one's; None: its whole length."""

    spans: list[Span]
    advance: float | None


def split_window(tokens: Sequence[int], first_time: int, step: float, seconds: float) -> Window:
    """Of tokens without the end's. step: seconds between two times. seconds: of sound in the window.

    Two times in a row end a segment and begin the next. Text behind the last pair is left out, as it is cut by the
    window's end, and the next window begins at the pair's time; unless a single time ends the text: then nobody speaks
    after it.
    """
    is_time = [token >= first_time for token in tokens]
    cuts = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    ends_with_time = is_time[-2:] == [False, True]

    def time(index: int) -> float:
        return (tokens[index] - first_time) * step

    if not cuts:
        times = [i for i, flag in enumerate(is_time) if flag]
        stop = time(times[-1]) if times and tokens[times[-1]] != first_time else seconds
        return Window([Span(0, len(tokens), 0.0, stop)] if tokens else [], None)
    edges = [0, *cuts]
    if ends_with_time:
        edges.append(len(tokens))
    spans = [
        Span(begin, end, time(begin) if is_time[begin] else 0.0, time(end - 1))
        for begin, end in itertools.pairwise(edges)
    ]
    return Window(spans, None if ends_with_time else time(cuts[-1] - 1))
