"""Recipe files: rules of mixed precision as JSON or TOML, with the sensitivity that a layer was measured to have.

    format_version = 1

    [[rules]]
    match = "*.down_proj"       # a pattern of layers' names
    dtype = "int8"              # or "none": floating point
    sensitivity = 0.0123        # a note; not read

    [[methods.decode.rules]]    # in the place of [[rules]]: for one method alone
    match = "*"
    dtype = "int4"
    group_size = 64             # further fields of QuantizeOptions

JSON has the same keys. The first rule that matches a layer decides.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from untorch.files import write_text
from untorch.quant.options import QuantizeOptions
from untorch.quant.rules import QuantizeRules
from untorch.runtime.errors import UnsupportedError
from untorch.validation import OptionError, hint

__all__ = ["FORMAT_VERSION", "read_recipe", "write_recipe"]

FORMAT_VERSION = 1
_FIELDS = ("dtype", "group_size", "method", "prefill", "embeddings")
_NOTES = ("sensitivity",)


def read_recipe(path: str | os.PathLike[str]) -> QuantizeRules | dict[str, QuantizeRules]:
    """What the option ``quantize`` takes, from a .json or .toml file: rules, or rules by method.

    Raises InvalidArgumentError, also an OptionError: the file cannot be read, or is no recipe.
    """
    path = Path(path)
    document = _parse(path)
    where = f"recipe {path}"
    if not isinstance(document, Mapping):
        raise OptionError(f"{where}: expected an object with 'rules', got {type(document).__name__}")
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise OptionError(f"{where}: format_version: expected {FORMAT_VERSION}, got {version!r}")
    _known(where, document, ("format_version", "rules", "methods"))
    if ("rules" in document) == ("methods" in document):
        raise OptionError(
            f"{where}: expected 'rules' for all methods, or 'methods' with rules for each, one of the two"
        )
    if "rules" in document:
        return _read_rules(where, document["rules"])
    methods = document["methods"]
    if not isinstance(methods, Mapping) or not methods:
        raise OptionError(f"{where}: methods: expected an object of methods with 'rules', got {methods!r}")
    found = {}
    for name, entry in methods.items():
        if not isinstance(entry, Mapping):
            raise OptionError(f"{where}: methods: {name}: expected an object with 'rules', got {entry!r}")
        _known(f"{where}: methods: {name}", entry, ("rules",))
        found[str(name)] = _read_rules(f"{where}: methods: {name}", entry.get("rules"))
    return found


def write_recipe(
    path: str | os.PathLike[str],
    rules: QuantizeRules | Mapping[str, QuantizeRules],
    sensitivity: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Writes what ``read_recipe`` reads, as .json or .toml.

    sensitivity: by method ("forward" if ``rules`` are for all), then by the rule's pattern: noted beside the rule.
    Raises OptionError, and FileOpenError where it cannot be written.
    """
    path, notes = Path(path), sensitivity or {}
    document: dict[str, Any] = {"format_version": FORMAT_VERSION}
    if isinstance(rules, QuantizeRules):
        document["rules"] = _entries(rules, notes.get("forward", {}))
    else:
        document["methods"] = {name: {"rules": _entries(of, notes.get(name, {}))} for name, of in rules.items()}
    text = json.dumps(document, indent=1) + "\n" if _kind(path) == "json" else _toml(document)
    write_text(path, text)


def _kind(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("json", "toml"):
        raise OptionError(f"recipe {path}: expected a name that ends in .json or .toml")
    return kind


def _parse(path: Path) -> Any:
    kind = _kind(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"recipe {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if kind == "json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise OptionError(f"recipe {path}: no JSON: {error}") from error
    if sys.version_info < (3, 11):
        raise UnsupportedError(f"recipe {path}: TOML needs Python 3.11 or newer: write it as .json")
    import tomllib

    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise OptionError(f"recipe {path}: no TOML: {error}") from error


def _read_rules(where: str, value: Any) -> QuantizeRules:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise OptionError(f"{where}: rules: expected a list of rules with 'match' and 'dtype', got {value!r}")
    rules: dict[str, Any] = {}
    for number, entry in enumerate(value, 1):
        place = f"{where}: rule {number}"
        if not isinstance(entry, Mapping):
            raise OptionError(f"{place}: expected an object with 'match' and 'dtype', got {entry!r}")
        _known(place, entry, ("match", *_FIELDS, *_NOTES))
        pattern = entry.get("match")
        if not isinstance(pattern, str) or not pattern:
            raise OptionError(f"{place}: match: expected a pattern of layers' names, got {pattern!r}")
        if pattern in rules:
            raise OptionError(f"{place}: match: {pattern!r} is there twice: the first decides, leave this one out")
        if "dtype" not in entry:
            raise OptionError(f"{place}: dtype: expected 'int4', 'int8', 'fp8', 'nvfp4' or 'none', got nothing")
        fields = {name: entry[name] for name in _FIELDS if name in entry}
        rules[pattern] = None if entry["dtype"] in (None, "none") else fields
    try:
        return QuantizeRules.read(rules)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error


def _known(where: str, entry: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in entry:
        if name not in names:
            raise OptionError(f"{where}: unknown key {name!r}: {hint(str(name), names)}")


def _entries(rules: QuantizeRules, notes: Mapping[str, float]) -> list[dict[str, Any]]:
    entries = []
    for pattern, options in rules.rules:
        entry: dict[str, Any] = {"match": pattern, "dtype": "none" if options is None else options.dtype}
        if options is not None:
            defaults = QuantizeOptions(options.dtype)
            fields = {name: getattr(options, name) for name in _FIELDS[1:]}
            entry |= {name: value for name, value in fields.items() if value != getattr(defaults, name)}
        if pattern in notes:
            entry["sensitivity"] = float(f"{notes[pattern]:.4g}")
        entries.append(entry)
    return entries


def _toml(document: Mapping[str, Any]) -> str:
    """Of a recipe: keys and strings as JSON has them are TOML's, too."""
    lines = [f"format_version = {document['format_version']}"]
    tables = {"rules": document["rules"]} if "rules" in document else {}
    for name, entry in document.get("methods", {}).items():
        tables[f"methods.{json.dumps(name)}.rules"] = entry["rules"]
    for name, rules in tables.items():
        for rule in rules:
            lines += ["", f"[[{name}]]", *(f"{key} = {json.dumps(value)}" for key, value in rule.items())]
    return "\n".join(lines) + "\n"
