"""Adapters of PEFT: reading folders, arranging them side by side, and the columns of a plan's tokens."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.lora_adapters import write_adapter
from tests.unit.llm.fake import FakeRunner
from untorch import FileMissingError, InvalidFileError, UnsupportedError
from untorch.llm import Engine, SamplingParams
from untorch.llm.lora import Loras, read_adapter
from untorch.llm.paged_model import plan_loras
from untorch.llm.scheduler import Plan, Scheduled
from untorch.llm.sequence import Sequence
from untorch.llm.settings import LoraLayer, LoraSettings
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

SETTINGS = LoraSettings(
    "float32", 16, (LoraLayer("model.l.q_proj", 4, 3, 0), LoraLayer("model.l.o_proj", 3, 6, 7)), ((16, "step_16_lora"),)
)
Q, OUT = "model.l.q_proj", "model.l.o_proj"


def pair(inputs: int, outputs: int, rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 8 / 5), ({"use_rslora": True}, 8 / 5**0.5), ({"r": 2, "rank_pattern": {"q_proj": 5}}, 8 / 5),
        ({"alpha_pattern": {"^model.l.q_proj": 3}}, 3 / 5), ({"alpha_pattern": {"^q_proj": 3, "o_proj": 9}}, 8 / 5),
        ({"alpha_pattern": {"l.q_proj": 3}, "modules_to_save": None, "target_modules": ["q_proj"]}, 3 / 5),
    ],
)  # fmt: skip
def test_values(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    a, b = pair(4, 3, 5)
    adapter = read_adapter("x", write_adapter(tmp_path, {Q: (a, b)}, **config), SETTINGS)
    assert (adapter.rank, adapter.columns, adapter.values.shape) == (5, 16, (16, 16))
    np.testing.assert_array_equal(adapter.values[:4, :5], a.T)
    np.testing.assert_allclose(adapter.values[4:7, :5], b * scale, rtol=1e-6)
    assert not adapter.values[:, 5:].any() and not adapter.values[7:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    a, b = pair(3, 6, 20)
    adapter = read_adapter("x", write_adapter(tmp_path, {OUT: (a, b)}, dtype=dtype, alpha=20), SETTINGS)
    assert adapter.columns == 32
    np.testing.assert_array_equal(adapter.values[7:10, :20], a.to(dtype).float().T)


def test_the_salt_is_of_the_content(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / str(i), {Q: pair(4, 3, 2, seed)}) for i, seed in enumerate((1, 1, 2))]
    salts = [read_adapter("x", folder, SETTINGS).salt for folder in folders]
    assert salts[0] == salts[1] != salts[2] and len(salts[0]) == 16


CONFIG = "adapter_config.json"


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, f"{CONFIG}: its peft_type is 'IA3', expected 'LORA'"),
        ({"use_dora": True}, UnsupportedError, "use_dora is True, expected False: merge the adapter, and export that"),
        ({"bias": "all"}, UnsupportedError, "bias is 'all', expected 'none'"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save is ['lm_head'], expected None"),
        ({"alpha_pattern": {"(a+)+q": 1}}, UnsupportedError, "expected names of modules, got '(a+)+q'"),
        ({"r": 3}, InvalidFileError, "the rank of model.l.q_proj is 3 there, its weights have 2"),
        ({"r": "x"}, InvalidFileError, f"{CONFIG}: it is no configuration of a LoRA: ValueError"),
        ({"r": 0}, InvalidFileError, "r or lora_alpha is out of range"),
        ({"lora_alpha": None}, InvalidFileError, "it is no configuration of a LoRA: TypeError"),
        ({"lora_alpha": 1e999}, InvalidFileError, "r or lora_alpha is out of range"),
        ({"rank_pattern": [1]}, InvalidFileError, "it is no configuration of a LoRA: AttributeError"),
    ],
)
def test_configurations(config: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: pair(4, 3, 2)}, **config)
    with pytest.raises(error, match=re.escape(text)):
        read_adapter("x", tmp_path, SETTINGS)


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({}, InvalidFileError, "it has no tensors"),
        ({"base_model.model.model.l.q_proj.lora_A.weight": (2, 4)}, InvalidFileError, "has lora_A alone, expected lora_A"),
        ({"base_model.model.lm_head.weight": (2, 4)}, UnsupportedError, "expected the lora_A and lora_B of linear layers"),
        ({"a.lora_embedding_A": (2, 4)}, UnsupportedError, "tensor 'a.lora_embedding_A': expected the lora_A and lora_B"),
        (
            {"base_model.model.model.l.k_proj.lora_A.weight": (2, 4), "base_model.model.model.l.k_proj.lora_B.weight": (3, 2)},
            InvalidFileError,
            "adapts 'model.l.k_proj', and the package takes adapters for 2 layers (o_proj, q_proj), that is none of them",
        ),
        (
            {"base_model.model.model.l.q_proj.lora_A.weight": (2, 5), "base_model.model.model.l.q_proj.lora_B.weight": (3, 2)},
            InvalidFileError,
            "model.l.q_proj: expected A [rank, 4] and B [3, rank], got [2, 5] and [3, 2]: is it an adapter of another model?",
        ),
    ],
)  # fmt: skip
def test_weights(tensors: dict[str, tuple[int, ...]], error: type[Exception], text: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: pair(4, 3, 2)})
    save_file({key: torch.ones(shape) for key, shape in tensors.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(error, match=re.escape(text)):
        read_adapter("x", tmp_path, SETTINGS)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="expected a folder as PEFT's save_pretrained writes it"):
        read_adapter("x", tmp_path, SETTINGS)
    write_adapter(tmp_path, {Q: pair(4, 3, 2)})
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(InvalidFileError, match=r"is no \.safetensors file"):
        read_adapter("x", tmp_path, SETTINGS)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(FileMissingError):
        read_adapter("x", tmp_path, SETTINGS)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(InvalidFileError, match="it is no configuration of a LoRA"):
        read_adapter("x", tmp_path, SETTINGS)
    (tmp_path / CONFIG).write_text(json.dumps([1]))
    with pytest.raises(InvalidFileError, match="it is no configuration of a LoRA"):
        read_adapter("x", tmp_path, SETTINGS)
    with pytest.raises(ArgumentTypeError, match="lora: expected a name and the path of a folder, got 3 and 'x'"):
        read_adapter(3, "x", SETTINGS)
    with pytest.raises(InvalidArgumentError, match="lora: expected a name that is not empty"):
        read_adapter("", "x", SETTINGS)


def test_adapters_side_by_side(tmp_path: Path) -> None:
    loras = Loras(SETTINGS, "cpu")
    assert loras.now.array is None and loras.names == []
    for name, rank in (("a", 2), ("b", 20), ("c", 1)):
        loras.load(name, write_adapter(tmp_path / name, {Q: pair(4, 3, rank)}))
    a, b, c = (loras.get(name) for name in loras.names)
    assert dict(loras.now.columns) == {a: (0, 16), b: (16, 48), c: (48, 64)}
    np.testing.assert_array_equal(loras.now.array[:, 16:48], b.values)
    items = [
        Scheduled(Sequence([1, 2, 3], lora=b), 0, 2),
        Scheduled(Sequence([1]), 0, 1),
        Scheduled(Sequence([1], lora=a), 0, 1),
    ]
    found = plan_loras(Plan(items, tokens=4), loras)
    assert found is not None and found[0] is loras.now.array
    assert found[1].dtype == np.int32 and found[1].tolist() == [[16, 48], [16, 48], [0, 0], [0, 16]]
    assert plan_loras(Plan(items[1:2], tokens=1), loras) is None
    # What a sequence still uses stays, and gets other columns.
    del a, found, items[2]
    loras.unload("a")
    loras.unload("b")
    assert loras.names == ["c"] and loras.now.columns[b] == (16, 48) and loras.now.columns[c] == (0, 16)
    del b, items
    gc.collect()
    loras.load("c", tmp_path / "a")
    assert list(loras.now.columns) == [loras.get("c"), c]
    with pytest.raises(
        InvalidArgumentError, match="expected the name of an adapter that is loaded, got 'b': there are c"
    ):
        loras.get("b")
    with pytest.raises(InvalidArgumentError, match="got 'b': there are c"):
        loras.unload("b")
    loras.unload("c")
    with pytest.raises(InvalidArgumentError, match=r"got 'c': none is loaded: Engine\(…, loras="):
        loras.get("c")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_dtypes(dtype: str, tmp_path: Path) -> None:
    settings = LoraSettings(dtype, 16, SETTINGS.layers, SETTINGS.methods)
    loras = Loras(settings, "cpu")
    loras.load("a", write_adapter(tmp_path, {Q: pair(4, 3, 2)}))
    array = loras.now.array
    assert (array.dtype, array.shape) == (dtype, (16, 16))
    array.convert("float32")
    np.testing.assert_allclose(array.numpy(), loras.get("a").values, rtol=1e-2, atol=1e-2)


class Adapted(FakeRunner):
    """Its logits do not depend on adapters; ``seen`` are the adapters of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.loras = Loras(SETTINGS, "cpu")
        self.seen: list[list[str | None]] = []
        self.hook = lambda plan: self.seen.append(
            [None if item.sequence.lora is None else item.sequence.lora.name for item in plan.items]
        )


