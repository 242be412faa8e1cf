"""What a package says of its language model, and sizes of memory."""

from __future__ import annotations

from typing import Any

import pytest

from untorch import InvalidArgumentError, InvalidFileError, UnsupportedError
from untorch.llm.blocks import BlockGroup
from untorch.llm.runner import _block_count, _snapshot_count, kv_bytes
from untorch.llm.settings import KV_ITEMSIZE, read_settings
from untorch.runtime.arrays import zeros

LAYER = {"heads_kv": 2, "width": 8, "width_v": 8, "window": 0, "chunk": 0, "offset": 0}
SECTION: dict[str, Any] = {
    "format_version": 1, "architecture": "LlamaForCausalLM", "vocabulary": 10, "logits": 10, "max_positions": 64,
    "bos_id": None, "stop_ids": [2], "generation": {}, "special_tokens": {}, "block_size": 16, "block_elements": 512,
    "dtype": "float32", "layers": [LAYER], "methods": [{"name": "b", "tokens": 99}, {"name": "a", "tokens": 16}],
}  # fmt: skip


def test_settings() -> None:
    settings = read_settings({"llm": SECTION}, "m.pt2")
    assert settings.methods == ((16, "a"), (99, "b"))
    assert settings.window == 0
    assert settings.stop_ids == (2,)
    assert settings.state_elements == 0  # packages from before there were states say nothing of them
    assert read_settings({"llm": {**SECTION, "state_elements": 48}}, "m.pt2").state_elements == 48


def test_other_tasks() -> None:
    settings = read_settings({"llm": SECTION}, "m.pt2")
    assert (settings.task, settings.embeds, settings.labels) == ("generate", (), ())
    more = {
        "task": "classify", "width": 2, "labels": ["no", "yes"], "prompts": {"query": "Q: "},
        "embeds": [{"name": "e", "tokens": 9}], "hidden": 7,
    }  # fmt: skip
    settings = read_settings({"llm": {**SECTION, **more}}, "m.pt2")
    assert (settings.task, settings.width, settings.labels) == ("classify", 2, ("no", "yes"))
    assert (settings.embeds, settings.hidden, settings.prompts) == (((9, "e"),), 7, {"query": "Q: "})
    with pytest.raises(UnsupportedError) as caught:
        read_settings({"llm": {**SECTION, **more, "pooling": "median"}}, "m.pt2")
    assert str(caught.value) == (
        "m.pt2: its task is 'classify' with the pooling 'median', which this untorch does not know: upgrade untorch"
    )


LORA: dict[str, Any] = {
    "dtype": "bfloat16", "rows": 7, "methods": [{"name": "a_lora", "tokens": 16}],
    "layers": [{"name": "l.q", "inputs": 2, "outputs": 1, "offset": 0}, {"name": "l.o", "inputs": 1, "outputs": 3, "offset": 3}],
}  # fmt: skip


def test_adapters() -> None:
    assert read_settings({"llm": SECTION}, "m.pt2").lora is None
    lora = read_settings({"llm": {**SECTION, "lora": LORA}}, "m.pt2").lora
    assert lora is not None
    assert (lora.dtype, lora.rows, lora.methods) == ("bfloat16", 7, ((16, "a_lora"),))
    assert [(layer.name, layer.offset) for layer in lora.layers] == [("l.q", 0), ("l.o", 3)]
    for wrong in (
        {"rows": 8}, {"dtype": "int8"}, {"methods": []}, {"layers": []}, {"layers": LORA["layers"][1:]},
        {"layers": [{**LORA["layers"][0], "inputs": 0}, LORA["layers"][1]]}, {"rows": "x"}, {"layers": 3}, {"layers": [{}]},
    ):  # fmt: skip
        with pytest.raises(InvalidFileError, match="is damaged|are damaged"):
            read_settings({"llm": {**SECTION, "lora": {**LORA, **wrong}}}, "m.pt2")
    embeds = {"embeds": [{"name": "e", "tokens": 9}], "hidden": 7}
    with pytest.raises(InvalidFileError, match="adapters are damaged: .* or it takes embeddings, too"):
        read_settings({"llm": {**SECTION, **embeds, "lora": LORA}}, "m.pt2")


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("int8", 1), ("float8_e4m3fn", 1)])
def test_dtypes_of_pages(dtype: str, size: int) -> None:
    assert read_settings({"llm": {**SECTION, "dtype": dtype}}, "m.pt2").dtype == dtype
    assert KV_ITEMSIZE[dtype] == size
    assert zeros((2, 16), dtype).dtype == dtype  # as the runner makes the pool


