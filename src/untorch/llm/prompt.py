"""What a request asks about: token ids, images, and embeddings in the place of some tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["Embeddings", "Prompt", "check_tokens", "is_prompt", "read_embeddings"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """Text or token ids with images, or with embeddings of the caller: what an image's or a sound's encoder gives.

    Attributes:
        tokens: Of the whole prompt. Where there are embeddings, any ids, such as the model's placeholder. With images,
            text or token ids with one placeholder for each image, such as ``<|image_pad|>``.
        embeddings: Arrays [k, hidden] by the position of their first row; they take the place of k tokens.
        positions: Of the tokens, [3, T] integers, for a model with multimodal rotary positions (M-RoPE). None: those of
            a text. The tokens that follow go on behind the largest one.
        images: For a package with an image encoder, in the order of their placeholders: paths, the bytes of files,
            Pillow images or arrays [height, width, 3] of uint8.
    """

    tokens: str | Sequence[int]
    embeddings: Mapping[int, Any] = field(default_factory=dict)
    positions: Any = None
    images: Sequence[Any] = ()

    @classmethod
    def expand(cls, tokens: Sequence[int], placeholder: int, arrays: Sequence[Any]) -> Prompt:
        """A prompt in which each ``placeholder`` is replaced by as many as the next array has rows.

        Raises InvalidArgumentError if there are more or fewer placeholders than arrays.
        """
        found = sum(token == placeholder for token in tokens)
        if found != len(arrays):
            raise InvalidArgumentError(
                f"Prompt.expand: arrays: expected {found}, one for each token {placeholder}, got {len(arrays)}"
            )
        rest = iter(arrays)
        ids: list[int] = []
        embeddings: dict[int, Any] = {}
        for token in tokens:
            if token == placeholder:
                array = next(rest)
                embeddings[len(ids)] = array
                ids += [int(token)] * len(array)
            else:
                ids.append(int(token))
        return cls(ids, embeddings)


class Embeddings:
    """The embeddings of a prompt, float32, by position: they do not overlap. keys: as BlockManager.open takes them.

    positions: Of the prompt's tokens, [rows, T] int64; None: those of a text.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, NDArray[np.float32]]],
        block_size: int,
        positions: NDArray[np.int64] | None = None,
    ) -> None:
        self._spans, self._positions = list(spans), positions
        self._shift = 0 if positions is None else int(positions.max()) + 1 - positions.shape[1]
        self.keys = _keys(self._spans, block_size)
        if positions is not None:
            for block, key in _position_keys(positions, self._shift, block_size).items():
                self.keys[block] = self.keys.get(block, b"") + key

    def within(self, start: int, end: int) -> bool:
        """Whether any of these positions has one."""
        return any(begin < end and start < begin + len(rows) for begin, rows in self._spans)

    def fill(self, start: int, rows: NDArray[np.float32], mask: NDArray[np.bool_]) -> None:
        """Writes those of the positions from ``start`` on, as many as there are rows, and sets their mask."""
        end = start + len(rows)
        for begin, span in self._spans:
            first, last = max(start, begin), min(end, begin + len(span))
            if first < last:
                rows[first - start : last - start] = span[first - begin : last - begin]
                mask[first - start : last - start] = True

    def place(self, start: int, positions: NDArray[np.int64]) -> None:
        """Turns [rows, n], the tokens' places in the sequence from ``start`` on, into their positions."""
        if self._positions is None:
            return
        known = self._positions[:, start : start + positions.shape[1]]
        positions[:, : known.shape[1]] = known
        positions[:, known.shape[1] :] += self._shift


