"""How embedding models pool: arguments, and folders of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from untorch import ArgumentTypeError, InvalidArgumentError, InvalidFileError
from untorch.export import CompileError
from untorch.export.lm.pooled import dense_method, read_pooling

ORDER = ("Transformer", "Pooling", "Dense", "Normalize")


def folder(path: Path, kinds: tuple[str, ...] = ORDER, **files: Any) -> Path:
    kind = "sentence_transformers.models."
    modules = [{"idx": i, "path": "" if not i else f"{i}_{name}", "type": kind + name} for i, name in enumerate(kinds)]
    for i, name in enumerate(kinds):
        (path / f"{i}_{name}").mkdir()
    given = {
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
        "2_Dense/config.json": {
            "in_features": 4, "out_features": 3, "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
        **{name.replace("__", "/") + ".json": content for name, content in files.items()},
    }  # fmt: skip
    for name, content in given.items():
        if (path / name).parent.is_dir():
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    if (path / "2_Dense").is_dir():
        torch.save({"linear.weight": torch.ones(3, 4)}, path / "2_Dense" / "pytorch_model.bin")
    return path


def test_a_folder(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
    folder(tmp_path, sentence_bert_config={"max_seq_length": 77}, config_sentence_transformers=prompts)
    plan = read_pooling("embed", tmp_path, None, None, torch.bfloat16)
    assert (plan.pooling, plan.normalize, plan.max_positions) == ("last", True, 77)
    assert (plan.prompts, plan.default_prompt) == (prompts["prompts"], "query")
    assert plan.dense is not None
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    assert plan.dense(x).tolist() == [[4.0] * 3] * 2
    method = dense_method(plan.dense, 4, torch.bfloat16)
    assert method["model"](torch.ones(2, 4)).dtype == torch.float32
    assert method["args"][0].shape == (3, 4)
    other = read_pooling("embed", tmp_path, "mean", False, torch.float32)
    assert (other.pooling, other.normalize) == ("mean", False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_weightedmean_tokens": True}, "weighted_mean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_pooling_modes(given: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder(tmp_path, ("Transformer", "Pooling"), **{"1_Pooling__config": given})
    plan = read_pooling("embed", tmp_path, None, None, torch.float32)
    assert (plan.pooling, plan.normalize, plan.dense) == (expected, False, None)


@pytest.mark.parametrize(
    ("kinds", "files", "error", "text"),
    [
        (("Transformer", "Pooling", "LSTM"), {}, CompileError, "its module 'LSTM' is not served in this place"),
        (("Transformer", "Normalize", "Pooling"), {}, CompileError, "its module 'Normalize' is not served"),
        (("Transformer",), {}, CompileError, "expected a module Pooling in modules.json, got none"),
        (ORDER, {"1_Pooling__config": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}}, CompileError,
         "got ['mean_tokens', 'cls_token']"),
        (ORDER, {"1_Pooling__config": {"pooling_mode_lasttoken": True, "include_prompt": False}}, CompileError,
         "include_prompt=false is not served: prompts are pooled, too"),
        (ORDER, {"2_Dense__config": {"in_features": 4, "out_features": 3, "bias": False,
                                     "activation_function": "os.system"}}, CompileError,
         "its activation os.system is not one of torch.nn"),
        (ORDER, {"sentence_bert_config": {"do_lower_case": True}}, CompileError, "do_lower_case"),
        (ORDER, {"modules": "{"}, InvalidFileError, "modules.json: Expecting property name"),
        (ORDER, {"modules": {}}, InvalidFileError, "modules.json: expected a JSON list, got {}"),
    ],
)  # fmt: skip
def test_folders_that_are_refused(
    kinds: tuple[str, ...], files: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    folder(tmp_path, kinds, **files)
    with pytest.raises(error) as caught:
        read_pooling("embed", tmp_path, None, None, torch.float32)
    assert str(caught.value).startswith("causal_lm: model: ")
    assert text in str(caught.value)


def test_models_without_a_folder(tmp_path: Path) -> None:
    for place in (None, tmp_path):
        plan = read_pooling("embed", place, None, None, torch.float32)
        assert (plan.pooling, plan.normalize, plan.dense) == ("last", True, None)
    assert read_pooling("embed", None, "cls", False, torch.float32).pooling == "cls"
    plan = read_pooling("classify", None, "last", None, torch.float32)
    assert (plan.pooling, plan.normalize) == ("last", False)


@pytest.mark.parametrize(
    ("task", "pooling", "normalize", "error", "text"),
    [
        ("embed", "median", None, InvalidArgumentError,
         "pooling: expected 'last', 'cls', 'mean', 'max', 'weighted_mean' or 'mean_sqrt_len', got 'median'"),
        ("embed", None, 1, ArgumentTypeError, "normalize: expected True or False, got 1"),
        ("generate", "last", None, InvalidArgumentError,
         "pooling: is for task=\"embed\": task='generate' pools nothing"),
        ("classify", "mean", None, InvalidArgumentError,
         "pooling: is for task=\"embed\": task='classify' has scores of the last token"),
        ("classify", None, True, InvalidArgumentError,
         "normalize: is for task=\"embed\": task='classify' has scores of the last token"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    task: str, pooling: str | None, normalize: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        read_pooling(task, None, pooling, normalize, torch.float32)
    assert str(caught.value) == f"causal_lm: {text}"


def test_layers_are_in_evaluation_mode(tmp_path: Path) -> None:
    plan = read_pooling("embed", folder(tmp_path), None, None, torch.float32)
    assert isinstance(plan.dense, nn.Module)
    assert not plan.dense.training
