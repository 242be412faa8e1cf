"""``untorch::run_linear`` and ``untorch::run_moe``: a layer that an object of this process computes.

A runner has run_linear(x) or run_moe(hidden_states, topk_weights, topk_ids). A graph holds its id, a number that
``register_runner`` gives, and the size of the result; so torch.compile needs nothing else, and never looks inside.

No id is given twice, so a graph that was compiled for one runner never meets another.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from untorch.runtime.errors import InvalidArgumentError, UntorchError

__all__ = [
    "RUN_LINEAR", "RUN_MOE", "LinearRunner", "MoERunner", "RunnerError", "find_runner",
    "register_runner", "registered", "run_linear", "run_moe", "unregister_runner",
]  # fmt: skip

_METHODS = ("run_linear", "run_moe")
_ALIGNMENT = 16  # Inductor's kernels rely on it for what an operator returns
_NAMED_IN_ERRORS = 16


class RunnerError(UntorchError, RuntimeError):
    """A runner is gone, lacks a method, or gave a result that the model was not promised."""


class LinearRunner(Protocol):
    """What ``untorch::run_linear`` calls."""

    def run_linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] to a tensor [..., out_features] of x's dtype and device; it writes to no argument.

        The result is the caller's: the runner neither keeps it nor writes to it later.
        """


class MoERunner(Protocol):
    """What ``untorch::run_moe`` calls."""

    def run_moe(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., K] to a tensor [..., hidden_size] of their dtype and device; it writes to no argument.

        topk_weights and topk_ids, [..., top_k] as a rule, come as the model has them. The result is the caller's.
        """


@dataclass(frozen=True)
class _Entry:
    name: str
    get: Callable[[], Any]  # gives None when a runner that is held weakly has gone


# Lookups and removals are single operations on the dictionary, without the lock: the end of a module removes its
# runner, which may happen in any thread at any allocation, also inside the lock.
_entries: dict[int, _Entry] = {}
_next_id = 1
_lock = threading.Lock()
# Runners may hold memory of a GPU, which goes before this module does.
atexit.register(_entries.clear)


def register_runner(runner: LinearRunner | MoERunner, *, weak: bool = False) -> int:
    """The id under which the operators find ``runner``; each call gives a new one, never one that was given before.

    The registry keeps the runner alive until ``unregister_runner``, with ``weak`` it does not. May be called from any
    thread. Raises InvalidArgumentError for an object that has neither run_linear nor run_moe, and with ``weak`` for one
    that cannot be referenced weakly.
    """
    if isinstance(runner, type) or not any(callable(getattr(runner, method, None)) for method in _METHODS):
        what = f"the class {runner.__qualname__}" if isinstance(runner, type) else type(runner).__qualname__
        raise InvalidArgumentError(
            f"register_runner: runner: expected an object with a method run_linear or run_moe, got {what}"
        )
    try:
        get: Callable[[], Any] = weakref.ref(runner) if weak else _strong(runner)
    except TypeError:
        raise InvalidArgumentError(
            f"register_runner: runner: {type(runner).__qualname__} cannot be referenced weakly: add "
            f'"__weakref__" to its __slots__, or leave weak=True out'
        ) from None
    global _next_id
    with _lock:
        runner_id, _next_id = _next_id, _next_id + 1
    _entries[runner_id] = _Entry(type(runner).__qualname__, get)
    return runner_id


def _strong(runner: Any) -> Callable[[], Any]:
    return lambda: runner


def unregister_runner(runner_id: int) -> None:
    """Forgets the runner; calls that run end as they would have. Raises InvalidArgumentError for an unknown id."""
    if not isinstance(runner_id, int) or _entries.pop(runner_id, None) is None:
        raise InvalidArgumentError(f"unregister_runner: {_unknown(runner_id)}")


@contextlib.contextmanager
def registered(runner: LinearRunner | MoERunner) -> Iterator[int]:
    """Gives ``register_runner``'s id, and unregisters it at the end, if nothing else did."""
    runner_id = register_runner(runner)
    try:
        yield runner_id
    finally:
        discard(runner_id)


def discard(runner_id: int) -> None:
    """As ``unregister_runner``, for an id that may be gone already."""
    _entries.pop(runner_id, None)


def find_runner(runner_id: int, caller: str = "find_runner") -> Any:
    """The registered runner.

    Raises InvalidArgumentError for an unknown id, and RunnerError if the runner was registered with ``weak`` and has
    gone; ``caller`` begins the text.
    """
    entry = _entries.get(runner_id) if isinstance(runner_id, int) else None
    if entry is None:
        raise InvalidArgumentError(f"{caller}: {_unknown(runner_id)}")
    runner = entry.get()
    if runner is None:
        raise RunnerError(
            f"{caller}: runner {runner_id} ({entry.name}) has gone: it was registered with weak=True and nothing else "
            f"kept it; keep it as long as models call it, or leave weak=True out"
        )
    return runner


