"""Compiles the real model libraries of the attack tests: ``python models.py KIND PATH``."""

from __future__ import annotations

import sys

import torch

# A process that compiles one model does not gain from precompiled headers.
STOCK_BUILD = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}


class Lookup(torch.nn.Module):
    """Rows of a table through a layer, plus how often it was called. A row that is not there is an error in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(32.0).reshape(4, 8))
            self.linear.bias.copy_(torch.arange(4.0))
        self.table = torch.nn.Parameter(torch.arange(64.0).reshape(8, 8))
        self.register_buffer("count", torch.tensor([0.0, 0.5, 0.0, 0.0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return torch.relu(self.linear(self.table[rows])) + self.count


def main(kind: str, path: str) -> None:
    """Kinds: own, stock."""
    rows = torch.arange(4)
    with torch.no_grad():
        if kind == "own":
            from untorch.export import export

            export(Lookup().eval(), (rows,), path)
            return
        program = torch.export.export(Lookup().eval(), (rows,))
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=STOCK_BUILD)


if __name__ == "__main__":
    main(*sys.argv[1:])