GREEDY = SamplingParams(temperature=0, max_tokens=2)


def test_engine(tmp_path: Path) -> None:
    folders = {name: write_adapter(tmp_path / name, {Q: pair(4, 3, 2, seed)}) for seed, name in enumerate("ab")}
    runner, prompt = Adapted(), list(range(1, 20))
    with Engine(runner, loras=folders) as engine:
        assert engine.loras == ["a", "b"]
        results = engine.generate([prompt, prompt, prompt], GREEDY, lora=["a", None, "b"])
        assert all(result.error is None for result in results)
        # In one step or in several: the engine begins with what is there.
        assert {str(name) for step in runner.seen for name in step} == {"None", "a", "b"}
        # Pages of one adapter are not those of another.
        assert [result.usage.cached_tokens for result in results] == [0, 0, 0]
        assert engine.generate(prompt, GREEDY, lora="a").usage.cached_tokens == 16
        engine.load_lora("a", folders["b"])
        assert engine.generate(prompt, GREEDY, lora="a").usage.cached_tokens == 16  # of b, whose values they are
        engine.unload_lora("b")
        with pytest.raises(InvalidArgumentError, match="got 'b': there are a"):
            engine.generate(prompt, GREEDY, lora="b")
        (failed,) = engine.generate([prompt], GREEDY, lora="b")
        assert isinstance(failed.error, InvalidArgumentError)
        with pytest.raises(InvalidArgumentError, match="generate: lora: expected 2, one a prompt, got 1"):
            engine.generate([prompt, prompt], GREEDY, lora=["a"])
        with pytest.raises(InvalidFileError):
            engine.load_lora("c", write_adapter(tmp_path / "c", {"other": pair(4, 3, 2)}))
        assert engine.loras == ["a"]
        several = SamplingParams(temperature=0, max_tokens=2, n=3)
        assert len(engine.generate(prompt, several, lora="a").completions) == 3
        assert runner.seen[-1] == ["a", "a", "a"]


def test_packages_without_adapters(tmp_path: Path) -> None:
    with Engine(FakeRunner()) as engine:
        assert engine.loras == []
        with pytest.raises(
            UnsupportedError, match=r"load_lora: the package takes no adapters: export it with causal_lm"
        ):
            engine.load_lora("a", tmp_path)
        with pytest.raises(UnsupportedError, match="submit: lora: the package takes no adapters"):
            engine.submit([1], GREEDY, lora="a")
    runner = FakeRunner()
    with pytest.raises(UnsupportedError, match="Engine: the package takes no adapters"):
        Engine(runner, loras={"a": tmp_path})
    assert runner.closed
