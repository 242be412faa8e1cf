"""Tests of the coverage check: symbols, external operators, source lines, and the list that the error gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from untorch.export.coverage import (
    MissingOperator,
    find_missing,
    origins_in_wrapper,
    raise_if_missing,
    source_line,
    source_place,
)
from untorch.export.errors import UnsupportedOperatorsError
from untorch.export.library import find_runtime_library
from untorch.runtime.coverage import needed_functions
from untorch.runtime.elf import ElfFile, Symbol, read_elf
from untorch.runtime.errors import UnsupportedError

WRAPPER = """
    // Topologically Sorted Source Nodes: [linear, relu], Original ATen: [aten.addmm]
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(buf0, arg0));
    // Topologically Sorted Source Nodes: [packed], Original ATen: [untorch.packed_linear]
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_packed_linear(arg6_1, w));
    // Topologically Sorted Source Nodes: [qr], Original ATen: [aten.linalg_qr]
    aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0, nullptr);
"""


def extern(*targets: str) -> str:
    return json.dumps({"nodes": [{"name": "b", "node": {"target": target}} for target in targets]})


def test_origins_in_wrapper() -> None:
    shims, externals = origins_in_wrapper(WRAPPER)
    assert shims["aoti_torch_cpu_addmm_out"] == {"linear", "relu"}
    assert shims["aoti_torch_cpu_untorch_packed_linear"] == {"packed"}
    assert externals == {0: {"qr"}}


def test_needed_symbols_leave_system_libraries_out() -> None:
    symbols = (
        Symbol("aoti_torch_clone", False, False),
        Symbol("Sleef_expf16_u10", False, False),
        Symbol("strlen", False, False, "GLIBC_2.2.5", "libc.so.6"),
        Symbol("maybe", False, True),
        Symbol("own", True, False),
    )
    assert needed_functions(ElfFile("x86_64", None, (), symbols)) == ["Sleef_expf16_u10", "aoti_torch_clone"]


def test_everything_is_listed_at_once_with_the_source() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)  # the line

    program = torch.export.export(Model(), (torch.randn(2),))
    relu = next(n for n in program.graph.nodes if n.op == "call_function")
    line = source_line(relu)
    assert line is not None
    assert line.startswith(f"{__file__}:")
    assert line.endswith("return torch.relu(x)  # the line")
    missing = find_missing(
        ["aoti_torch_cpu_addmm_out", "aoti_torch_clone"], extern("mine::op", "mine::op", "mine::other"),
        frozenset({"aoti_torch_clone"}), wrapper=WRAPPER, nodes={"relu": relu, "qr": relu},
    )  # fmt: skip
    assert missing == [
        MissingOperator("shim", "aoti_torch_cpu_addmm_out", (line,)),
        MissingOperator("kernel", "mine::op", (line,)),
        MissingOperator("kernel", "mine::other", ()),
    ]
    with pytest.raises(UnsupportedOperatorsError) as error:
        raise_if_missing(missing, "method 'forward'")
    assert error.value.missing == tuple(missing)
    assert isinstance(error.value, UnsupportedError)
    text = str(error.value)
    assert text.startswith("method 'forward': the runtime lacks 3 operators:\n")
    assert f"C function aoti_torch_cpu_addmm_out ({line}): libuntorch.so does not have it" in text
    assert 'register a kernel with untorch.register_kernel("mine::other", fn)' in text


def test_a_registered_kernel_counts() -> None:
    registry = pytest.importorskip("untorch.runtime.registry")
    registry.register_kernel("coverage_test::op", lambda x: x)
    assert find_missing([], extern("coverage_test::op"), frozenset()) == []


def test_nothing_missing_is_no_error() -> None:
    raise_if_missing([], "x")


def test_find_runtime_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "aoti_torch_clone" in read_elf(find_runtime_library()).exported()
    monkeypatch.setenv("UNTORCH_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(UnsupportedError, match="which is not a file: correct or unset it"):
        find_runtime_library()


def test_the_line_of_what_a_patch_traces_is_the_users() -> None:
    """An LSTM's operator is called by a function of ours, which stands for torch's."""
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = (
        '  File "/home/me/model.py", line 9, in forward\n    return self.rnn(x)\n'
        '  File "/venv/torch/nn/modules/rnn.py", line 90, in forward\n    result = _VF.gru(x)\n'
        '  File "/venv/untorch/export/patches/recurrent.py", line 122, in gru\n    return layer(x)\n'
    )
    assert source_line(node) == "/home/me/model.py:9: return self.rnn(x)"
    assert source_place(node) == "/home/me/model.py:9"