def _position_keys(positions: NDArray[np.int64], shift: int, size: int) -> dict[int, bytes]:
    """As ``_keys``: where the distance of positions to a text's changes. What goes on as before needs no key."""
    rows, length = positions.shape
    distances = np.empty((rows, length + 2), np.int64)
    distances[:, 0], distances[:, -1] = 0, shift
    distances[:, 1:-1] = positions - np.arange(length)
    keys: dict[int, bytes] = {}
    for place in np.flatnonzero((distances[:, 1:] != distances[:, :-1]).any(0)).tolist():
        key = (place % size).to_bytes(4, "little") + distances[:, place + 1].tobytes()
        keys[place // size] = keys.get(place // size, b"") + key
    return keys


def _keys(spans: Sequence[tuple[int, NDArray[np.float32]]], size: int) -> dict[int, bytes]:
    """What the contents of blocks depend on beside token ids, by the number of the block."""
    keys: dict[int, bytes] = {}
    for begin, rows in spans:
        for block in range(begin // size, (begin + len(rows) - 1) // size + 1):
            first, last = max(block * size, begin), min((block + 1) * size, begin + len(rows))
            digest = hashlib.blake2b(rows[first - begin : last - begin].tobytes(), digest_size=16).digest()
            keys[block] = keys.get(block, b"") + (first % size).to_bytes(4, "little") + digest
    return keys


def read_embeddings(
    given: Any, length: int, hidden: int, block_size: int, positions: Any = None, position_rows: int = 1
) -> Embeddings | None:
    """Those of a Prompt with that many tokens; None: there are none. Raises InvalidArgumentError."""
    places = _read_positions(positions, length, position_rows)
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"prompt: embeddings: expected a dictionary of arrays by position, got {type(given).__name__}"
        )
    if not given:
        return None if places is None else Embeddings([], block_size, places)
    if not hidden:
        raise InvalidArgumentError(
            "prompt: embeddings: the package takes token ids alone: export it with causal_lm(…, inputs_embeds=True)"
        )
    for position in given:
        if not hasattr(position, "__index__") or isinstance(position, bool):
            raise ArgumentTypeError(f"prompt: embeddings: expected positions as integers, got {position!r}")
    spans: list[tuple[int, NDArray[np.float32]]] = []
    end = 0
    for position in sorted(given):
        rows = _rows(given[position], position, hidden)
        if not 0 <= position <= length - len(rows):
            raise InvalidArgumentError(
                f"prompt: embeddings at {position}: expected {len(rows)} positions within the prompt's {length} tokens"
            )
        if spans and position < end:
            raise InvalidArgumentError(
                f"prompt: embeddings at {position}: those at {spans[-1][0]} reach to position {end - 1}"
            )
        end = position + len(rows)
        spans.append((int(position), rows))
    return Embeddings(spans, block_size, places)


def _read_positions(given: Any, length: int, rows: int) -> NDArray[np.int64] | None:
    if given is None:
        return None
    if rows == 1:
        raise InvalidArgumentError("prompt: positions: expected None, as the model's are those of the tokens")
    array = np.asarray(given)
    if array.dtype.kind not in "iu" or array.shape != (rows, length) or array.min() < 0:
        raise InvalidArgumentError(
            f"prompt: positions: expected integers [{rows}, {length}] from 0 on, got {array.dtype} {list(array.shape)}"
        )
    return array.astype(np.int64)


def _rows(given: Any, position: int, hidden: int) -> NDArray[np.float32]:
    try:
        array = np.asarray(given)
        is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    except Exception as error:  # whatever the object's own conversion raises
        raise ArgumentTypeError(f"prompt: embeddings at {position}: they are no array: {error}") from None
    if not is_float or array.ndim != 2 or array.shape[1] != hidden or not len(array):
        raise InvalidArgumentError(
            f"prompt: embeddings at {position}: expected an array of floats [k, {hidden}], got {array.dtype} "
            f"{list(array.shape)}"
        )
    # A copy: the caller may write to its array, and a preempted sequence is computed again.
    return np.array(array, np.float32, order="C")


def is_prompt(value: Any) -> bool:
    """Text, a Prompt, or ids: lists, tuples and arrays of integers."""
    if isinstance(value, str | Prompt):
        return True
    if hasattr(value, "dtype"):  # of another library's arrays a dtype has no kind
        try:
            array = np.asarray(value)
        except Exception:  # whatever the object's own conversion raises: it lies on a GPU, say
            return False
        return array.ndim == 1 and array.dtype.kind in "iu"
    if not isinstance(value, Sequence):
        return False
    kinds = set(map(type, value))  # few of them: a prompt may have a hundred thousand tokens
    return bool not in kinds and all(hasattr(kind, "__index__") for kind in kinds)


def check_tokens(prompt: Any, vocabulary: int) -> list[int]:
    """A prompt's token ids. Raises InvalidArgumentError."""
    ids = list(map(int, prompt))
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        at = next(at for at, token in enumerate(ids) if not 0 <= token < vocabulary)
        raise InvalidArgumentError(f"prompt: token {at}: expected an id from 0 to {vocabulary - 1}, got {ids[at]}")
    return ids
