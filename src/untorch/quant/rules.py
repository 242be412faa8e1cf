"""``QuantizeRules``: mixed precision by name. Patterns of layers' names in order, the first that matches decides."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from untorch.quant.experts import experts_of
from untorch.quant.options import QuantizeOptions
from untorch.quant.select import embeddings_of, linears
from untorch.validation import OptionError

__all__ = ["Assignment", "QuantizeRules", "is_rules", "layers_of"]

_SPECIAL = frozenset("*?[.")
_NO_RULE = "no pattern of quantize matches it"
_ONLY_LINEARS = "patterns that match linear layers are for these: name the embedding, or give the pattern 'embeddings'"
# What says which layers, or needs the whole graph.
_NOT_IN_RULES = ("include", "exclude", "calibration")


def is_rules(value: Mapping[str, Any]) -> bool:
    """Whether a dictionary has patterns of layers as keys, not names of methods or options: one has * ? [ or a dot."""
    return any(isinstance(key, str) and _SPECIAL.intersection(key) for key in value)


def layers_of(module: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """What patterns name: linear layers, experts and embeddings, each with all its names."""
    return [*linears(module), *experts_of(module), *embeddings_of(module)]


@dataclass(frozen=True)
class Assignment:
    """Which rule each layer has, by the layer's id: an index into ``rules``. Layers that no pattern matches have none.

    named: the rules without wildcards, which take layers that would grow as well.
    passed_over: embeddings that patterns match, and leave alone.
    """

    rules: tuple[tuple[str, QuantizeOptions | None], ...]
    of_layer: dict[int, int]
    named: frozenset[int]
    passed_over: frozenset[int] = frozenset()

    def layers(self, index: int) -> frozenset[int]:
        """The ids of the layers that have a rule."""
        return frozenset(layer for layer, rule in self.of_layer.items() if rule == index)

    def reason_to_skip(self, layer: nn.Module) -> str:
        """Why a layer is left in floating point by its name, or ""."""
        index = self.of_layer.get(id(layer))
        if index is None:
            return _ONLY_LINEARS if id(layer) in self.passed_over else "" if _is_embedding(layer) else _NO_RULE
        pattern, options = self.rules[index]
        return f"{pattern!r} leaves it in floating point" if options is None else ""


@dataclass(frozen=True)
class QuantizeRules:
    """Patterns with the options of the layers that they match, or None: those stay in floating point.

    A pattern is for dotted names, as in a shell ("*.mlp.*"). One that matches no whole name is for their ends behind a
    dot: "lm_head" is "model.lm_head", too. The first pattern that matches a layer decides. Layers that none matches
    stay in floating point. A pattern that matches linear layers leaves embeddings alone, unless its options have
    ``embeddings``; one that matches nothing but embeddings is for these.
    """

    rules: tuple[tuple[str, QuantizeOptions | None], ...]

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> QuantizeRules:
        """From patterns with a dtype, a dictionary of options, QuantizeOptions or None. Raises OptionError."""
        rules = []
        for pattern, given in value.items():
            if not isinstance(pattern, str) or not pattern:
                raise OptionError(f"option quantize: expected patterns of layers' names as keys, got {pattern!r}")
            if given is not None and not isinstance(given, str | Mapping | QuantizeOptions):
                raise OptionError(
                    f"option quantize: {pattern!r}: expected a dtype, a dictionary of options, QuantizeOptions or None "
                    f"for the layers, got {type(given).__name__} ({given!r})"
                )
            try:
                options = None if given is None else QuantizeOptions.read(given)
            except OptionError as error:
                raise OptionError(f"{error} (for {pattern!r})") from error
            for name in _NOT_IN_RULES:
                if options is not None and getattr(options, name) is not None:
                    instead = "give it for all layers" if name == "calibration" else "the pattern names the layers"
                    raise OptionError(f"option quantize: {pattern!r}: {name}: not with patterns of layers: {instead}")
            rules.append((pattern, options))
        if not rules:
            raise OptionError("option quantize: expected at least one pattern of layers' names, got none")
        return cls(tuple(rules))

    def to_mapping(self) -> dict[str, QuantizeOptions | None]:
        """What ``read`` takes."""
        return dict(self.rules)

    def options(self) -> Iterator[QuantizeOptions]:
        """Those of all rules that quantise."""
        return (options for _, options in self.rules if options is not None)

    def assign(self, layers: Sequence[tuple[nn.Module, list[str]]]) -> Assignment:
        """Which rule each layer has.

        Raises OptionError for a pattern that matches no layer, and for one whose layers all belong to earlier ones.
        """
        found: dict[int, int] = {}
        passed_over: set[int] = set()
        for index, (pattern, options) in enumerate(self.rules):
            matches = _matcher(pattern, [name for _, names in layers for name in names])
            matched = [part for part, names in layers if any(map(matches, names))]
            if not matched:
                raise OptionError(_unmatched(pattern, layers))
            taken = [part for part in matched if not _is_embedding(part)]
            if options is not None and not options.embeddings and taken:
                passed_over |= {id(part) for part in matched if _is_embedding(part)}
                matched = taken
            if all(id(part) in found for part in matched):
                earlier = list(dict.fromkeys(self.rules[found[id(part)]][0] for part in matched))
                raise OptionError(
                    f"option quantize: {pattern!r} decides nothing: the first pattern that matches a layer decides, "
                    f"and {', '.join(map(repr, earlier))} matches its layers: put {pattern!r} first"
                )
            for part in matched:
                found.setdefault(id(part), index)
        named = frozenset(i for i, (pattern, _) in enumerate(self.rules) if not set("*?[").intersection(pattern))
        return Assignment(self.rules, found, named, frozenset(passed_over - found.keys()))


def _is_embedding(part: nn.Module) -> bool:
    return isinstance(part, nn.Embedding)


def _tails(name: str) -> Iterator[str]:
    """The ends of a name behind its dots."""
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _matcher(pattern: str, names: Sequence[str]) -> Callable[[str], bool]:
    """For whole names if one of them matches, else for ends of names."""
    if any(fnmatch.fnmatchcase(name, pattern) for name in names):
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    return lambda name: any(fnmatch.fnmatchcase(tail, pattern) for tail in _tails(name))


def _unmatched(pattern: str, layers: Sequence[tuple[nn.Module, list[str]]]) -> str:
    names = [name for _, every in layers for name in every if name]
    known = list(dict.fromkeys([*names, *(tail for name in names for tail in _tails(name))]))
    near = difflib.get_close_matches(pattern.strip("*."), known, n=3, cutoff=0.5)
    text = f"option quantize: {pattern!r} matches no layer"
    if near:
        return f"{text}: did you mean {' or '.join(map(repr, near))}?"
    return f"{text}; there are: {', '.join(names) or 'none'}"
