"""What export recorded of the calls: parsing, sizes, and which range is which call."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from untorch.profiler.recording import FUNCTION, Range
from untorch.profiler.sequence import PROXY, Call, match_calls, parse_sequence, sizes_of_inputs
from untorch.runtime.spec import SymbolicDim, TensorSpec


def entry(name: str, kind: str = "kernel", nbytes: Any = 8, operations: Any = None) -> dict[str, Any]:
    return {
        "name": name, "kind": kind, "operators": ["aten.add"], "lines": [0], "module": "block", "bytes": nbytes,
        "operations": operations,
    }  # fmt: skip


def document(**changes: Any) -> bytes:
    calls = [entry("cpp_a", nbytes=["rows", 4, "*", 16, "+"]), {"layer": "one"}, {"layer": "one"}]
    plain = {
        "version": 1,
        "calls": calls,
        "layers": {"one": [entry("aoti_torch_cpu_mm_out", "function")]},
        "lines": ["m.py:3"],
    }
    return json.dumps(plain | changes).encode()


def test_layers_are_expanded_and_sizes_evaluated() -> None:
    sequence = parse_sequence(document(passes=[["merge_linears", ["q", "k"]]]), {"rows": 5})
    assert [call.name for call in sequence.calls] == ["cpp_a", "aoti_torch_cpu_mm_out", "aoti_torch_cpu_mm_out"]
    first = sequence.calls[0]
    assert first == Call("cpp_a", False, ("aten.add",), ("m.py:3",), "block", 36, None)
    assert sequence.calls[1].is_function and sequence.calls[1].nbytes == 8
    assert sequence.passes == (("merge_linears", ("q", "k")),)


@pytest.mark.parametrize(
    ("rpn", "value"),
    [
        (7, 7), (None, None), (["rows", 2, "-"], 3), (["rows", 2, "//"], 2), (["rows", 2, "%"], 1),
        (["rows", 9, "min"], 5), (["rows", 9, "max"], 9), (["other", 2, "*"], None), (["rows", 0, "//"], None),
    ],
)  # fmt: skip
def test_expressions(rpn: Any, value: int | None) -> None:
    [call] = parse_sequence(document(calls=[entry("cpp_a", nbytes=rpn)]), {"rows": 5}).calls
    assert call.nbytes == value


@pytest.mark.parametrize(
    "data",
    [
        None, b"", b"{", b"[]", document(version=2), document(calls=[{"layer": "none"}]), document(lines=[]),
        document(layers={"one": [{"layer": "one"}]}), document(calls=[entry("a", nbytes=["rows", "+"])]),
    ],
)  # fmt: skip
def test_what_is_no_sequence_is_none(data: bytes | None) -> None:
    assert parse_sequence(data, {"rows": 5}).calls == ()


def test_sizes_of_inputs() -> None:
    specs = [
        TensorSpec("x", (SymbolicDim("rows"), 4), "float32"),
        TensorSpec("y", (SymbolicDim("2*rows", is_expression=True), SymbolicDim("width")), "float32"),
    ]
    assert sizes_of_inputs(specs, [np.zeros((3, 4)), np.zeros((6, 7))]) == {"rows": 3, "width": 7}


def ranges(*names: str) -> list[Range]:
    return [Range(name, name, FUNCTION, False, 1, i, i + 1, -1, -1) for i, name in enumerate(names)]


def calls(*names: str) -> list[Call]:
    return [Call(name, True, (), (f"m.py:{i}",), "", None, None) for i, name in enumerate(names)]


def lines(found: list[Call | None]) -> list[str | None]:
    return [None if call is None else call.lines[0] for call in found]


def test_calls_match_in_their_order() -> None:
    found, fits = match_calls(
        ranges("aoti_torch_a", "aoti_torch_empty", "aoti_torch_b", "aoti_torch_a"),
        calls("aoti_torch_a", "aoti_torch_b", "aoti_torch_a"),
    )
    assert fits and lines(found) == ["m.py:0", None, "m.py:1", "m.py:2"]


def test_kernels_that_are_not_seen_are_left_out() -> None:
    found, fits = match_calls(
        ranges("aoti_torch_a", "aoti_torch_b"), calls("cpp_x", "aoti_torch_a", "cpp_y", "aoti_torch_b")
    )
    assert fits and lines(found) == ["m.py:1", "m.py:3"]


def test_operators_without_a_c_function() -> None:
    found, fits = match_calls(ranges(PROXY), calls("torch.ops.mine.op.default"))
    assert fits and lines(found) == ["m.py:0"]


def test_another_order_matches_by_name_where_the_number_is_the_same() -> None:
    found, fits = match_calls(
        ranges("aoti_torch_b", "aoti_torch_a", "aoti_torch_a"), calls("aoti_torch_a", "aoti_torch_b")
    )
    assert not fits and lines(found) == ["m.py:1", None, None]
