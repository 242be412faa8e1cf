"""``untorch::recurrent_layer``: one direction of one layer of an RNN, LSTM or GRU, with packed weights.

input [steps, batch, inputs], hx and cx [batch, hidden]; the weights W [gates · hidden, inputs or hidden] as
``packed_linear.pack_weight`` packs them; gates as PyTorch orders them. Row n takes part in the steps below
``lengths[n]``; in the others its state stays, and its output is 0. Gives the outputs [steps, batch, hidden] and the
last states; the cell state of cells that have none is empty. float32 only, but for the weights of the hidden state,
which may be bfloat16: a step then reads half of the bytes, and computes in float32 as otherwise. The implementation
here is the reference; libuntorch.so has the fast one for CPUs. GPUs have ``untorch::recurrent_steps``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from untorch.ops.packed_linear import BLOCK, pack_weight, unpack_weight

__all__ = [
    "CELLS",
    "C_SHIM",
    "MODULE_OPERATOR",
    "OPERATOR",
    "check_operands",
    "recurrent",
    "recurrent_layer",
    "run_steps",
]

# Gates by cell.
CELLS = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}

C_SHIM = (
    "AOTITorchError aoti_torch_cpu_recurrent_layer(AtenTensorHandle input, AtenTensorHandle w_input, "
    "AtenTensorHandle w_hidden, AtenTensorHandle* bias_input, AtenTensorHandle* bias_hidden, AtenTensorHandle hx, "
    "AtenTensorHandle* cx, AtenTensorHandle* lengths, const char* cell, int32_t reverse, AtenTensorHandle* ret0, "
    "AtenTensorHandle* ret1, AtenTensorHandle* ret2)"
)


def _check(
    input: torch.Tensor,
    w_input: torch.Tensor,
    w_hidden: torch.Tensor,
    bias_input: torch.Tensor | None,
    bias_hidden: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    cell: str,
) -> None:
    if cell not in CELLS:
        raise ValueError(f"recurrent_layer: cell: expected one of {', '.join(CELLS)}, got {cell!r}")
    if input.dim() != 3 or hx.dim() != 2:
        raise ValueError(
            f"recurrent_layer: expected input [steps, batch, inputs] and hx [batch, hidden], got {tuple(input.shape)} "
            f"and {tuple(hx.shape)}"
        )
    if (cx is not None) != (cell == "lstm"):
        raise ValueError(f"recurrent_layer: cx: {'is missing' if cx is None else 'is for an LSTM only'}")
    _, batch, inputs = input.shape
    hidden = hx.shape[1]
    gates = CELLS[cell] * hidden
    panels = -(-gates // BLOCK)
    if w_hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"recurrent_layer: w_hidden: expected torch.float32 or torch.bfloat16, got {w_hidden.dtype}")
    packed = (panels, hidden, BLOCK) if w_hidden.dtype == torch.float32 else (panels, -(-hidden // 2), BLOCK, 2)
    operands = (
        ("input", input, torch.float32, tuple(input.shape)),
        ("w_input", w_input, torch.float32, (panels, inputs, BLOCK)),
        ("w_hidden", w_hidden, w_hidden.dtype, packed),
        ("bias_input", bias_input, torch.float32, (gates,)),
        ("bias_hidden", bias_hidden, torch.float32, (gates,)),
        ("hx", hx, torch.float32, (batch, hidden)),
        ("cx", cx, torch.float32, (batch, hidden)),
        ("lengths", lengths, torch.int64, (batch,)),
    )
    check_operands("recurrent_layer", operands)


def check_operands(
    operator: str, operands: Sequence[tuple[str, torch.Tensor | None, torch.dtype, tuple[Any, ...]]]
) -> None:
    """Raises ValueError unless each, if it is there, has its dtype and shape."""
    for name, tensor, dtype, shape in operands:
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise ValueError(f"{operator}: {name}: expected {dtype}, got {tensor.dtype}")
        if tensor.dim() != len(shape) or any(a != b for a, b in zip(tensor.shape, shape, strict=True)):
            raise ValueError(f"{operator}: {name}: expected the shape {shape}, got {tuple(tensor.shape)}")


def run_steps(
    cell: str,
    gates: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    h: torch.Tensor,
    c: torch.Tensor,
    lengths: torch.Tensor | None,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One direction. gates: the input's share of all steps; c is empty where the cell has none."""
    out = gates.new_zeros((*gates.shape[:2], h.shape[1]))
    steps = range(gates.shape[0])
    for t in reversed(steps) if reverse else steps:
        x, y = gates[t].chunk(CELLS[cell], -1), torch.nn.functional.linear(h, weight, bias).chunk(CELLS[cell], -1)
        fresh, fresh_c = _next_state(cell, x, y, h, c)
        if lengths is None:
            h, c, out[t] = fresh, fresh_c, fresh
            continue
        active = (t < lengths)[:, None]
        h, out[t] = torch.where(active, fresh, h), torch.where(active, fresh, 0.0)
        if cell == "lstm":
            c = torch.where(active, fresh_c, c)
    return out, h, c


