"""For torch.compile: layers that an object of this process computes, opaque to the compiler. Never in a .pt2 file.

A kernel library often comes as an object with its own weights and workspace. ``RunnerLinear`` and ``RunnerMoE`` call
such an object as one operator, ``untorch::run_linear`` or ``untorch::run_moe``.
"""

from untorch.torch_compile.modules import RunnerLinear, RunnerMoE
from untorch.torch_compile.runners import (
    LinearRunner,
    MoERunner,
    RunnerError,
    find_runner,
    register_runner,
    registered,
    run_linear,
    run_moe,
    unregister_runner,
)

__all__ = [
    "LinearRunner",
    "MoERunner",
    "RunnerError",
    "RunnerLinear",
    "RunnerMoE",
    "find_runner",
    "register_runner",
    "registered",
    "run_linear",
    "run_moe",
    "unregister_runner",
]
