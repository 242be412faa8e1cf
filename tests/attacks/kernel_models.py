"""Compiles models that call operators of our own, for Python kernels: ``python kernel_models.py KIND PATH``."""

from __future__ import annotations

import sys

import torch

# A process that compiles one model does not gain from precompiled headers.
STOCK_BUILD = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}


@torch.library.custom_op("attack::clip_scale", mutates_args=())
def clip_scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """One float32 result of the input's shape."""
    return x.clamp(-1, 1) * factor


@clip_scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("attack::parts", mutates_args=())
def parts(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The sum of the rows, a list of two, and the indices of what is not zero: a size that depends on values."""
    return x.sum(0), [x + 0, x + 1], x.nonzero()


@parts.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    indices = x.new_empty((count, x.dim()), dtype=torch.int64)
    return x.new_empty(x.shape[1:]), [torch.empty_like(x), torch.empty_like(x)], indices


class Clip(torch.nn.Module):
    """Generated code reads the kernel's result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return clip_scale(x, 3.0).sin() + 1


class Twice(torch.nn.Module):
    """The first result's memory is used again, and an input of the call goes to a kernel itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return clip_scale(clip_scale(x * 2, 1.0) * 2, 1.0) + 1


class Parts(torch.nn.Module):
    """Several results."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total, (first, second), indices = parts(x)
        return total.sin(), first * second, indices


class Counted(torch.nn.Module):
    """A call of the operator between two writes of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([0.0, 0.5, 0.0, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return clip_scale(x + self.count, 1.0) + self.count


class Long(torch.nn.Module):
    """Over half a second on one core, in generated code, with an operator every 25 ms.

    Sanitizers do not slow generated code, and would slow GEMMs of that time a hundred times.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(24):
            corner = x[:8, :8] @ x[:8, :8]
            x = x + corner[0, 0]
            for _ in range(10):
                x = (x + 1).sqrt().reciprocal()
        return x


def main(kind: str, path: str) -> None:
    """Compiles ``kind`` to ``path``."""
    from untorch import register_kernel
    from untorch.export import export

    for name in ("attack::clip_scale", "attack::parts"):
        register_kernel(name, lambda *_: None)  # the export looks for one
    rows = {0: torch.export.Dim("rows", min=1, max=64)}
    x = torch.randn(3, 4)
    if kind == "stock":
        with torch.no_grad():
            program = torch.export.export(Clip().eval(), (x,), dynamic_shapes=(rows,))
            torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=STOCK_BUILD)
        return
    methods = {
        "clip": {"model": Clip(), "args": (x,), "dynamic_shapes": (rows,)},
        "twice": {"model": Twice(), "args": (x,), "dynamic_shapes": (rows,)},
        "parts": {"model": Parts(), "args": (x,), "dynamic_shapes": (rows,)},
        "counted": (Counted(), (torch.randn(4),)),
        "long": (Long(), (torch.randn(4096, 2048),)),
    }
    export(methods=methods, path=path, progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
