"""Prompts with embeddings: how they are read, what they add to blocks' contents, and the engine on them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.unit.llm.fake import VOCABULARY, FakeRunner, next_logits
from untorch import ArgumentTypeError, InvalidArgumentError
from untorch.llm import Engine, Prompt, SamplingParams
from untorch.llm.logits import Logits
from untorch.llm.paged_model import plan_embeddings
from untorch.llm.prompt import Embeddings, is_prompt, read_embeddings
from untorch.llm.scheduler import Plan, Scheduled
from untorch.llm.sequence import Sequence as TokenSequence

GREEDY = SamplingParams(temperature=0, max_tokens=10)
HIDDEN = 3


def image(seed: int, rows: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, HIDDEN)).astype(np.float32)


def code(row: np.ndarray) -> int:
    """What the fake model's page has of an embedding: no token id."""
    return VOCABULARY + zlib.crc32(row.tobytes())


def codes(prompt: Prompt) -> list[int]:
    found = list(prompt.tokens)
    for begin, rows in prompt.embeddings.items():
        found[begin : begin + len(rows)] = [code(row) for row in rows]
    return found


def greedy(prompt: Prompt, count: int = 10) -> list[int]:
    tokens = codes(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tokens).argmax()))
    return tokens[len(prompt.tokens) :]


