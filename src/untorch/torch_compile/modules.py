"""``RunnerLinear`` and ``RunnerMoE``: modules that call a runner, and keep it registered as long as they live."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from untorch.runtime.errors import InvalidArgumentError
from untorch.torch_compile.runners import (
    RUN_LINEAR,
    RUN_MOE,
    LinearRunner,
    MoERunner,
    discard,
    find_runner,
    register_runner,
)

__all__ = ["RunnerLinear", "RunnerMoE"]


class _Registration:
    """One id, which ends with the last module that has it: a copy of a module calls the same runner."""

    def __init__(self, runner: LinearRunner | MoERunner) -> None:
        self.runner_id = register_runner(runner)
        weakref.finalize(self, discard, self.runner_id)

    def __copy__(self) -> _Registration:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Registration:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise InvalidArgumentError(
            f"pickle: a module that calls runner {self.runner_id} cannot be pickled: the id means nothing in another "
            f"process; make the module there"
        )


class _RunnerModule(nn.Module):
    def __init__(self, method: str, runner: LinearRunner | MoERunner, size_name: str, size: int) -> None:
        super().__init__()
        if not callable(getattr(runner, method, None)):
            raise InvalidArgumentError(
                f"{type(self).__name__}: runner: expected an object with a method {method}, got "
                f"{type(runner).__qualname__}"
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InvalidArgumentError(f"{type(self).__name__}: {size_name}: expected a positive integer, got {size!r}")
        self._registration = _Registration(runner)
        self.runner_id = self._registration.runner_id

    @property
    def runner(self) -> Any:
        """The runner. Raises InvalidArgumentError if it was unregistered by hand."""
        return find_runner(self.runner_id, type(self).__name__)


class RunnerLinear(_RunnerModule):
    """y = runner.run_linear(x). Inference only: gradients do not flow through it.

    runner: an object with run_linear (``untorch.torch_compile.LinearRunner``). It is registered here, and unregistered
        when this module and its copies are gone. Its tensors are not parameters of the module.
    out_features: the last dimension of the result.
    """

    def __init__(self, runner: LinearRunner, out_features: int) -> None:
        super().__init__("run_linear", runner, "out_features", out_features)
        self.out_features = out_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the input's dtype."""
        y: torch.Tensor = RUN_LINEAR(input, self.runner_id, self.out_features)
        return y

    def extra_repr(self) -> str:
        """The size and the id."""
        return f"out_features={self.out_features}, runner_id={self.runner_id}"


class RunnerMoE(_RunnerModule):
    """y = runner.run_moe(hidden_states, topk_weights, topk_ids). Inference only: gradients do not flow through it.

    runner: an object with run_moe (``untorch.torch_compile.MoERunner``). It is registered here, and unregistered when
        this module and its copies are gone. Its tensors are not parameters of the module.
    hidden_size: the last dimension of the result.
    """

    def __init__(self, runner: MoERunner, hidden_size: int) -> None:
        super().__init__("run_moe", runner, "hidden_size", hidden_size)
        self.hidden_size = hidden_size

    def forward(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., hidden_size], in hidden_states' dtype; the runner says what it takes as weights and ids."""
        y: torch.Tensor = RUN_MOE(hidden_states, topk_weights, topk_ids, self.runner_id, self.hidden_size)
        return y

    def extra_repr(self) -> str:
        """The size and the id."""
        return f"hidden_size={self.hidden_size}, runner_id={self.runner_id}"
