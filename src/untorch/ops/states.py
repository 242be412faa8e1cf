"""State pools: what recurrent layers keep of each sequence, for operators that read and write it.

``states`` [slots, elements], float32, is one tensor for several layers: each has its own part of a row, from ``offset``
on. Tokens lie one behind the other: those of sequence s are cu_seqlens_q[s] to cu_seqlens_q[s + 1], and the last of its
seqlens_k[s] positions. A sequence whose tokens are all of its positions begins: its state is zero, whatever its slot
``state_slots[s]`` holds. The state behind the last token goes to the slot. Slot -1: padding, which begins at zero and
writes nowhere; so do sequences without tokens. No two sequences of a call may have one slot.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["DTYPES", "check_states", "runs"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_states(
    operator: str,
    states: torch.Tensor,
    state_slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    offset: int,
    needed: int,
) -> None:
    """Raises ValueError for shapes, dtypes and numbers that do not fit together."""
    if states.dtype != torch.float32 or states.dim() != 2:
        raise ValueError(
            f"{operator}: states: expected torch.float32 [slots, elements], got {states.dtype} {tuple(states.shape)}"
        )
    if offset < 0 or states.shape[1] < offset + needed:
        raise ValueError(
            f"{operator}: states: expected rows of {offset + needed} elements or more, got {states.shape[1]}"
        )
    for name, tensor in (("state_slots", state_slots), ("cu_seqlens_q", cu_seqlens_q), ("seqlens_k", seqlens_k)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1:
            raise ValueError(
                f"{operator}: {name}: expected torch.int32 [sequences], got {tensor.dtype} {tuple(tensor.shape)}"
            )


def runs(
    operator: str, slots: int, state_slots: torch.Tensor, cu_seqlens_q: torch.Tensor, seqlens_k: torch.Tensor
) -> Iterator[tuple[int, int, int, bool]]:
    """Of each sequence with tokens: its first token, its last one's successor, its slot, whether it begins."""
    ends = cu_seqlens_q.tolist()
    for begin, end, slot, length in zip(
        ends[:-1], ends[1:], state_slots.tolist(), seqlens_k.tolist(), strict=True
    ):  # fmt: skip
        if begin == end:
            continue
        if not -1 <= slot < slots:
            raise ValueError(f"{operator}: state_slots: expected -1 to {slots - 1}, got {slot}")
        yield begin, end, slot, slot < 0 or length == end - begin
