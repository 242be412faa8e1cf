"""``Int8Embedding``, ``W8Embedding`` and ``Int4Embedding``: tables of embeddings in the layouts of linear layers.

So a linear layer that is tied to the table, such as ``lm_head``, has the same tensors. A call gathers the rows of its
ids and dequantises those alone, in operators that Inductor compiles into one loop, on CPUs and on GPUs.

A row of int8 is [k / 4] words of 4 bytes, 64 bytes apart; for GPUs its k bytes one behind the other. A row of int4 is
[k / 128] runs of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from untorch.ops.int4_layout import K_TILE, LANES, N_TILE
from untorch.ops.int8_layout import INT8_BLOCK, unpack_int8
from untorch.quant.linear import Int4Linear

__all__ = ["Int4Embedding", "Int8Embedding", "QuantizedEmbedding", "W8Embedding"]

_WORDS = 4  # of a lane, in the layout that untorch packs


class QuantizedEmbedding(nn.Module):
    """What both have: their sizes, the method, and the dtype of the results, which ``to`` and ``half`` change.

    It has no attribute ``weight``: code that reads the table must not take the packed one for it.
    """

    dtype: torch.dtype

    def __init__(self, num_embeddings: int, embedding_dim: int, method: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.method, self.dtype = method, dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """ids [...], int64 or int32, to [..., embedding_dim]."""
        rows = self._rows(input.reshape(-1))[:, : self.embedding_dim]
        return rows.to(self.dtype).reshape(*input.shape, self.embedding_dim)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [T, k] of ids [T], k padded."""
        raise NotImplementedError

    @property
    def weight_nbytes(self) -> int:
        """The bytes of the packed table with its scales."""
        return sum(t.numel() * t.element_size() for t in self.buffers())

    def extra_repr(self) -> str:
        """As nn.Embedding, with the method."""
        return f"{self.num_embeddings}, {self.embedding_dim}, method={self.method!r}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self


class Int8Embedding(QuantizedEmbedding):
    """w = q · scale, a scale a row.

    packed_weight: int8 [n / 16][k / 4][16][4] (``untorch.ops.int8_layout``). scale: float32 [n], padded.
    """

    packed_weight: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self, packed_weight: torch.Tensor, scale: torch.Tensor, *, num_embeddings: int, embedding_dim: int, method: str,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, method, dtype)
        self.register_buffer("packed_weight", packed_weight)
        self.register_buffer("scale", scale)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        # An id that the table does not have is an error here, as it is in nn.Embedding.
        scale = nn.functional.embedding(ids, self.scale[: self.num_embeddings].unsqueeze(1))
        values = self.packed_weight[ids // INT8_BLOCK, :, ids % INT8_BLOCK]
        return values.flatten(1).float() * scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The table [num_embeddings, embedding_dim]."""
        values = unpack_int8(self.packed_weight, self.num_embeddings, self.embedding_dim)
        return (values.float() * self.scale[: self.num_embeddings].unsqueeze(1)).to(dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedEmbedding:
        before = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != before.dtype:  # scales move, and stay in float32
            self.scale = before.to(self.scale.device)
        return self


class W8Embedding(QuantizedEmbedding):
    """w = q · scale, a scale a row, in the layout of ``W8A8Linear``: for GPUs.

    weight_values: int8 [n, k], scale: float32 [n], n and k padded.
    """

    weight_values: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self, weight_values: torch.Tensor, scale: torch.Tensor, *, num_embeddings: int, embedding_dim: int, method: str,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, method, dtype)
        self.register_buffer("weight_values", weight_values)
        self.register_buffer("scale", scale)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        # An id that the table does not have is an error here, as it is in nn.Embedding.
        scale = nn.functional.embedding(ids, self.scale[: self.num_embeddings].unsqueeze(1))
        return self.weight_values[ids].float() * scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The table [num_embeddings, embedding_dim]."""
        table = self.weight_values.float() * self.scale.unsqueeze(1)
        return table[: self.num_embeddings, : self.embedding_dim].to(dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedEmbedding:
        before = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != before.dtype:  # scales move, and stay in float32
            self.scale = before.to(self.scale.device)
        return self


class Int4Embedding(QuantizedEmbedding):
    """w = (q − 8)·scale + zero, a scale and a zero for each row and group of values.

    packed_weight: int32 [n / 8][k / 128][32][4] (``untorch.ops.int4_layout``). scale_and_zero: [k / group_size][n][2].
    """

    packed_weight: torch.Tensor
    scale_and_zero: torch.Tensor

    def __init__(
        self, packed_weight: torch.Tensor, scale_and_zero: torch.Tensor, *, num_embeddings: int, embedding_dim: int,
        group_size: int, method: str, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, method, dtype)
        self.group_size = group_size
        self.register_buffer("packed_weight", packed_weight)
        self.register_buffer("scale_and_zero", scale_and_zero)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        tiles, outer = self.packed_weight.shape[:2]
        padded, groups = tiles * N_TILE, self.scale_and_zero.shape[0]
        # An id that the table does not have is an error in aten.embedding, as it is in nn.Embedding.
        known = ids if padded == self.num_embeddings else torch.where(ids < self.num_embeddings, ids, -1)
        starts = torch.arange(groups, device=ids.device, dtype=ids.dtype) * padded
        factors = nn.functional.embedding(
            known.unsqueeze(1) + starts, self.scale_and_zero.reshape(groups * padded, 2)
        ).float()  # fmt: skip
        by_row = self.packed_weight.reshape(tiles, outer, N_TILE, LANES // N_TILE * _WORDS)
        words = by_row[ids // N_TILE, :, ids % N_TILE].reshape(-1, outer, LANES // N_TILE, _WORDS, 1, 1)
        # The nibble of (p, h) is p + 4·h, and k is 128·o + 32·j + 2·lane + 8·p + h.
        places = torch.arange(8, device=ids.device, dtype=torch.int32).reshape(2, 4) * 4
        values = ((words >> places) & 15).permute(0, 1, 3, 5, 2, 4).reshape(-1, groups, self.group_size)
        return ((values.float() - 8) * factors[..., :1] + factors[..., 1:]).reshape(-1, outer * 2 * _WORDS * K_TILE)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The table [num_embeddings, embedding_dim]."""
        linear = Int4Linear(
            self.packed_weight, self.scale_and_zero, None, in_features=self.embedding_dim,
            out_features=self.num_embeddings, group_size=self.group_size, method=self.method,
        )  # fmt: skip
        return linear.dequantize(dtype)