@torch.library.custom_op(
    "untorch::run_linear", mutates_args=(), schema="(Tensor x, int runner_id, SymInt out_features) -> Tensor"
)
def run_linear(x: torch.Tensor, runner_id: int, out_features: int) -> torch.Tensor:
    """What the runner's run_linear(x) gives for x [..., in_features]: [..., out_features] in x's dtype, contiguous.

    A result that is not contiguous, is not aligned to 16 bytes, or lies in memory of x is copied. Raises ValueError for
    an x without dimensions and an id that is not registered, RunnerError for a runner that has gone or has no
    run_linear, or a result of another shape, dtype or device, and what the runner raises.
    """
    _check("run_linear", "x", x, "out_features", out_features)
    run = _method("run_linear", runner_id)
    return _owned("run_linear", runner_id, run(x), (*x.shape[:-1], out_features), x)


@run_linear.register_fake
def _run_linear_fake(x: torch.Tensor, runner_id: int, out_features: int) -> torch.Tensor:
    _check("run_linear", "x", x, "out_features", out_features)
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op(
    "untorch::run_moe",
    mutates_args=(),
    schema="(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, int runner_id, SymInt hidden_size) -> Tensor",
)
def run_moe(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    runner_id: int,
    hidden_size: int,
) -> torch.Tensor:
    """What the runner's run_moe gives: [..., hidden_size] for hidden_states [..., K], in their dtype, contiguous.

    topk_weights and topk_ids are for the runner to judge. Copies and errors are those of ``run_linear``.
    """
    _check("run_moe", "hidden_states", hidden_states, "hidden_size", hidden_size)
    run = _method("run_moe", runner_id)
    result = run(hidden_states, topk_weights, topk_ids)
    shape = (*hidden_states.shape[:-1], hidden_size)
    return _owned("run_moe", runner_id, result, shape, hidden_states, topk_weights, topk_ids)


@run_moe.register_fake
def _run_moe_fake(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    runner_id: int,
    hidden_size: int,
) -> torch.Tensor:
    _check("run_moe", "hidden_states", hidden_states, "hidden_size", hidden_size)
    return hidden_states.new_empty((*hidden_states.shape[:-1], hidden_size))


def _check(caller: str, name: str, tensor: torch.Tensor, size_name: str, size: int) -> None:
    if tensor.dim() < 1:
        raise ValueError(f"{caller}: {name}: expected at least one dimension, got a scalar")
    if isinstance(size, int) and size < 0:
        raise ValueError(f"{caller}: {size_name}: expected a size, got {size}")


def _method(name: str, runner_id: int) -> Callable[..., Any]:
    runner = find_runner(runner_id, name)
    method = getattr(runner, name, None)
    if not callable(method):
        other = next(method for method in _METHODS if method != name)
        raise RunnerError(f"{name}: runner {_label(runner_id)} has no method {name}; call untorch::{other} for it")
    found: Callable[..., Any] = method
    return found


def _owned(
    caller: str, runner_id: int, result: Any, shape: tuple[int, ...], x: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """The result, if it is as the fake promised, in memory of its own."""
    if not isinstance(result, torch.Tensor):
        raise RunnerError(
            f"{caller}: runner {_label(runner_id)}: expected a tensor {list(shape)} as its result, got "
            f"{type(result).__qualname__}"
        )
    if (tuple(result.shape), result.dtype, result.device, result.layout) != (shape, x.dtype, x.device, torch.strided):
        layout = "" if result.layout == torch.strided else f", {result.layout}"
        raise RunnerError(
            f"{caller}: runner {_label(runner_id)}: expected a result {_dtype(x)} {list(shape)} on {x.device}, got "
            f"{_dtype(result)} {list(result.shape)} on {result.device}{layout}"
        )
    if (
        result.stride() != _contiguous_strides(shape)
        or result.data_ptr() % _ALIGNMENT
        or any(_share_memory(result, tensor) for tensor in (x, *others))
    ):
        return result.detach().clone(memory_format=torch.contiguous_format)
    return result.detach()


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those that Inductor expects, also of dimensions of size 1, which torch calls contiguous with any stride."""
    steps = (max(size, 1) for size in reversed(shape[1:]))
    return tuple(itertools.accumulate(steps, operator.mul, initial=1))[::-1]


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """By addresses: a result that went through DLPack has a storage object of its own."""
    (first, last), (start, end) = _span(a), _span(b)
    return a.device == b.device and first < end and start < last


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _unknown(runner_id: int) -> str:
    known = sorted(_entries.copy())
    names = ", ".join(map(_label, known[:_NAMED_IN_ERRORS]))
    more = f" and {len(known) - _NAMED_IN_ERRORS} more" if len(known) > _NAMED_IN_ERRORS else ""
    was = ", which was unregistered" if isinstance(runner_id, int) and 0 < runner_id < _next_id else ""
    return (
        f"runner_id: expected the id of a registered runner, got {runner_id!r}{was}; known here are: "
        f"{names + more if known else 'none'}"
    )


def _label(runner_id: int) -> str:
    entry = _entries.get(runner_id)
    return str(runner_id) if entry is None else f"{runner_id} ({entry.name})"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


RUN_LINEAR = torch.ops.untorch.run_linear.default
RUN_MOE = torch.ops.untorch.run_moe.default
