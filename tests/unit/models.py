"""Compiles the small models of the tests: ``python models.py KIND PATH``."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch


class Linear(torch.nn.Module):
    """y = x·Wᵀ + b with 0, 1, 2 … as weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(12.0).reshape(3, 4))
            self.linear.bias.copy_(torch.tensor([10.0, 20.0, 30.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Alias(torch.nn.Module):
    """Outputs that are an input, a part of a weight, and a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, self.table[1], x * 2


class Types(torch.nn.Module):
    """Arrays of many dtypes, given back as they came, beside one new tensor."""

    def forward(self, tensors: list[torch.Tensor], scale: torch.Tensor) -> dict[str, Any]:
        return {"same": tensors, "scaled": scale * 2, "pair": (tensors[0] + 1, None)}


class Counter(torch.nn.Module):
    """Counts its calls in a buffer; the values differ, as a uniform buffer may be folded into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([0.0, 0.5, 0.0, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


class Cache(torch.nn.Module):
    """Eight rows, how many of them are filled, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(4, 4, generator=generator))
        self.register_buffer("rows", torch.full((8, 4), 0.25))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))


class Put(Cache):
    """Writes a row and counts; gives the number of rows before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.filled.clone()
        self.rows.index_copy_(0, self.filled.reshape(1), (x @ self.weight)[None])
        self.filled += 1
        return before


class Get(Cache):
    """Only reads: all rows, weighed, and their number."""

    def forward(self, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows * scale, self.filled + 0


class Stateless(Cache):
    """Uses the weight alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Dynamic(torch.nn.Module):
    """Sizes that vary, that must agree, and that are twice another; strides that depend on one."""

    def forward(
        self, x: torch.Tensor, i: torch.Tensor, t: torch.Tensor, v: torch.Tensor, fixed: torch.Tensor
    ) -> torch.Tensor:
        n = t.shape[1]
        return (x + t.sum(1)) * i[:, None] + (v[:n] - v[n:]).sum() + fixed.sum((1, 2))


class Tree(torch.nn.Module):
    """A dict and a keyword in, a tree out."""

    def forward(self, d: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, Any]:
        a, b = d["a"], d["b"]
        return {"s": (a + b) * scale, "in": a, "l": [a.sum(0), None]}


class Forms(torch.nn.Module):
    """A dict, a list of a tuple, a flag and a keyword in; a list and a dict out."""

    def forward(
        self, d: dict[str, torch.Tensor], items: list[Any], double: bool, *, scale: torch.Tensor
    ) -> tuple[Any, ...]:
        (first, second), third = items
        factor = 2 if double else 1
        return [d["a"] * scale, None], {"b": d["b"] * factor, "c": (first + second, third + 1)}


class Rows(torch.nn.Module):
    """Inputs and outputs of some dtypes, a row each."""

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        scaled = ids * scale[:, None]
        return {"scaled": scaled, "total": scaled.sum(1), "half": scaled.to(torch.bfloat16), "odd": ids % 2 == 1}


class Embed(torch.nn.Module):
    """Token vectors averaged over the real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 8)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        weights = attention_mask.unsqueeze(-1).to(torch.float32)
        return (self.table(input_ids) * weights).sum(1) / weights.sum(1)


class Half(torch.nn.Module):
    """bfloat16 in and out, without a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def types_inputs() -> tuple[Any, ...]:
    """One array of each dtype that numpy or ml_dtypes has."""
    names = (
        "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64",
        "complex128",
    )  # fmt: skip
    return [torch.ones(2, 3).to(getattr(torch, name)) for name in names], torch.ones(())


def main(kind: str, path: str) -> None:
    """Compiles the model ``kind`` to ``path``."""
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    if kind == "own":
        from untorch.export import export

        export(
            methods={
                "linear": {
                    "model": Linear(),
                    "args": (x,),
                    "dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=64)},),
                },
                "alias": (Alias(), (torch.randn(4),)),
                "types": (Types(), types_inputs()),
                "counter": (Counter(), (torch.randn(4),)),
            },
            path=path,
        )
        return
    if kind == "forms":
        from untorch.export import export

        a, b, c, d, e = (torch.randn(4) for _ in range(5))
        export(Forms(), ({"a": a, "b": b}, [(c, d), e], True), path, kwargs={"scale": torch.ones(())})
        return
    if kind == "rows":
        from untorch.export import export

        batch, length = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("length", min=2, max=32)
        rows = {
            "model": Rows(),
            "args": (torch.arange(6).reshape(2, 3), torch.ones(2)),
            "dynamic_shapes": ({0: batch, 1: length}, {0: batch}),
        }
        ids = torch.arange(6).reshape(2, 3)
        embed = {
            "model": Embed(),
            "args": (ids, torch.ones_like(ids)),
            "dynamic_shapes": ({0: batch, 1: length}, {0: batch, 1: length}),
        }
        half = (Half(), (torch.ones(2, 3, dtype=torch.bfloat16),))
        export(methods={"rows": rows, "embed": embed, "half": half}, path=path)
        return
    if kind == "cache":
        from untorch.export import export

        x, scale = torch.randn(4), torch.ones(())
        methods = {"put": (Put(), (x,)), "get": (Get(), (scale,)), "plain": (Stateless(), (x,))}
        export(methods=methods, path=path)
        return
    model, args, kwargs, sizes = Linear(), (x,), None, None
    if kind == "stock_dynamic":
        model = Dynamic()
        args = (torch.randn(2, 4), torch.arange(2), torch.randn(6, 4).T, torch.randn(12), torch.randn(4, 1, 3))
        batch, n = torch.export.Dim("batch", max=15), torch.export.Dim("n", min=3, max=64)
        sizes = ({0: batch}, {0: batch}, {1: n}, {0: 2 * n}, None)
    if kind == "stock_tree":
        model, args, kwargs = Tree(), ({"a": torch.ones(3, 4), "b": torch.ones(3, 4)},), {"scale": torch.ones(())}
    # A process that compiles one model does not gain from precompiled headers.
    configs = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    if kind == "stock_blob":
        configs |= {
            "aot_inductor.package_constants_in_so": False,
            "aot_inductor.package_constants_on_disk_format": "binary_blob",
        }
    with torch.no_grad():
        program = torch.export.export(model.eval(), args, kwargs, dynamic_shapes=sizes)
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=configs)
    assert pathlib.Path(path).exists()


if __name__ == "__main__":
    main(*sys.argv[1:])
