"""Patches that keep RNN, LSTM and GRU modules whole while a model is traced, whatever the length of their sequences."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from untorch.export.errors import CompileError
from untorch.export.patches.registry import patch, replaced
from untorch.ops.recurrent import MODULE_OPERATOR

__all__ = ["packed_sequences", "recurrent_shapes"]

_OPERATORS = (
    torch.ops.aten.rnn_tanh.input, torch.ops.aten.rnn_relu.input, torch.ops.aten.gru.input, torch.ops.aten.lstm.input,
)  # fmt: skip
_KEY = torch._C.DispatchKey.CompositeImplicitAutograd


def _shapes(original: Callable[..., Any], projects: bool) -> Callable[..., Any]:
    """The results of a module on fake tensors, without a loop over its steps. projects: it is an LSTM."""

    def kernel(input: torch.Tensor, hx: Any, params: Sequence[torch.Tensor], *flags: Any) -> Any:
        states = list(hx) if projects else [hx]
        _has_biases, _layers, _dropout, train, bidirectional, batch_first = flags
        if not isinstance(input, FakeTensor) or train:
            return original(input, hx, params, *flags)
        steps, batch = (input.shape[1], input.shape[0]) if batch_first else (input.shape[0], input.shape[1])
        out = input.new_empty((steps, batch, states[0].shape[-1] * (2 if bidirectional else 1)))
        return (out.transpose(0, 1) if batch_first else out, *(state.new_empty(state.shape) for state in states))

    return kernel


@patch(
    "torch.ops.aten.rnn_tanh.input",
    "torch.ops.aten.rnn_relu.input",
    "torch.ops.aten.gru.input",
    "torch.ops.aten.lstm.input",
    versions="2.11–2.15",
    why="Their shapes are computed by a loop over the steps, which makes a dynamic length a constant and takes minutes "
    "for long sequences.",
    test="test_recurrent.py::test_torch_still_unrolls_sequences",
)
@contextlib.contextmanager
def recurrent_shapes() -> Iterator[None]:
    """The four operators stay one node while a model is traced; torch does not warn of their list of weights."""
    old = [operator.py_kernels.get(_KEY) for operator in _OPERATORS]
    try:
        for operator, kernel in zip(_OPERATORS, old, strict=True):
            operator.py_kernels[_KEY] = _shapes(kernel or operator, operator is torch.ops.aten.lstm.input)
            operator._dispatch_cache.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=r"(?s).*_flat_weights.* assigned during export", category=UserWarning
            )
            yield
    finally:
        for operator, kernel in zip(_OPERATORS, old, strict=True):
            if kernel is None:
                del operator.py_kernels[_KEY]
            else:
                operator.py_kernels[_KEY] = kernel
            operator._dispatch_cache.clear()


class _Ragged:
    """Stands in for a PackedSequence: padded sequences, time first, and their lengths."""

    def __init__(self, padded: torch.Tensor, lengths: torch.Tensor) -> None:
        self.padded, self.lengths = padded, lengths

    def __getattr__(self, name: str) -> NoReturn:
        raise CompileError(
            f"a packed sequence is padded while it is exported, and has no {name}: give it to nn.RNN, nn.LSTM, "
            "nn.GRU or pad_packed_sequence, and compute everything else on padded tensors"
        )

    def __iter__(self) -> NoReturn:
        self.__getattr__("parts")


def _pack(
    input: torch.Tensor, lengths: torch.Tensor | list[int], batch_first: bool = False, enforce_sorted: bool = True
) -> _Ragged:
    """``pack_padded_sequence``; the order of the sequences stays."""
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.tensor(lengths, dtype=torch.int64)
    return _Ragged(input.transpose(0, 1) if batch_first else input, lengths.to(torch.int64))


def _pad(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``pad_packed_sequence``."""
    padded, lengths = sequence.padded, sequence.lengths
    steps = padded.shape[0]
    if padding_value != 0.0:
        outside = torch.arange(steps, device=padded.device)[:, None] >= lengths.to(padded.device)[None]
        padded = padded.masked_fill(outside[..., None], padding_value)
    if total_length is None:
        longest = lengths.max().item()
        torch._check(longest >= 1)  # type: ignore[no-untyped-call]
        torch._check(longest <= steps)  # type: ignore[no-untyped-call]
        padded = padded[:longest]
    elif total_length != steps:
        padded = nn.functional.pad(padded, (0, 0, 0, 0, 0, total_length - steps), value=padding_value)
    return (padded.transpose(0, 1) if batch_first else padded), lengths


def _forward(original: Callable[..., Any], cell_of: Callable[[Any], str]) -> Callable[..., Any]:
    """``forward`` of a recurrent module, which takes what ``_pack`` made as well."""

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, _Ragged):
            return original(self, input, hx)
        if self.training or getattr(self, "proj_size", 0):
            raise CompileError(
                "packed sequences are exported for modules in eval() mode and without proj_size: call model.eval(), or "
                "pad the sequences and mask the result"
            )
        cell = cell_of(self)
        x = input.padded
        if hx is None:
            zeros = x.new_zeros((self.num_layers * (2 if self.bidirectional else 1), x.shape[1], self.hidden_size))
            hx = (zeros, zeros) if cell == "lstm" else zeros
        states = list(hx) if cell == "lstm" else [hx]
        lengths = input.lengths.to(x.device)  # PyTorch has them on the CPU
        out, h, c = MODULE_OPERATOR(
            x, states, list(self._flat_weights), lengths, cell, self.bias, self.num_layers, self.bidirectional
        )
        return _Ragged(out, input.lengths), ((h, c) if cell == "lstm" else h)

    return forward


@patch(
    "torch.nn.utils.rnn.pack_padded_sequence",
    "torch.nn.utils.rnn.pad_packed_sequence",
    "torch.nn.RNN.forward",
    "torch.nn.LSTM.forward",
    "torch.nn.GRU.forward",
    versions="2.11–2.15",
    why="torch.export cannot trace packed sequences: the batch size of each step depends on data.",
    test="test_recurrent.py::test_torch_still_refuses_packed_sequences",
)
@contextlib.contextmanager
def packed_sequences() -> Iterator[None]:
    """Packed sequences become padded ones with lengths, and a module on them one operator."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(nn.utils.rnn, "pack_padded_sequence", _pack))
        stack.enter_context(replaced(nn.utils.rnn, "pad_packed_sequence", _pad))
        for module, cell in (
            (nn.RNN, lambda self: self.nonlinearity), (nn.LSTM, lambda self: "lstm"), (nn.GRU, lambda self: "gru"),
        ):  # fmt: skip
            stack.enter_context(replaced(module, "forward", _forward(module.forward, cell)))
        yield
