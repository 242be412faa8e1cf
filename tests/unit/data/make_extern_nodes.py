"""Writes the extern_nodes_*.json fixtures: what AOTInductor puts in a package for operators without a C shim.

Run with torch installed: ``python tests/unit/data/make_extern_nodes.py``. Beside each list of nodes the fixture keeps
the flattened arguments of each call in the generated code, so that the reader's counts can be checked against the
compiler's. Compiling takes about a minute.
"""

import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent

library = torch.library.Library("fixture", "DEF")
library.define(
    "mixed(Tensor x, Tensor? y, Tensor[] many, Tensor?[] maybe, SymInt[] sizes, int count, float scale, bool flag, "
    "str mode, float[] weights, Scalar alpha, int? nothing=None, *, ScalarType dtype, Device device, "
    "MemoryFormat? format=None) -> (Tensor, Tensor[], Tensor?)"
)
library.define("scale_(Tensor(a!) x, float factor) -> ()")


def _mixed(x: Any, y: Any, many: Any, maybe: Any, *_: Any, **__: Any) -> Any:
    return x.clone(), [m.clone() for m in many], None


def _scale(x: Any, factor: float) -> None:
    x.mul_(factor)


for _name, _function in (("mixed", _mixed), ("scale_", _scale)):
    library.impl(_name, _function, "CPU")
    torch.library.register_fake(f"fixture::{_name}", _function if _name == "mixed" else lambda x, factor: None)


def mixed(x: Any, y: Any) -> Any:
    rows = x.shape[0]
    out, many, _ = torch.ops.fixture.mixed(
        x,
        None,
        [x, y],
        [y, None, x],
        [rows, 3],
        7,
        0.5,
        True,
        "reflect",
        [0.25, 0.75],
        2,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        format=torch.channels_last,
    )
    return out, many[0] + many[1]


def mutated(x: Any, y: Any) -> Any:
    z = x + y
    torch.ops.fixture.scale_(z, 3.0)
    return z


def factors(x: Any, b: Any) -> Any:
    q, r = torch.linalg.qr(x)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    solution = torch.linalg.solve_ex(x @ x.mT + torch.eye(4), b)[0]
    return q, r, u, s, v, solution


def counts(x: Any) -> Any:
    values, inverse, count = torch.unique(x, return_inverse=True, return_counts=True)
    return values, inverse, count, torch.median(x), torch.nanmedian(x, 0).values


def samples(x: Any) -> Any:
    return torch.multinomial(x.softmax(-1), x.shape[1] - 1), torch.special.i0e(x), torch.polygamma(2, x.abs() + 1)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "mixed": (mixed, (torch.randn(2, 3), torch.randn(2, 3)), {0: torch.export.Dim("rows", min=2, max=64)}),
    "mutated": (mutated, (torch.randn(2, 3), torch.randn(2, 3)), None),
    "factors": (factors, (torch.randn(4, 4), torch.randn(4, 2)), None),
    "counts": (counts, (torch.randn(6),), None),
    "samples": (samples, (torch.randn(2, 5),), {1: torch.export.Dim("columns", min=3, max=64)}),
}


def compile_case(function: Callable[..., Any], inputs: tuple[Any, ...], dynamic: Any) -> dict[str, Any]:
    class Model(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    shapes = (tuple(dynamic for _ in inputs),) if dynamic else None
    program = torch.export.export(Model(), inputs, dynamic_shapes=shapes)
    with tempfile.TemporaryDirectory() as folder:
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            code = archive.read(next(n for n in names if n.endswith(".wrapper.cpp"))).decode()
            found = [
                json.loads(archive.read(n)) for n in names if n.endswith(".json") and b'"nodes"' in archive.read(n)
            ]
    calls = re.findall(
        r"proxy_executor_call_function\(proxy_executor, (\d+), (\d+), (.*?), (\d+), std::array<AtenTensorHandle",
        code,
    )
    return {
        "torch": torch.__version__,
        "calls": [{"node": int(c[0]), "num_ints": int(c[1]), "num_tensors": int(c[3])} for c in calls],
        **found[0],
    }


def main() -> None:
    torch.manual_seed(0)
    for name in sys.argv[1:] or CASES:
        fixture = compile_case(*CASES[name])
        (HERE / f"extern_nodes_{name}.json").write_text(json.dumps(fixture, indent=1) + "\n")


if __name__ == "__main__":
    main()
