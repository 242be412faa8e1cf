"""Recipe files: what is written is read again, in both formats; errors name the file and the rule."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from untorch.quant import QuantizeOptions, QuantizeRules, read_recipe, write_recipe
from untorch.runtime.errors import FileMissingError
from untorch.validation import OptionError

RULES = QuantizeRules.read(
    {'a."b"': "int8", "*.mlp.*": {"dtype": "int4", "group_size": 32, "method": "rtn"}, "lm_head": None, "*": "nvfp4"}
)


@pytest.mark.parametrize("kind", ["json", pytest.param("toml", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib"))])  # fmt: skip
def test_what_is_written_is_read_again(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"recipe.{kind}"
    write_recipe(path, RULES, {"forward": {"lm_head": 0.123456}})
    assert read_recipe(path) == RULES
    assert "0.1235" in path.read_text()
    assert "hqq" not in path.read_text()  # defaults are left out
    by_method = {"encode": RULES, "de code": QuantizeRules((("*", QuantizeOptions("int4")),))}
    write_recipe(path, by_method, {"encode": {"*": 0.5}})
    assert read_recipe(path) == by_method


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "expected an object with 'rules', got list"),
        ({"rules": []}, "format_version: expected 1, got None"),
        ({"format_version": 1}, "expected 'rules' for all methods, or 'methods' with rules for each, one of the two"),
        ({"format_version": 1, "rule": []}, "unknown key 'rule': did you mean 'rules'?"),
        ({"format_version": 1, "rules": []}, "rules: expected a list of rules with 'match' and 'dtype', got []"),
        ({"format_version": 1, "rules": [{"dtype": "int4"}]}, "rule 1: match: expected a pattern of layers' names"),
        (
            {"format_version": 1, "rules": [{"match": "*"}]},
            "rule 1: dtype: expected 'int4', 'int8', 'fp8', 'nvfp4' or 'none'",
        ),
        (
            {"format_version": 1, "rules": [{"match": "*", "dtype": "none"}, {"match": "*", "dtype": "int4"}]},
            "rule 2: match: '*' is there twice",
        ),
        (
            {"format_version": 1, "rules": [{"match": "*", "dtype": "int4", "groupsize": 3}]},
            "rule 1: unknown key 'groupsize': did you mean 'group_size'?",
        ),
        ({"format_version": 1, "rules": [{"match": "*", "dtype": "int3"}]}, "(for '*')"),
        ({"format_version": 1, "methods": {}}, "methods: expected an object of methods with 'rules', got {}"),
        ({"format_version": 1, "methods": {"a": 1}}, "methods: a: expected an object with 'rules', got 1"),
    ],
)
def test_wrong_recipes(tmp_path: Path, document: Any, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    with pytest.raises(OptionError, match=f"^recipe {re.escape(str(path))}: .*{re.escape(text)}"):
        read_recipe(path)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"recipe x\.yaml: expected a name that ends in \.json or \.toml"):
        read_recipe("x.yaml")
    with pytest.raises(OptionError, match="cannot be read: No such file or directory"):
        read_recipe(tmp_path / "none.json")
    for name, text in (("a.json", "no JSON"), ("a.toml", "no TOML" if sys.version_info >= (3, 11) else "TOML needs")):
        (tmp_path / name).write_text("{")
        with pytest.raises((OptionError, RuntimeError), match=text):
            read_recipe(tmp_path / name)
    with pytest.raises(FileMissingError, match=r"cannot write .*a\.json: No such file or directory"):
        write_recipe(tmp_path / "none" / "a.json", RULES)
