"""Compiles the model of test_values.py: ``python value_models.py own_dynamic|own_static|stock_… PATH``."""

from __future__ import annotations

import sys
from typing import Any

import torch

# A process that compiles one model does not gain from precompiled headers.
STOCK_BUILD = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}

ROWS, WIDTH = 100, 8


class Values(torch.nn.Module):
    """Every way to use an index, each with one of its own, and integer divisions."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH)
        self.embedding = torch.nn.Embedding(ROWS, WIDTH, _weight=table.clone())
        self.register_buffer("table", table)

    def forward(
        self,
        embedding: torch.Tensor,
        gather: torch.Tensor,
        index: torch.Tensor,
        index_put: torch.Tensor,
        accumulate: torch.Tensor,
        scatter: torch.Tensor,
        scatter_add: torch.Tensor,
        scatter_reduce: torch.Tensor,
        take_along: torch.Tensor,
        select: torch.Tensor,
        bag: torch.Tensor,
        divide: torch.Tensor,
        floor_divide: torch.Tensor,
        remainder: torch.Tensor,
        fmod: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        ones = torch.ones_like(embedding, dtype=torch.float32)
        numerator = torch.full_like(divide, 7)
        rows = ones[:, None].expand(-1, WIDTH)
        flat = self.table[:, 0]
        return {
            "embedding": self.embedding(embedding),
            "gather": torch.gather(self.table, 0, gather[:, None].expand(-1, WIDTH)),
            "index": self.table[index] * 2,
            "index_put": self.table.index_put((index_put,), rows),
            "accumulate": self.table.index_put((accumulate,), rows, accumulate=True),
            "scatter": flat.scatter(0, scatter, ones),
            "scatter_add": flat.scatter_add(0, scatter_add, ones),
            "scatter_reduce": flat.scatter_reduce(0, scatter_reduce, ones * 1000, "amax"),
            "take_along": torch.take_along_dim(self.table, take_along[:, None], 0) + 1,
            "select": self.table[select] + 1,
            "bag": torch.nn.functional.embedding_bag(bag, self.table, torch.zeros(1, dtype=torch.int64)),
            "divide": torch.div(numerator, divide, rounding_mode="trunc"),
            "floor_divide": numerator // floor_divide,
            "remainder": numerator % remainder,
            "fmod": torch.fmod(numerator, fmod),
        }


def main(kind: str, path: str) -> None:
    maker, sizes = kind.split("_")
    length = 40_000 if sizes == "dynamic" else 6
    ids = torch.ones(length, dtype=torch.int64)
    args = tuple(ids[0].clone() if name == "select" else ids.clone() for name in NAMES)
    n = torch.export.Dim("n", min=1, max=1 << 20)
    shapes: Any = None
    if sizes == "dynamic":
        shapes = tuple(None if name == "select" else {0: n} for name in NAMES)
    model = Values().eval()
    if maker == "own":
        from untorch.export import export

        export(model, args, path, dynamic_shapes=shapes)
        return
    with torch.no_grad():
        program = torch.export.export(model, args, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=STOCK_BUILD)


NAMES = (
    "embedding", "gather", "index", "index_put", "accumulate", "scatter", "scatter_add", "scatter_reduce", "take_along",
    "select", "bag", "divide", "floor_divide", "remainder", "fmod",
)  # fmt: skip

if __name__ == "__main__":
    main(*sys.argv[1:])
