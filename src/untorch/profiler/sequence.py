"""What export recorded of a method's kernel calls, and which of them a recorded range is."""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from untorch.profiler.recording import Range

__all__ = ["PROXY", "Call", "CallSequence", "match_calls", "parse_sequence", "sizes_of_inputs"]

PROXY = "aoti_torch_proxy_executor_call_function"
_MAX_CALLS = 200_000
_OPERATORS: dict[Any, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod, "min": min,
    "max": max,
}  # fmt: skip
_FUNCTION_PREFIXES = ("aoti_torch_", "torch_", "cpp_", "triton_")


@dataclass(frozen=True)
class Call:
    """One call of the generated code: a loop or kernel, or (``is_function``) a C function.

    lines: "file:line" of the model's source. module: the path in the model, such as "blocks.0.up". nbytes, operations:
    of the operands' memory and of arithmetic; None where they are not known.
    """

    name: str
    is_function: bool
    operators: tuple[str, ...]
    lines: tuple[str, ...]
    module: str
    nbytes: int | None
    operations: int | None


@dataclass(frozen=True)
class CallSequence:
    """The calls of one run of a method in their order, and what the passes of the export changed."""

    calls: tuple[Call, ...] = ()
    passes: tuple[tuple[str, tuple[str, ...]], ...] = ()


def parse_sequence(data: bytes | None, sizes: Mapping[str, int]) -> CallSequence:
    """The entry of an archive, with its sizes for these symbols. Empty without one, or for one of another format."""
    try:
        document = json.loads(data) if data else {}
        if document.get("version") != 1:
            return CallSequence()
        lines = [str(line) for line in document["lines"]]
        layers = document["layers"]
        calls: list[Call] = []
        _expand(document["calls"], layers, lines, sizes, calls, 0)
        passes = tuple((str(name), tuple(map(str, changes))) for name, changes in document.get("passes", ()))
        return CallSequence(tuple(calls), passes)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return CallSequence()  # information alone: a damaged entry is none


def _expand(
    entries: list[Any],
    layers: dict[str, Any],
    lines: list[str],
    sizes: Mapping[str, int],
    calls: list[Call],
    depth: int,
) -> None:
    for entry in entries:
        if len(calls) > _MAX_CALLS or depth > 8:
            raise ValueError("too many calls")
        if "layer" in entry:
            inner: list[Call] = []
            _expand(layers[entry["layer"]], layers, lines, sizes, inner, depth + 1)
            moved = entry.get("modules", {})
            calls += [replace(call, module=_moved(call.module, moved)) for call in inner] if moved else inner
            continue
        calls.append(
            Call(
                str(entry["name"]), entry["kind"] == "function", tuple(map(str, entry["operators"])),
                tuple(lines[index] for index in entry["lines"]), str(entry["module"]),
                _evaluate(entry["bytes"], sizes), _evaluate(entry["operations"], sizes),
            )
        )  # fmt: skip


def _moved(module: str, moved: Mapping[str, str]) -> str:
    """The module of another call of the layer's function: "block.0.up" → "block.3.up"."""
    for path, other in moved.items():
        if module == path or module.startswith(path + "."):
            return str(other) + module[len(path) :]
    return module


def _evaluate(rpn: Any, sizes: Mapping[str, int]) -> int | None:
    """A size expression; None where a symbol is not known."""
    if rpn is None or isinstance(rpn, int):
        return rpn
    stack: list[int] = []
    for word in rpn:
        if word in _OPERATORS:
            right, left = stack.pop(), stack.pop()
            if word in ("//", "%") and right == 0:
                return None
            stack.append(_OPERATORS[word](left, right))
        elif isinstance(word, int):
            stack.append(word)
        elif word in sizes:
            stack.append(sizes[word])
        else:
            return None
    [value] = stack
    return value


def sizes_of_inputs(specs: Sequence[Any], arrays: Sequence[Any]) -> dict[str, int]:
    """The sizes of a call's symbols, from the shapes of its inputs."""
    sizes: dict[str, int] = {}
    for spec, array in zip(specs, arrays, strict=False):
        for wanted, size in zip(spec.shape, array.shape, strict=False):
            if not isinstance(wanted, int) and not wanted.is_expression:
                sizes.setdefault(wanted.name, int(size))
    return sizes


def match_calls(ranges: Sequence[Range], calls: Sequence[Call]) -> tuple[list[Call | None], bool]:
    """For each range its call, and whether the run made exactly the recorded calls that can be seen.

    Ranges are those of one run in their order, without nested ones. Where the order differs, a range gets the call of
    its name at the same place among those of that name, if all of that name have been seen.
    """
    keys = [range_.function for range_ in ranges]
    wanted = [_key(call) for call in calls]
    seen = set(keys)
    visible = [(key, call) for key, call in zip(wanted, calls, strict=True) if key in seen]
    known = {key for key, _ in visible}
    if [key for key in keys if key in known] == [key for key, _ in visible]:
        queue = iter(call for _, call in visible)
        return [next(queue) if key in known else None for key in keys], bool(visible)
    counts = Counter(keys)
    by_name: dict[str, list[Call]] = {}
    for key, call in visible:
        by_name.setdefault(key, []).append(call)
    taken: Counter[str] = Counter()
    matched: list[Call | None] = []
    for key in keys:
        candidates = by_name.get(key, [])
        matched.append(candidates[taken[key]] if len(candidates) == counts[key] else None)
        taken[key] += 1
    return matched, False


def _key(call: Call) -> str:
    """The function of the call's range: operators without a C function go through the proxy executor."""
    return call.name if call.name.startswith(_FUNCTION_PREFIXES) else PROXY