def _next_state(
    cell: str, x: Sequence[torch.Tensor], y: Sequence[torch.Tensor], h: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden and an LSTM's cell state behind a step. x, y: the input's and the state's shares of the gates."""
    if cell == "lstm":
        i, f, g, o = (a + b for a, b in zip(x, y, strict=True))
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if cell == "gru":
        reset, update = (x[0] + y[0]).sigmoid(), (x[1] + y[1]).sigmoid()
        new = (x[2] + reset * y[2]).tanh()
        return new + update * (h - new), c
    return ((x[0] + y[0]).tanh() if cell == "tanh" else (x[0] + y[0]).relu()), c


@torch.library.custom_op("untorch::recurrent_layer", mutates_args=())
def recurrent_layer(
    input: torch.Tensor,
    w_input: torch.Tensor,
    w_hidden: torch.Tensor,
    bias_input: torch.Tensor | None,
    bias_hidden: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    cell: str,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The layer's outputs, last hidden state and last cell state. Raises ValueError."""
    _check(input, w_input, w_hidden, bias_input, bias_hidden, hx, cx, lengths, cell)
    gates = CELLS[cell] * hx.shape[1]
    w_input, w_hidden = (
        unpack_weight(w_input, gates, input.shape[2]),
        unpack_weight(w_hidden, gates, hx.shape[1]).float(),
    )
    shares = torch.nn.functional.linear(input, w_input, bias_input)
    states = hx, input.new_empty(0) if cx is None else cx
    out, h, c = run_steps(cell, shares, w_hidden, bias_hidden, *states, lengths, reverse)
    return out, h.clone(), c.clone()


@recurrent_layer.register_fake
def _recurrent_layer_fake(
    input: torch.Tensor,
    w_input: torch.Tensor,
    w_hidden: torch.Tensor,
    bias_input: torch.Tensor | None,
    bias_hidden: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    cell: str,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(input, w_input, w_hidden, bias_input, bias_hidden, hx, cx, lengths, cell)
    out = input.new_empty((*input.shape[:2], hx.shape[1]))
    return out, hx.new_empty(hx.shape), input.new_empty(0 if cx is None else cx.shape)


OPERATOR = torch.ops.untorch.recurrent_layer.default


@torch.library.custom_op("untorch::recurrent", mutates_args=())
def recurrent(
    input: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    lengths: torch.Tensor,
    cell: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A whole module on sequences of several lengths: what a packed sequence becomes while a model is traced.

    Arguments as ``aten::lstm.input`` has them, time first. The pass serve_recurrent makes layers of it.
    """
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    states: list[list[torch.Tensor]] = [[], []]
    for layer in range(num_layers):
        outs = []
        for direction in range(directions):
            k = layer * directions + direction
            w_input, w_hidden, *biases = params[k * each : (k + 1) * each]
            first, second = biases or (None, None)
            out, h, c = recurrent_layer(
                input, pack_weight(w_input), pack_weight(w_hidden), first, second, hx[0][k],
                hx[1][k] if len(hx) > 1 else None, lengths, cell, direction == 1,
            )  # fmt: skip
            outs.append(out)
            states[0].append(h)
            states[1].append(c)
        input = torch.cat(outs, -1)
    return input.clone(), torch.stack(states[0]), torch.stack(states[1])


@recurrent.register_fake
def _recurrent_fake(
    input: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    lengths: torch.Tensor,
    cell: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = hx[0].shape[-1] * (2 if bidirectional else 1)
    c = hx[1].new_empty(hx[1].shape) if len(hx) > 1 else input.new_empty((hx[0].shape[0], 0))
    return input.new_empty((*input.shape[:2], width)), hx[0].new_empty(hx[0].shape), c


MODULE_OPERATOR = torch.ops.untorch.recurrent.default
