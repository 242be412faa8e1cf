"""untorch profile: its table, its JSON, and the trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_json_document(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = cli("profile", package, "--runs", 3, "--warmup", 1, "--no-roofline", "--dim", "s0=3", "-o", trace, "--json")
    assert done.code == 0, done.err
    document = done.document()
    assert set(document) == {
        "file", "method", "device", "graph", "runs", "seconds", "wall_s", "matched", "dropped", "roofline", "rows",
        "trace",
    }  # fmt: skip
    assert document["runs"] == 3 and document["trace"] == str(trace) and document["roofline"] is None
    for row in document["rows"]:
        assert set(row) == {
            "name", "kind", "operators", "lines", "modules", "calls", "seconds", "share", "bytes", "operations",
            "roofline", "host_s",
        }  # fmt: skip
    [function] = [row for row in document["rows"] if row["name"] == "aoti_torch_empty_strided"]
    assert function["calls"] == 1 and function["kind"] == "function" and function["seconds"] > 0
    assert json.loads(trace.read_text())["otherData"]["method"] == "forward"


@pytest.mark.slow
def test_text(cli: Callable[..., Any], package: Path) -> None:
    done = cli("profile", package, "--runs", 2)
    assert done.code == 0, done.err
    assert "method         forward on cpu" in done.out
    assert "GFLOP/s in float32 (measured here)" in done.out
    assert "empty_strided" in done.out and "between kernels (generated code)" in done.out
    assert "Source lines are incomplete" in done.out
    assert "(medians of 2 runs)" in done.out
    assert all(line == line.rstrip() for line in done.out.splitlines())


def test_long_names_are_cut() -> None:
    from untorch.cli.profile import _short, _source

    name = "cpp_fused_add_embedding_expand_gather_native_layer_norm_slice_0"
    assert _short({"name": name}) == "cpp_fused_add_embedding_expand_gath…norm_slice_0"
    assert len(_short({"name": name})) == 48
    assert _short({"name": "aoti_torch_cpu_addmm_out"}) == "cpu_addmm_out"
    row = {"lines": ["a/b/net.py:8", "/c/net.py:9", "d.py:1"], "modules": ["blocks.0.norm", "blocks.2.norm"]}
    assert _source(row) == "net.py:8, net.py:9, … (3) (blocks.0…2.norm)"
    assert _source({"lines": [], "modules": ["a.b", "a.b.c"]}) == "a.b … a.b.c"
    assert _source({"lines": [], "modules": ["a.0.b.0", "a.1.b.1"]}) == "a.0.b.0 … a.1.b.1"


def test_errors(cli: Callable[..., Any], package: Path) -> None:
    done = cli("profile", package, "--cuda-graph")
    assert (done.code, done.err) == (1, "untorch: profile: graph: method forward runs on the CPU\n")
