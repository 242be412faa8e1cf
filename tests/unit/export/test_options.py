"""Tests of the export options: each wrong name, type and value names what was expected and what came."""

from __future__ import annotations

from typing import Any

import pytest

from untorch.export.errors import OptionError
from untorch.export.options import ExportOptions, resolve_options


def test_defaults_and_fields() -> None:
    assert resolve_options(None, {}) == ExportOptions()
    options = resolve_options(ExportOptions(cpu="x86-64-v3"), {"verify": True})
    assert options.cpu == "x86-64-v3"
    assert options.verify


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"pack_linear": True}, "unknown option 'pack_linear': did you mean 'pack_linears'?"),
        ({"xyzzy": 1}, "unknown option 'xyzzy': known are cpu, pack_linears,"),
        ({"verify": 1}, "option verify: expected bool, got int (1)"),
        ({"verify_tolerance": True}, "option verify_tolerance: expected int or float, got bool (True)"),
        ({"verify_tolerance": 0.0}, "option verify_tolerance: expected a number above 0, got 0.0"),
        (
            {"cpu": "x86-64-v5"},
            "option cpu: expected one of 'portable', 'native', 'x86-64-v2', 'x86-64-v3', 'x86-64-v4', got",
        ),
        ({"cpu": "x86_64-v3"}, "(did you mean 'x86-64-v3'?)"),
        ({"cpu": ("x86-64-v3", "v4")}, "option cpu: expected one of 'portable', 'native',"),
        ({"cpu": 3}, "option cpu: expected one of 'portable', 'native',"),
        (
            {"passes": {"fold_constant": False}},
            "option passes: unknown pass 'fold_constant': did you mean 'fold_constants'?",
        ),
        (
            {"passes": {"xyzzy": False}},
            "option passes: unknown pass 'xyzzy': known are decompose_flex_attention, drop_inference_dropout",
        ),
        ({"passes": {"fold_constants": 0}}, "option passes: fold_constants: expected bool, got int (0)"),
        ({"passes": ["fold_constants"]}, "option passes: expected Mapping, got list (['fold_constants'])"),
        ({"keep_weights": 3}, "option keep_weights: expected str or Sequence, got int (3)"),
        ({"keep_weights": ["q", 3]}, "option keep_weights: expected names or patterns, got int (3)"),
        ({"fold_limit": -1}, "option fold_limit: expected a number of bytes, 0 or more, got -1"),
        ({"fold_limit": 1.5}, "option fold_limit: expected int, got float (1.5)"),
        ({"inductor": [1]}, "option inductor: expected Mapping, got list ([1])"),
        ({"inductor": {1: 2}}, "option inductor: expected names as keys, got [1]"),
    ],
)
def test_errors(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as error:
        resolve_options(None, fields)
    assert text in str(error.value)


def test_options_object_of_another_type() -> None:
    with pytest.raises(OptionError, match="options: expected ExportOptions, got dict"):
        resolve_options({}, {})  # type: ignore[arg-type]


def test_json() -> None:
    values = ExportOptions(inductor={"a": 1, "b": (1, 2)}, passes={"fold_constants": False}).to_json()
    assert values["passes"] == {"fold_constants": False}
    assert values["fold_limit"] == 16 * 1024 * 1024
    assert values["inductor"] == {"a": 1, "b": "(1, 2)"}
    assert values["cpu"] == "portable"
    assert ExportOptions(cpu=("x86-64-v3", "x86-64-v4")).to_json()["cpu"] == ["x86-64-v3", "x86-64-v4"]
    assert values["keep_weights"] == []
    assert ExportOptions(keep_weights="*.q").to_json()["keep_weights"] == ["*.q"]
    assert "progress" not in values
