"""The dtypes that ``quantize`` knows, int4, int8, FP8 and NVFP4: methods, tensors, and layers for each device type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from untorch.ops.int4 import GROUP_SIZES
from untorch.ops.int8_layout import INT8_GROUP, INT8_MAX_K, pack_int8, padded_outputs
from untorch.ops.nvfp4_layout import BLOCK_SIZE
from untorch.ops.w8a8 import INT8_MAX_K as W8_MAX_K
from untorch.ops.w8a8 import SIZE_STEP
from untorch.quant.embedding import Int4Embedding, Int8Embedding, QuantizedEmbedding, W8Embedding
from untorch.quant.experts import make_experts, make_int4_experts
from untorch.quant.int8 import INT8_METHODS, Int8Linear, int8_error, pad_scales, quantize_int8_error
from untorch.quant.linear import Int4Linear, padded_features
from untorch.quant.methods import METHODS, quantize_int4
from untorch.quant.nvfp4 import NVFP4_METHODS, quantize_nvfp4_errors
from untorch.quant.nvfp4_linear import NVFP4Linear, check_prefill, tensors_of_layer
from untorch.quant.w8a8 import FP8_METHODS, W8A8Linear, padded_w8, quantize_fp8
from untorch.runtime.errors import InvalidArgumentError

__all__ = [
    "TARGETS", "QuantizedExperts", "QuantizedLinear", "QuantizedTensors", "Scheme", "Target", "check_target",
    "make_scheme",
]  # fmt: skip

QuantizedLinear = Int4Linear | Int8Linear | NVFP4Linear | W8A8Linear

# The type of the device that layers are for.
Target = Literal["cpu", "cuda"]
TARGETS: tuple[Target, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class QuantizedTensors:
    """What a layer stores for its weight. ``rtn_error`` is that of rounding to nearest, if another method chose."""

    tensors: tuple[torch.Tensor, ...]
    error: float
    rtn_error: float | None = None


@dataclass(frozen=True)
class QuantizedExperts:
    """What takes the place of a module of experts.

    parts: of its weights, gate_up_proj and down_proj, the error, (rows, columns) and the tensors.
    """

    module: nn.Module
    parts: Mapping[str, tuple[float, tuple[int, int], tuple[torch.Tensor, ...]]]


class Scheme(Protocol):
    """One dtype with its options, for one type of device."""

    dtype: str
    method: str
    prefill: str

    def group_size(self, in_features: int) -> int:
        """The inputs that share a scale."""

    def padded(self, in_features: int, out_features: int) -> tuple[int, int]:
        """(n, k) of the packed weight."""

    def obstacle(self, layer: nn.Linear | nn.Embedding) -> str:
        """Why a layer cannot be quantised, or ""."""

    def nbytes(self, n: int, k: int, element_size: int) -> int:
        """The bytes of a weight [n, k], padded, whose elements had ``element_size`` bytes."""

    def quantize(self, weight: torch.Tensor) -> QuantizedTensors:
        """The tensors of a layer for a finite weight [out_features, in_features]."""

    def layer(self, linear: nn.Linear, tensors: tuple[torch.Tensor, ...]) -> QuantizedLinear:
        """What replaces ``linear``, with its bias and those tensors."""

    def embedding(self, embedding: nn.Embedding, tensors: tuple[torch.Tensor, ...]) -> QuantizedEmbedding:
        """What replaces ``embedding``, which ``obstacle`` has none for."""

    def experts_obstacle(self) -> str:
        """Why experts of any kind stay in floating point, or ""."""

    def experts(self, name: str, experts: nn.Module, device: torch.device | None) -> QuantizedExperts:
        """What replaces ``experts``, where ``experts_obstacle`` has nothing. ``device`` computes, if given."""


def make_scheme(
    dtype: str, group_size: int | None, method: str | None, prefill: str = "exact", target: Target = "cpu"
) -> Scheme:
    """None is the dtype's default. ``target``: the type of the device that the layers are for, "cpu" or "cuda".

    Raises InvalidArgumentError.
    """
    check_target(target)
    if dtype in ("int4", "int8", "fp8") and prefill != "exact":
        raise InvalidArgumentError(
            f"quantize: prefill: {dtype} has 'exact' alone, which need not be given; nvfp4 has others; got {prefill!r}"
        )
    if dtype == "int8":
        kind = _Int8 if target == "cpu" else _Int8ForGpus
        return kind(group_size, "rtn" if method is None else method)
    if dtype == "fp8":
        if target == "cpu":
            raise InvalidArgumentError(
                "quantize: dtype: fp8 is for GPUs, and the module is for CPUs: take 'int8', which they multiply in "
                "integers, or give target='cuda' for a module that will run on a GPU"
            )
        return _FP8(group_size, "rtn" if method is None else method)
    if dtype == "int4":
        return _Int4(128 if group_size is None else group_size, "hqq" if method is None else method)
    if dtype == "nvfp4":
        return _NVFP4(BLOCK_SIZE if group_size is None else group_size, "search" if method is None else method, prefill)
    raise InvalidArgumentError(f"quantize: dtype: expected 'int4', 'int8', 'fp8' or 'nvfp4', got {dtype!r}")


def check_target(target: object) -> None:
    """Raises InvalidArgumentError."""
    if target not in TARGETS:
        raise InvalidArgumentError(f"quantize: target: expected 'cpu' or 'cuda', got {target!r}")


class _Int4:
    dtype = "int4"
    prefill = "exact"

    def __init__(self, group_size: int, method: str) -> None:
        if isinstance(group_size, bool) or group_size not in GROUP_SIZES:
            raise InvalidArgumentError(f"quantize: group_size: expected 32, 64, 128 or 256, got {group_size!r}")
        _check_method(method, tuple(METHODS))
        self._group, self.method = int(group_size), method

    def group_size(self, in_features: int) -> int:
        return self._group

    def padded(self, in_features: int, out_features: int) -> tuple[int, int]:
        return padded_features(in_features, out_features, self._group)

    def obstacle(self, layer: nn.Linear | nn.Embedding) -> str:
        return ""

    def nbytes(self, n: int, k: int, element_size: int) -> int:
        return n * k // 2 + n * (k // self._group) * 2 * element_size

    def quantize(self, weight: torch.Tensor) -> QuantizedTensors:
        n, k = self.padded(weight.shape[1], weight.shape[0])
        packed, scale_and_zero, error = quantize_int4(weight, self._group, self.method, n, k)
        return QuantizedTensors((packed, scale_and_zero), error)

    def layer(self, linear: nn.Linear, tensors: tuple[torch.Tensor, ...]) -> Int4Linear:
        packed, scale_and_zero = tensors
        return Int4Linear(
            packed, scale_and_zero, linear.bias, in_features=linear.in_features, out_features=linear.out_features,
            group_size=self._group, method=self.method,
        )  # fmt: skip

    def embedding(self, embedding: nn.Embedding, tensors: tuple[torch.Tensor, ...]) -> Int4Embedding:
        packed, scale_and_zero = tensors
        return Int4Embedding(
            packed, scale_and_zero, num_embeddings=embedding.num_embeddings, embedding_dim=embedding.embedding_dim,
            group_size=self._group, method=self.method, dtype=embedding.weight.dtype,
        )  # fmt: skip

    def experts_obstacle(self) -> str:
        return ""

    def experts(self, name: str, experts: nn.Module, device: torch.device | None) -> QuantizedExperts:
        made, errors = make_int4_experts(experts, self.quantize, self._group, self.method, device)
        e, k, width = made.num_experts, made.hidden_size, made.intermediate_size
        parts = {
            "gate_up_proj": (errors[0], (2 * e * width, k), (made.w13, made.w13_scale_and_zero)),
            "down_proj": (errors[1], (e * k, width), (made.w2, made.w2_scale_and_zero)),
        }
        return QuantizedExperts(made, parts)


class _ByOutput:
    """What the dtypes of eight bits have in common: a scale an output."""

    dtype: str
    prefill = "exact"
    methods: tuple[str, ...]

    def __init__(self, group_size: int | None, method: str) -> None:
        if group_size is not None:
            raise InvalidArgumentError(
                f"quantize: group_size: {self.dtype} has a scale an output, no groups: leave it out, got {group_size!r}"
            )
        _check_method(method, self.methods)
        self.method = method

    def group_size(self, in_features: int) -> int:
        return in_features

    def experts_obstacle(self) -> str:
        return "experts stay in floating point: only int4 and nvfp4 have GEMMs for them"

    def experts(self, name: str, experts: nn.Module, device: torch.device | None) -> QuantizedExperts:
        raise InvalidArgumentError(f"quantize: {name}: {self.experts_obstacle()}")


class _Int8(_ByOutput):
    dtype = "int8"
    methods = INT8_METHODS

    def padded(self, in_features: int, out_features: int) -> tuple[int, int]:
        return padded_outputs(out_features), -(-in_features // INT8_GROUP) * INT8_GROUP

    def obstacle(self, layer: nn.Linear | nn.Embedding) -> str:
        if layer.weight.shape[1] <= INT8_MAX_K:
            return ""
        return f"it has {layer.weight.shape[1]} inputs, and the sums of more than {INT8_MAX_K} do not fit int32"

    def nbytes(self, n: int, k: int, element_size: int) -> int:
        return n * k + n * 8

    def quantize(self, weight: torch.Tensor) -> QuantizedTensors:
        values, scales, error = quantize_int8_error(weight)
        packed, sums = pack_int8(values)
        return QuantizedTensors((packed, pad_scales(scales), sums), error)

    def layer(self, linear: nn.Linear, tensors: tuple[torch.Tensor, ...]) -> Int8Linear:
        packed, scale, sums, *factor = tensors
        return Int8Linear(
            packed, scale, sums, linear.bias, in_features=linear.in_features, out_features=linear.out_features,
            method=self.method, input_factor=factor[0] if factor else None,
        )  # fmt: skip

    def embedding(self, embedding: nn.Embedding, tensors: tuple[torch.Tensor, ...]) -> Int8Embedding:
        return Int8Embedding(
            tensors[0], tensors[1], num_embeddings=embedding.num_embeddings, embedding_dim=embedding.embedding_dim,
            method=self.method, dtype=embedding.weight.dtype,
        )  # fmt: skip


class _ForGpus(_ByOutput):
    """``W8A8Linear``."""

    def padded(self, in_features: int, out_features: int) -> tuple[int, int]:
        return -(-out_features // SIZE_STEP) * SIZE_STEP, -(-in_features // SIZE_STEP) * SIZE_STEP

    def nbytes(self, n: int, k: int, element_size: int) -> int:
        return n * k + n * 4

    def layer(self, linear: nn.Linear, tensors: tuple[torch.Tensor, ...]) -> W8A8Linear:
        values, scale = tensors
        return W8A8Linear(
            values, scale, linear.bias, in_features=linear.in_features, out_features=linear.out_features,
            method=self.method,
        )  # fmt: skip

    def experts_obstacle(self) -> str:
        return "experts stay in floating point: on GPUs only int4 and nvfp4 have GEMMs for them"


class _Int8ForGpus(_ForGpus):
    dtype = "int8"
    methods = INT8_METHODS

    def obstacle(self, layer: nn.Linear | nn.Embedding) -> str:
        if isinstance(layer, nn.Embedding) or layer.weight.shape[1] <= W8_MAX_K:
            return ""
        return f"it has {layer.weight.shape[1]} inputs, and the sums of more than {W8_MAX_K} do not fit int32"

    def quantize(self, weight: torch.Tensor) -> QuantizedTensors:
        values, scales, error = quantize_int8_error(weight)
        return QuantizedTensors(padded_w8(values, scales), error)

    def embedding(self, embedding: nn.Embedding, tensors: tuple[torch.Tensor, ...]) -> W8Embedding:
        return W8Embedding(
            tensors[0], tensors[1], num_embeddings=embedding.num_embeddings, embedding_dim=embedding.embedding_dim,
            method=self.method, dtype=embedding.weight.dtype,
        )  # fmt: skip


class _FP8(_ForGpus):
    dtype = "fp8"
    methods = FP8_METHODS

    def obstacle(self, layer: nn.Linear | nn.Embedding) -> str:
        return "fp8 is not for embeddings: take int8 or int4" if isinstance(layer, nn.Embedding) else ""

    def quantize(self, weight: torch.Tensor) -> QuantizedTensors:
        values, scales = quantize_fp8(weight)
        return QuantizedTensors(padded_w8(values, scales), int8_error(weight, values, scales))

    def embedding(self, embedding: nn.Embedding, tensors: tuple[torch.Tensor, ...]) -> QuantizedEmbedding:
        raise InvalidArgumentError(f"quantize: {self.obstacle(embedding)}")


class _NVFP4:
    dtype = "nvfp4"

    def __init__(self, group_size: int, method: str, prefill: str) -> None:
        if isinstance(group_size, bool) or group_size != BLOCK_SIZE:
            raise InvalidArgumentError(
                f"quantize: group_size: nvfp4 has blocks of {BLOCK_SIZE}, which cannot be chosen: leave it out, got "
                f"{group_size!r}"
            )
        _check_method(method, NVFP4_METHODS)
        check_prefill("quantize", prefill)
        self.method, self.prefill = method, prefill

    def group_size(self, in_features: int) -> int:
        return BLOCK_SIZE

    def padded(self, in_features: int, out_features: int) -> tuple[int, int]:
        return padded_features(in_features, out_features, BLOCK_SIZE)

    def obstacle(self, layer: nn.Linear | nn.Embedding) -> str:
        return "nvfp4 is not for embeddings: take int8 or int4" if isinstance(layer, nn.Embedding) else ""

    def nbytes(self, n: int, k: int, element_size: int) -> int:
        return n * k // 2 + n * k // BLOCK_SIZE + n * 4

    def quantize(self, weight: torch.Tensor) -> QuantizedTensors:
        made, error, rtn_error = quantize_nvfp4_errors(weight, self.method == "search")
        return QuantizedTensors(tensors_of_layer(made), error, rtn_error)

    def layer(self, linear: nn.Linear, tensors: tuple[torch.Tensor, ...]) -> NVFP4Linear:
        packed, block_scale, global_scale = tensors
        return NVFP4Linear(
            packed, block_scale, global_scale, linear.bias, in_features=linear.in_features,
            out_features=linear.out_features, method=self.method, prefill=self.prefill,
        )  # fmt: skip

    def embedding(self, embedding: nn.Embedding, tensors: tuple[torch.Tensor, ...]) -> QuantizedEmbedding:
        raise InvalidArgumentError(f"quantize: {self.obstacle(embedding)}")

    def experts_obstacle(self) -> str:
        return ""

    def experts(self, name: str, experts: nn.Module, device: torch.device | None) -> QuantizedExperts:
        made, report = make_experts(name, experts, self.method == "search", device)
        moe = made.moe
        e, k, width = moe.num_experts, moe.hidden_size, moe.intermediate_size
        parts = {
            "gate_up_proj": (report.error_gate_up, (2 * e * width, k), (moe.w13, moe.w13_scale, moe.w13_global)),
            "down_proj": (report.error_down, (e * k, width), (moe.w2, moe.w2_scale, moe.w2_global)),
        }
        return QuantizedExperts(made, parts)


def _check_method(method: str, known: tuple[str, ...]) -> None:
    if method not in known:
        expected = ", ".join(repr(name) for name in known)
        raise InvalidArgumentError(f"quantize: method: expected one of {expected}, got {method!r}")