class ImageRunner(FakeRunner):
    """Its pages hold codes of embeddings in the place of tokens."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"hidden": HIDDEN, "embeds": ((16, "step_16_embeds"),), **given})
        self.masks: list[int] = []

    def run(self, plan: Plan, rows: Sequence[int], *rest: Any) -> Logits:
        found = plan_embeddings(plan, HIDDEN)
        self.masks.append(0 if found is None else int(found[1].sum()))
        before = [(item.sequence, item.sequence.tokens) for item in plan.items]
        if found is not None:
            begin = 0
            for item in plan.items:
                tokens = list(item.sequence.tokens)
                for at in range(item.count):
                    if found[1][begin + at]:
                        tokens[item.start + at] = code(found[0][begin + at])
                item.sequence.tokens = tokens
                begin += item.count
        try:
            return super().run(plan, rows, *rest)
        finally:
            for sequence, tokens in before:
                sequence.tokens = tokens


def engine(runner: FakeRunner, **options: Any) -> Engine:
    return Engine(runner, **{"max_batch_tokens": 8, "max_sequences": 4, "text": False, **options})


def prompts() -> list[Prompt]:
    """Equal tokens, other images; text alone; an image at the beginning, two images side by side."""
    tokens = [5, 6, 7, *[1] * 6, 8, 9]
    return [
        Prompt(tokens, {3: image(0)}), Prompt(tokens, {3: image(1)}), Prompt(tokens), Prompt([1] * 6, {0: image(0)}),
        Prompt([1] * 12 + [4], {6: image(1), 0: image(0)}),
    ]  # fmt: skip


@pytest.mark.parametrize("blocks", [64, 9])
def test_embeddings_in_prompts(blocks: int) -> None:
    runner = ImageRunner(blocks=blocks)
    with engine(runner) as made:
        for _ in range(2):
            assert [r.token_ids for r in made.generate(prompts(), GREEDY)] == [greedy(p) for p in prompts()]
        assert (made.stats().preemptions > 0) == (blocks == 9)
        assert made.stats().blocks_free == blocks
    assert 0 in runner.masks  # steps that decode need no embeddings
    assert max(runner.masks) > 0


def test_equal_placeholders_do_not_share_pages() -> None:
    first, second, text = prompts()[:3]
    with engine(ImageRunner()) as made:
        assert made.generate(first, GREEDY).usage.cached_tokens == 0
        assert made.generate(second, GREEDY).usage.cached_tokens == 0
        assert made.generate(text, GREEDY).usage.cached_tokens == 0
        again = made.generate(Prompt([*first.tokens, 3], first.embeddings), GREEDY)
        assert again.usage.cached_tokens == 8
        assert again.token_ids == greedy(Prompt([*first.tokens, 3], first.embeddings))
    # What lies before the image is shared.
    long = [2] * 9
    with engine(ImageRunner()) as made:
        made.generate(Prompt([*long, *[1] * 6], {9: image(0)}), GREEDY)
        other = Prompt([*long, *[1] * 6], {9: image(1)})
        found = made.generate(other, GREEDY)
        assert found.usage.cached_tokens == 8
        assert found.token_ids == greedy(other)


def test_samples_share_the_image() -> None:
    prompt = prompts()[0]
    with engine(ImageRunner(blocks=12)) as made:
        params = SamplingParams(n=4, temperature=0, max_tokens=10)
        assert [one.token_ids for one in made.generate(prompt, params).completions] == [greedy(prompt)] * 4
        assert made.stats().blocks_free == 12


def test_the_callers_array_may_change() -> None:
    prompt, rows = prompts()[0], image(0)
    runner = ImageRunner()
    with engine(runner) as made:
        runner.gate.clear()
        handle = made.submit(Prompt(prompt.tokens, {3: rows}), GREEDY)
        rows[:] = 0
        runner.gate.set()
        assert handle.result(5).token_ids == greedy(prompt)


def test_a_package_without_embeddings() -> None:
    with engine(FakeRunner()) as made:
        assert made.generate(Prompt([1, 2, 3]), GREEDY).finish_reason == "length"
        with pytest.raises(InvalidArgumentError) as caught:
            made.submit(prompts()[0], GREEDY)
    assert str(caught.value) == (
        "prompt: embeddings: the package takes token ids alone: export it with causal_lm(…, inputs_embeds=True)"
    )


def test_expand() -> None:
    arrays = [image(0, 2), image(1, 3)]
    prompt = Prompt.expand(np.array([7, 1, 8, 1]), 1, arrays)  # type: ignore[arg-type]
    assert prompt.tokens == [7, 1, 1, 8, 1, 1, 1]
    assert list(prompt.embeddings) == [1, 4]
    assert prompt.embeddings[1] is arrays[0]
    with pytest.raises(InvalidArgumentError) as caught:
        Prompt.expand([7, 1, 8], 1, arrays)
    assert str(caught.value) == "Prompt.expand: arrays: expected 1, one for each token 1, got 2"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([image(0)], ArgumentTypeError, "prompt: embeddings: expected a dictionary of arrays by position, got list"),
        ({"a": image(0)}, ArgumentTypeError, "prompt: embeddings: expected positions as integers, got 'a'"),
        ({0: [[1, 2, 3]]}, InvalidArgumentError, "prompt: embeddings at 0: expected an array of floats [k, 3], got "
                                                 "int64 [1, 3]"),
        ({0: image(0)[0]}, InvalidArgumentError, "prompt: embeddings at 0: expected an array of floats [k, 3], got "
                                                 "float32 [3]"),
        ({0: image(0)[:, :2]}, InvalidArgumentError, "prompt: embeddings at 0: expected an array of floats [k, 3], got "
                                                     "float32 [6, 2]"),
        ({0: image(0)[:0]}, InvalidArgumentError, "prompt: embeddings at 0: expected an array of floats [k, 3], got "
                                                  "float32 [0, 3]"),
        ({5: image(0)}, InvalidArgumentError, "prompt: embeddings at 5: expected 6 positions within the prompt's 10 "
                                              "tokens"),
        ({-1: image(0)}, InvalidArgumentError, "prompt: embeddings at -1: expected 6 positions within the prompt's 10 "
                                               "tokens"),
        ({0: image(0), 4: image(1)}, InvalidArgumentError, "prompt: embeddings at 4: those at 0 reach to position 5"),
    ],
)  # fmt: skip
def test_wrong_embeddings(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        read_embeddings(given, 10, HIDDEN, 4)
    assert str(caught.value) == text


def test_arrays_of_other_kinds() -> None:
    for array in (image(0).astype(np.float64), image(0).tolist(), np.asfortranarray(image(0))):
        found = read_embeddings({2: array}, 10, HIDDEN, 4)
        assert found is not None
        rows, mask = np.zeros((10, HIDDEN), np.float32), np.zeros(10, np.bool_)
        found.fill(0, rows, mask)
        np.testing.assert_array_equal(rows[2:8], image(0))
        assert mask.tolist() == [False] * 2 + [True] * 6 + [False] * 2
    assert read_embeddings({}, 10, 0, 4) is None


class Array:
    """Of another library: its dtype has no kind, and its values may lie where NumPy cannot read them."""

    dtype = object()

    def __init__(self, values: np.ndarray | None) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.values is None:
            raise TypeError("on a GPU")
        return self.values

    def __iter__(self) -> Iterator[Any]:
        assert self.values is not None
        return iter(self.values)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", True),
        ([5, np.int64(6)], True),
        (range(3), True),
        ([], True),
        (np.array([5, 6], np.uint8), True),
        (Array(np.array([5, 6])), True),
        ([5, True], False),
        ([5.0], False),
        ({5, 6}, False),
        (np.array([5.0]), False),
        (Array(np.zeros((2, 2), np.int64)), False),
        (Array(None), False),
    ],
)
def test_what_is_a_prompt(given: Any, expected: bool) -> None:
    assert is_prompt(given) == expected


def test_ids_in_an_array_of_another_library() -> None:
    with Engine(FakeRunner()) as engine:
        want = engine.generate([5, 6, 7], GREEDY)
        assert engine.generate(Array(np.array([5, 6, 7])), GREEDY) == want  # type: ignore[call-overload]


def test_keys_of_blocks() -> None:
    keys = Embeddings([(2, image(0))], 4).keys
    assert list(keys) == [0, 1]
    assert keys != Embeddings([(2, image(1))], 4).keys
    assert keys[0] != Embeddings([(1, image(0))], 4).keys[0]  # the same rows in another place
    # Only the rows within the block count.
    changed = image(0)
    changed[5] += 1
    other = Embeddings([(2, changed)], 4).keys
    assert other[0] == keys[0]
    assert other[1] != keys[1]
    # Two arrays side by side are not one.
    assert Embeddings([(0, image(0, 2)), (2, image(1, 2))], 4).keys[0] != Embeddings([(0, image(0, 2))], 4).keys[0]


def test_embeddings_of_a_step() -> None:
    embedded = TokenSequence([1] * 10, embeddings=Embeddings([(2, image(0))], 4))
    plain = TokenSequence([1] * 10)
    plan = Plan()
    plan.add(Scheduled(plain, 0, 2))
    plan.add(Scheduled(embedded, 8, 2))
    assert plan_embeddings(plan, HIDDEN) is None
    plan.add(Scheduled(embedded, 1, 4))
    found = plan_embeddings(plan, HIDDEN)
    assert found is not None
    rows, mask = found
    assert mask.tolist() == [False] * 5 + [True] * 3
    np.testing.assert_array_equal(rows[5:], image(0)[:3])
    assert not rows[:5].any()


POSITIONS = np.array([[0, 1, 1, 1, 3, 4], [0, 1, 1, 2, 3, 4], [0, 1, 2, 1, 3, 4]])


def test_positions_go_on_behind_the_largest() -> None:
    made = read_embeddings({}, 6, HIDDEN, 4, POSITIONS, 3)
    assert made is not None
    for start in range(8):
        places = np.repeat(np.arange(start, 9)[None], 3, axis=0)
        made.place(start, places)
        expected = np.concatenate([POSITIONS, np.repeat([[5, 6, 7]], 3, axis=0)], axis=1)[:, start:]
        assert places.tolist() == expected.tolist()


def test_positions_of_a_text_change_no_block() -> None:
    text = read_embeddings({}, 6, HIDDEN, 4, np.repeat(np.arange(6)[None], 3, axis=0), 3)
    assert text is not None
    assert text.keys == {}
    assert read_embeddings({}, 6, HIDDEN, 4, None, 3) is None


def test_positions_are_part_of_a_blocks_content() -> None:
    """Only where the distance to a text's changes: a longer prompt that goes on in the same way finds the blocks."""

    def keys(positions: np.ndarray) -> dict[int, bytes]:
        made = read_embeddings({}, positions.shape[1], HIDDEN, 4, positions, 3)
        assert made is not None
        return made.keys

    short = keys(POSITIONS)
    assert sorted(short) == [0, 1]
    longer = np.concatenate([POSITIONS, np.repeat([[5, 6, 7, 8, 9]], 3, axis=0)], axis=1)
    assert keys(longer) == short
    assert keys(POSITIONS[::-1]) != short
    # What follows an image at the end counts as well.
    assert sorted(keys(POSITIONS[:, :4])) == [0, 1]


def test_wrong_positions() -> None:
    for positions, rows, text in (
        (POSITIONS, 1, "prompt: positions: expected None, as the model's are those of the tokens"),
        (POSITIONS[0], 3, "prompt: positions: expected integers [3, 6] from 0 on, got int64 [6]"),
        (POSITIONS - 1, 3, "prompt: positions: expected integers [3, 6] from 0 on, got int64 [3, 6]"),
        (POSITIONS * 1.0, 3, "prompt: positions: expected integers [3, 6] from 0 on, got float64 [3, 6]"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            read_embeddings({}, 6, HIDDEN, 4, positions, rows)
        assert str(caught.value) == text


def test_images_need_an_encoder() -> None:
    with engine(ImageRunner(blocks=8)) as made:
        assert not made.takes_images
        with pytest.raises(InvalidArgumentError) as caught:
            made.generate(Prompt([1, 2], images=["photo.jpg"]), GREEDY)
    assert str(caught.value) == (
        "prompt: images: the package has no image encoder: export it with causal_lm(…, images=True)"
    )  # fmt: skip