@pytest.mark.parametrize(
    ("layers", "window"),
    [([{"window": 8}, {"window": 20}], 20), ([{"window": 8}, {}], 0), ([{"window": 8}, {"window": 8, "chunk": 4}], 0)],
)
def test_a_window_of_all_layers(layers: list[dict[str, int]], window: int) -> None:
    section = {**SECTION, "layers": [{**LAYER, **layer} for layer in layers]}
    assert read_settings({"llm": section}, "m.pt2").window == window


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1, "temperature": 1.0}),
    ],
)
def test_default_params(generation: dict[str, Any], expected: dict[str, Any]) -> None:
    params = read_settings({"llm": {**SECTION, "generation": generation}}, "m.pt2").default_params()
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.max_tokens is None


def test_no_language_model() -> None:
    with pytest.raises(InvalidFileError) as caught:
        read_settings({}, "m.pt2")
    assert str(caught.value) == (
        "m.pt2 holds no language model: packages for the engine are made by untorch.export.causal_lm"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"task": "embed"}, {"embeds": [{"name": "e", "tokens": 9}]}, {"embeds": [3]}, {"prompts": 3}, {"labels": 3},
        {"width": "wide"},
    ],
)  # fmt: skip
def test_damaged_settings_of_other_tasks(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidFileError, match="the manifest's language model is damaged"):
        read_settings({"llm": {**SECTION, **change}}, "m.pt2")


def test_a_newer_format() -> None:
    with pytest.raises(UnsupportedError, match="its language model has format 3, this untorch reads 1 and 2"):
        read_settings({"llm": {**SECTION, "format_version": 3}}, "m.pt2")


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0}, {"vocabulary": "many"}, {"layers": None}, {"methods": []}, {"dtype": "int16"},
        {"stop_ids": 3}, {"generation": 3}, {"layers": [{}]}, {"special_tokens": []},
        {"state_elements": -1}, {"state_elements": None},
    ],
)  # fmt: skip
def test_damaged_settings(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidFileError, match="the manifest's language model is damaged"):
        read_settings({"llm": {**SECTION, **change}}, "m.pt2")


