"""Mixed precision by name: which pattern decides, what is left alone, errors with near names, one report of all."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from untorch.quant import Int4Linear, Int8Linear, NVFP4Linear, QuantizeOptions, QuantizeRules, quantize
from untorch.quant.rules import is_rules, layers_of
from untorch.validation import OptionError

from .test_apply import NAMES, Model

EMBEDDING = "patterns that match linear layers are for these: name the embedding, or give the pattern 'embeddings'"


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: type(model.get_submodule(name)).__name__ for name in NAMES}


def test_the_first_pattern_that_matches_decides() -> None:
    model, before = Model().eval(), Model().eval()
    ids = torch.randint(0, 100, (2, 7))
    report = quantize(
        model, {"*.down": "int8", "layers.0.*": {"dtype": "int4", "group_size": 32}, "head": None, "*": "nvfp4"},
        progress=False,
    )  # fmt: skip
    assert kinds(model) == {
        "layers.0.up": "Int4Linear", "layers.0.down": "Int8Linear", "layers.1.up": "NVFP4Linear",
        "layers.1.down": "Int8Linear", "head": "Linear",
    }  # fmt: skip
    assert [(layer.names[0], layer.quantized_dtype) for layer in report.layers] == [
        ("layers.0.up", "int4"), ("layers.0.down", "int8"), ("layers.1.up", "nvfp4"), ("layers.1.down", "int8"),
    ]  # fmt: skip
    assert report.layers[0].group_size == 32
    assert report.skipped == {"head": "'head' leaves it in floating point", "embed": EMBEDDING}
    assert report.module_nbytes_after < report.module_nbytes_before
    with torch.no_grad():
        assert 1e-4 < ((model(ids) - before(ids)).norm() / before(ids).norm()) < 0.2
    assert re.search(r"layers\.0\.down +int8 +128 × 256", report.table())


def test_layers_that_no_pattern_matches_stay() -> None:
    model = Model()
    report = quantize(model, {"layers.1.*": "int8"}, progress=False)
    assert isinstance(model.layers[1].up, Int8Linear)
    assert report.skipped == dict.fromkeys(
        ["layers.0.up", "layers.0.down", "head"], "no pattern of quantize matches it"
    )


def test_a_pattern_that_matches_no_whole_name_is_for_ends_of_names() -> None:
    model = nn.ModuleDict({"model": Model(), "head": nn.Linear(128, 128)})
    rules = QuantizeRules.read({"layers.*.up": "int8", "head": None, "*": "int4"})
    of_layer = rules.assign(layers_of(model)).of_layer
    names = {name: of_layer.get(id(part)) for part, every in layers_of(model) for name in every}
    assert names["model.layers.0.up"] == names["model.layers.1.up"] == 0
    assert names["head"] == 1  # a whole name, so that model.head is not meant
    assert names["model.head"] == 2
    assert names["model.embed"] is None


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"*.dwon": "int8"}, "'*.dwon' matches no layer: did you mean 'down' or '1.down' or '0.down'?"),
        ({"zzz": None}, "'zzz' matches no layer; there are: layers.0.up, layers.0.down, layers.1.up, layers.1.down, head, embed"),
        (
            {"*": "int4", "head": None},
            "'head' decides nothing: the first pattern that matches a layer decides, and '*' matches its layers: put "
            "'head' first",
        ),
        ({"*": 4}, "'*': expected a dtype, a dictionary of options, QuantizeOptions or None for the layers, got int (4)"),
        ({"*": "int5"}, "option quantize: dtype: expected one of 'int4', 'int8', 'fp8', 'nvfp4', got 'int5'"),
        ({"*": {"dtype": "int4", "include": "x"}}, "'*': include: not with patterns of layers: the pattern names the"),
        ({"*": {"dtype": "int8", "calibration": []}}, "'*': calibration: not with patterns of layers: give it for all"),
        ({}, "expected at least one pattern of layers' names, got none"),
    ],
)  # fmt: skip
def test_errors(rules: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        quantize(Model(), rules, progress=False)


def test_arguments_for_all_layers_are_not_beside_patterns() -> None:
    with pytest.raises(ValueError, match=re.escape("quantize: group_size: not beside patterns of layers: give it for")):
        quantize(Model(), {"*": "int4"}, group_size=64, progress=False)
    with pytest.raises(ValueError, match="quantize: nothing to quantise: layers.0.up: '.' leaves it in floating"):
        quantize(Model(), {"*": None}, progress=False)


def test_layers_that_would_grow_are_taken_by_name_alone() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(256, 64)})
    report = quantize(model, {"a": "int4", "*": "int4"}, progress=False)
    assert [type(part) for part in model.values()] == [Int4Linear, nn.Linear, Int4Linear]
    assert list(report.skipped) == ["b"]
    assert report.skipped["b"].startswith("it would grow")


def test_layers_that_share_a_weight_may_differ() -> None:
    model = nn.ModuleDict({"a": nn.Linear(128, 64), "b": nn.Linear(128, 64)})
    model["b"].weight = model["a"].weight  # type: ignore[assignment]
    report = quantize(model, {"a": "int4", "b": "nvfp4"}, progress=False)
    assert [type(part) for part in model.values()] == [Int4Linear, NVFP4Linear]
    assert [layer.kept_by for layer in report.layers] == [(), ()]


def test_rules_are_told_by_their_keys() -> None:
    assert is_rules({"*": "int4"})
    assert is_rules({"model.head": "int4"})
    assert is_rules({"lm_head": None, "layers.?": "int4"})
    assert not is_rules({"decode": "int4"})
    rules = QuantizeRules.read({"a.*": "int4", "b": None})
    assert rules.to_mapping() == {"a.*": QuantizeOptions("int4"), "b": None}


def test_embeddings_are_named_alone_or_asked_for() -> None:
    model = Model(tied=True)
    report = quantize(model, {"embed": "int8", "head": None, "*": "int4"}, progress=False)
    assert type(model.embed).__name__ == "Int8Embedding"
    assert report.layers[0].names == ("layers.0.up",)
    assert [layer.kept_by for layer in report.layers if layer.names == ("embed",)] == [("head.weight",)]
    model = Model(tied=True)
    report = quantize(model, {"*.down": None, "*": {"dtype": "int8", "embeddings": True}}, progress=False)
    assert [layer.names for layer in report.layers if "embed" in layer.names] == [("head", "embed")]
    assert model.embed.packed_weight is model.head.packed_weight
