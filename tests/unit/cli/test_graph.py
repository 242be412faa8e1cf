"""untorch inspect --graph: what is drawn, and that the file needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.unit.cli.conftest import UncheckedWriter, method_entry
from untorch.archive import FORMAT_VERSION
from untorch.cli.svg import Svg, fit

ENTRY = "extra/kernel_calls/forward.json"


def call(name: str, module: str, *operators: str) -> dict[str, Any]:
    kind = "function" if name.startswith("aoti_") else "kernel"
    return {
        "name": name, "kind": kind, "operators": list(operators), "lines": [0], "module": module, "bytes": None,
        "operations": None,
    }  # fmt: skip


def layer(number: int) -> list[dict[str, Any]]:
    return [
        call("aoti_torch_cpu_mm_out", f"blocks.{number}.up", "aten.mm"),
        call("cpp_fused_relu_mm_0", f"blocks.{number}", "aten.relu"),
    ]


CALLS: dict[str, Any] = {
    "version": 1, "lines": ["net.py:7"], "layers": {}, "passes": [["merge_linears", ["q, k, v", "a & b <i>"]]],
    "calls": [call("aoti_torch_cpu_convolution", "stem", "aten.convolution"), *layer(0), *layer(1), *layer(2),
              call("aoti_torch_cpu_cumsum", "", "aten.cumsum")],
}  # fmt: skip


def drawn(path: Path, library: bytes, calls: Any = CALLS, name: str = "layer.bias") -> Path:
    method = method_entry("forward") | {"kernel_calls": ENTRY}
    method["constants"][0]["fqn"] = name
    manifest = {
        "format": "untorch", "format_version": FORMAT_VERSION, "untorch_version": "0.1.0", "torch_version": "2.13.0",
        "weights": [{"file": "data/weights/weight_0", "nbytes": 4}], "methods": {"forward": method},
    }  # fmt: skip
    with UncheckedWriter(path) as writer:
        writer.write("data/aotinductor/forward/m.wrapper.so", library)
        writer.write("data/weights/weight_0", b"\0\0\0\0")
        writer.write(ENTRY, json.dumps(calls).encode())
        writer.write_manifest(manifest)
    return path


def texts(picture: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("}text")]


def test_methods_kernels_weights_and_passes(cli: Callable[..., Any], library: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    done = cli("inspect", drawn(tmp_path / "m.pt2", library), "--graph", out)
    assert done.code == 0, done.err
    assert f"written to {out}" in done.out
    shown = texts(out.read_text())
    for text in ("m.pt2", "method forward", "x: float32[s0: 2..64, 4]", "output: float32[s0: 2..64, 4]", "stem",
                 "layer.bias", "merge linears: 2", "a & b <i>", "convolution", "cumsum"):  # fmt: skip
        assert text in shown, text
    # Three equal blocks are one, with a count.
    assert shown.count("mm_out") == 1 and "× 3" in shown and "blocks.0 … blocks.2" in shown
    assert shown.index("stem") < shown.index("blocks.0 … blocks.2") < shown.index("cumsum")


def test_the_kinds_have_colours(library: bytes, tmp_path: Path) -> None:
    from untorch.cli.graph import _KINDS, draw_package

    picture, weights = draw_package(drawn(tmp_path / "m.pt2", library))
    fills = [node.get("fill") for node in ElementTree.fromstring(picture).iter() if node.find("{*}title") is not None]
    kinds = ("convolution", "GEMM", "fused loop", "other function")
    assert [fill for fill in fills if fill in {_KINDS[kind][0] for kind in kinds}] == [
        _KINDS[kind][0] for kind in kinds
    ]
    assert weights == [("layer.bias", "float32", "[1]", 4)]


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_the_file_needs_nothing_else(cli: Callable[..., Any], library: bytes, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"out{suffix}"
    name = "</svg><script src='http://x.test/a.js'>\x1b"
    assert cli("inspect", drawn(tmp_path / "m.pt2", library, name=name), "--graph", out).code == 0
    text = out.read_text().replace("http://www.w3.org/2000/svg", "")
    # The hostile name is text, and nothing is loaded.
    assert not re.search(r"<script|<link|<img|@import|url\(|\x1b", text)
    assert "&lt;/svg&gt;" in text


def test_without_calls_inputs_and_weights_are_drawn(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    assert cli("inspect", package, "--graph", out).code == 0
    shown = texts(out.read_text())
    assert "the file does not say what its code calls (exported by an older version)" in shown
    assert "layer.bias" in shown


def test_errors(cli: Callable[..., Any], package: Path, stock: Path, tmp_path: Path) -> None:
    done = cli("inspect", package, "--graph", tmp_path / "out.png")
    assert (done.code, done.err) == (
        1, f"untorch: --graph {tmp_path / 'out.png'}: expected a name that ends with .svg or .html\n",
    )  # fmt: skip
    done = cli("inspect", stock, "--graph", tmp_path / "out.svg")
    assert (done.code, done.err) == (1, f"untorch: {stock}: a stock package has no manifest that --graph could draw\n")


def test_svg_elements() -> None:
    picture = Svg(100)
    picture.rectangle(1, 2, 3, 4, "red", tooltip="<b>")
    picture.text(5, 60, "a < b", anchor="end", mono=True)
    root = ElementTree.fromstring(picture.render("title"))
    assert root.get("width") == "100" and float(root.get("height") or 0) >= 60
    assert fit("short", 100, 10) == "short" and fit("x" * 100, 100, 10) == "x" * 16 + "…"
