"""``untorch::recurrent_steps``: the steps of a layer of an RNN, LSTM or GRU on a GPU, behind the input's linear layer.

input_gates [steps, batch, directions · gates · hidden], w_hidden [directions, gates · hidden, hidden], bias_hidden
[directions, gates · hidden] or None, hx and cx [directions, batch, hidden], all of one dtype; gates as PyTorch orders
them. Direction 0 takes the steps forwards, direction 1 backwards. Row n takes part in the steps below ``lengths[n]``;
in the others its state stays, and its output is 0. Gives the outputs [steps, batch, directions · hidden] and the last
states; the cell state of cells that have none is empty. States are float32 between steps. The implementation here is
the reference; libuntorch.so has the fast one.
"""

from __future__ import annotations

import torch

from untorch.ops.recurrent import CELLS, check_operands, run_steps

__all__ = ["C_SHIM", "DTYPES", "OPERATOR", "recurrent_steps"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

C_SHIM = (
    "AOTITorchError aoti_torch_cuda_recurrent_steps(AtenTensorHandle input_gates, AtenTensorHandle w_hidden, "
    "AtenTensorHandle* bias_hidden, AtenTensorHandle hx, AtenTensorHandle* cx, AtenTensorHandle* lengths, "
    "const char* cell, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2)"
)


def _check(
    input_gates: torch.Tensor,
    w_hidden: torch.Tensor,
    bias_hidden: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    cell: str,
) -> None:
    if cell not in CELLS:
        raise ValueError(f"recurrent_steps: cell: expected one of {', '.join(CELLS)}, got {cell!r}")
    if input_gates.dim() != 3 or hx.dim() != 3 or hx.shape[0] not in (1, 2):
        raise ValueError(
            "recurrent_steps: expected input_gates [steps, batch, directions * gates * hidden] and hx [directions, "
            f"batch, hidden] with 1 or 2 directions, got {tuple(input_gates.shape)} and {tuple(hx.shape)}"
        )
    if input_gates.dtype not in DTYPES:
        raise ValueError(
            f"recurrent_steps: input_gates: expected float32, bfloat16 or float16, got {input_gates.dtype}"
        )
    if (cx is not None) != (cell == "lstm"):
        raise ValueError(f"recurrent_steps: cx: {'is missing' if cx is None else 'is for an LSTM only'}")
    dtype, (directions, _, hidden) = input_gates.dtype, hx.shape
    steps, batch = input_gates.shape[:2]
    gates = CELLS[cell] * hidden
    operands = (
        ("input_gates", input_gates, dtype, (steps, batch, directions * gates)),
        ("w_hidden", w_hidden, dtype, (directions, gates, hidden)),
        ("bias_hidden", bias_hidden, dtype, (directions, gates)),
        ("hx", hx, dtype, (directions, batch, hidden)),
        ("cx", cx, dtype, (directions, batch, hidden)),
        ("lengths", lengths, torch.int64, (batch,)),
    )
    check_operands("recurrent_steps", operands)


@torch.library.custom_op("untorch::recurrent_steps", mutates_args=())
def recurrent_steps(
    input_gates: torch.Tensor,
    w_hidden: torch.Tensor,
    bias_hidden: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    cell: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The layer's outputs, last hidden state and last cell state. Raises ValueError."""
    _check(input_gates, w_hidden, bias_hidden, hx, cx, lengths, cell)
    dtype = input_gates.dtype
    outs, last, last_cells = [], [], []
    for direction, gates in enumerate(input_gates.float().chunk(hx.shape[0], -1)):
        bias = None if bias_hidden is None else bias_hidden[direction].float()
        states = hx[direction].float(), gates.new_empty(0) if cx is None else cx[direction].float()
        out, h, c = run_steps(cell, gates, w_hidden[direction].float(), bias, *states, lengths, direction == 1)
        outs.append(out)
        last.append(h)
        last_cells.append(c)
    cells = input_gates.new_empty(0) if cx is None else torch.stack(last_cells).to(dtype)
    return torch.cat(outs, -1).to(dtype), torch.stack(last).to(dtype), cells


@recurrent_steps.register_fake
def _recurrent_steps_fake(
    input_gates: torch.Tensor,
    w_hidden: torch.Tensor,
    bias_hidden: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    cell: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(input_gates, w_hidden, bias_hidden, hx, cx, lengths, cell)
    out = input_gates.new_empty((*input_gates.shape[:2], hx.shape[0] * hx.shape[2]))
    return out, hx.new_empty(hx.shape), input_gates.new_empty(0 if cx is None else cx.shape)


OPERATOR = torch.ops.untorch.recurrent_steps.default