@pytest.mark.parametrize(
    ("given", "expected"), [(5, 5), ("7", 7), ("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("3kb", 3000)]
)
def test_bytes(given: Any, expected: int) -> None:
    assert kv_bytes(given) == expected


def test_blocks_for_what_states_leave() -> None:
    settings = read_settings({"llm": {**SECTION, "state_elements": 100}}, "m.pt2")
    row, states = 512 * 4, 3 * 100 * 4
    assert _block_count(settings, row, states + 5 * row, 3, 8, 0) == 5
    assert _block_count(settings, row, None, 3, 8, states + 2 * row) == 2
    assert _block_count(settings, row, None, 3, 8, 1 << 30) == 3 * 4
    with pytest.raises(InvalidArgumentError) as caught:
        _block_count(settings, row, states + row - 1, 3, 8, 0)
    assert str(caught.value) == (
        "Engine: kv_memory: expected at least 3248 bytes, one block of 16 positions, and 1200 for the states of 3 "
        "sequences, got 3247"
    )
    with pytest.raises(InvalidArgumentError) as caught:
        _block_count(settings, row, None, 3, 8, states + row - 1)
    assert str(caught.value) == (
        "Engine: max_sequences: the states of 3 sequences take 1200 bytes, and 3247 are for states, keys and values: "
        "choose fewer, or say kv_memory"
    )
    plain = read_settings({"llm": SECTION}, "m.pt2")
    assert _block_count(plain, row, None, 3, 8, 0) == 1


def test_rows_for_states_of_known_prefixes() -> None:
    settings, plain = (read_settings({"llm": {**SECTION, "state_elements": n}}, "m.pt2") for n in (100, 0))
    row, each = 512 * 4, 100 * 4
    assert _snapshot_count(plain, row, None, None, 3, 1 << 30) == 0
    for none in (0, "0"):
        assert _snapshot_count(settings, row, 1 << 30, none, 3, 0) == 0
    assert _snapshot_count(settings, row, None, None, 3, 1 << 30) == 12  # four for each of three sequences
    assert _snapshot_count(settings, row, row + 3 * each + 8 * each, None, 3, 0) == 2  # a quarter of what is left
    assert _snapshot_count(settings, row, row, None, 3, 0) == 0
    assert _snapshot_count(settings, row, 1 << 30, "2000 B", 3, 0) == 5
    with pytest.raises(InvalidArgumentError) as caught:
        _snapshot_count(settings, row, None, 399, 3, 0)
    assert str(caught.value) == (
        "Engine: snapshot_memory: expected 0, or at least 400 bytes, the states of one sequence, got 399"
    )
    with pytest.raises(InvalidArgumentError, match="Engine: snapshot_memory: expected bytes as an integer, or a str"):
        _snapshot_count(settings, row, None, "many", 3, 0)
    assert _block_count(settings, row, 3 * each + 5 * each + 2 * row, 3, 8, 0, 5) == 2
    with pytest.raises(
        InvalidArgumentError, match="1200 for the states of 3 sequences, and 2000 for those of known pre"
    ):
        _block_count(settings, row, row, 3, 8, 0, 5)
    with pytest.raises(
        InvalidArgumentError, match="take 1200 bytes and those of known prefixes 2000, and 3000 are for"
    ):
        _block_count(settings, row, None, 3, 8, 3000, 5)


def test_groups_of_layers() -> None:
    """Format 2 has several block tables; in format 1 a window counts only where all layers have one."""
    layers = [{**LAYER, "window": 20, "group": 1}, {**LAYER, "group": 0}]
    groups = [{"block_size": 48, "window": 0, "chunk": 0}, {"block_size": 16, "window": 20, "chunk": 0}]
    section = {**SECTION, "format_version": 2, "layers": layers, "groups": groups, "max_positions": 1000}
    settings = read_settings({"llm": section}, "m.pt2")
    assert settings.groups == (BlockGroup(48), BlockGroup(16, 20)) and settings.window == 0
    old = {**SECTION, "layers": layers}
    assert read_settings({"llm": old}, "m.pt2").groups == (BlockGroup(16),)
    old["layers"] = [{**LAYER, "window": 20}, {**LAYER, "window": 6}]
    assert read_settings({"llm": old}, "m.pt2").groups == (BlockGroup(16, 20),)
    # Enough for every sequence: the window's group holds what a step of 8 tokens sees.
    assert _block_count(settings, 4, None, 3, 8, 1 << 30) == 3 * (21 + 3)
    assert _block_count(settings, 4, 8, 3, 8, 0) == 2
    with pytest.raises(
        InvalidArgumentError, match="at least 8 bytes, one block of 48 positions and one block of 16 po"
    ):
        _block_count(settings, 4, 7, 3, 8, 0)
    for change in (
        {"groups": []}, {"groups": None}, {"groups": groups[:1]}, {"groups": [{"block_size": 16}]},
        {"groups": [*groups, {"block_size": 40, "window": 0, "chunk": 0}]},
        {"groups": [*groups, {"block_size": 16, "window": -1, "chunk": 0}]},
        {"groups": [*groups, {"block_size": 0, "window": 1, "chunk": 0}]},
    ):  # fmt: skip
        with pytest.raises(InvalidFileError, match="the manifest's language model is damaged"):
            read_settings({"llm": {**section, **change}}, "m.pt2")


@pytest.mark.parametrize("given", [0, -1, "0", "many", "2 XiB", 1.5, True, "1.2.3GiB"])
def test_wrong_bytes(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="Engine: kv_memory: expected bytes as an integer, or a string"):
        kv_bytes(given)
