"""The image encoder of a vision-language model as one method, for images of any size.

An encoder of transformers computes tables from the image's rows and columns: places of patches for rotary embeddings,
an interpolation of learned positions, windows of attention. It takes them as arguments, too (``vision_utils``). The
method has them as inputs (``untorch.llm.vision.tables``), so nothing in its graph depends on the size but the number of
units. Nothing here knows a model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.llm.vision.settings import VisionSettings
from untorch.llm.vision.tables import encoder_tables

__all__ = ["METHOD", "VisionEncoder", "encoder_method", "encoder_of", "segment_attention", "tables_of"]

METHOD = "encode_image"
# transformers hands the segments to attention functions of names with "flash"; for others it splits tensors by values.
_NAME = "untorch_flash_segments"
_MOST = 1 << 20


@dataclass(frozen=True)
class _Windows:
    """As ``encoder_tables`` has them. It is handed through in the place of cumulative lengths."""

    index: torch.Tensor
    is_real: torch.Tensor
    places: torch.Tensor


class _Whole:
    """In the place of cumulative lengths: every patch sees the whole image."""


class _LinearPatches(nn.Module):
    """A convolution whose kernel covers its input, as the GEMM that it is."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        weight, bias = convolution.weight, convolution.bias
        self.proj = nn.Linear(weight[0].numel(), len(weight), bias is not None, device="meta")
        self.proj.weight = nn.Parameter(weight.detach().reshape(len(weight), -1), requires_grad=False)
        if bias is not None:
            self.proj.bias = nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.proj(patches.to(self.proj.weight.dtype))
        return found


class VisionEncoder(nn.Module):
    """forward(patches [units, merge², values] float32, tables…) → embeddings [units, width] float32.

    The tables are those of ``encoder_tables``. Features for the first layers of the language model (DeepStack) are
    behind the embeddings, in their width: ``levels`` of them.
    """

    def __init__(self, visual: Any, tables: tuple[str, ...]) -> None:
        super().__init__()
        self.visual, self.tables, self.levels = visual, tables, 0
        convolution = getattr(getattr(visual, "patch_embed", None), "proj", None)
        if isinstance(convolution, nn.Conv3d) and convolution.kernel_size == convolution.stride:
            self.visual = copy.copy(visual)
            self.visual._modules = {**visual._modules, "patch_embed": _LinearPatches(convolution)}
        self.train(visual.training)

    def forward(self, patches: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        """The embeddings of one image."""
        rest = iter(tables)
        given: dict[str, Any] = {"cu_seqlens": _Whole(), "max_seqlen": 1}
        for name in self.tables:
            if name == "axes":
                given["position_ids"] = next(rest).flatten(0, 1)
            elif name == "position_grid":
                given["interp_indices"], given["interp_weights"] = (next(rest).flatten(0, 1) for _ in range(2))
            else:
                given["window_index"] = next(rest)
                given["cu_window_seqlens"] = _Windows(next(rest), next(rest), next(rest).flatten())
                given["max_window_seqlen"] = 1
        out = self.visual(patches.flatten(0, 1), grid_thw=None, return_dict=True, **given)
        features = getattr(out, "deepstack_features", None) or []
        self.levels = len(features)
        return torch.cat([out.pooler_output, *features], dim=-1).float()


def encoder_of(model: Any) -> Any:
    """The model's image encoder. Raises CompileError for one that is not known to work for images of any size."""
    name, visual = type(model).__name__, getattr(model.base_model, "visual", None)
    takes = inspect.signature(type(model.base_model).forward).parameters
    if not isinstance(visual, nn.Module) or "image_grid_thw" not in takes or "mm_token_type_ids" not in takes:
        raise CompileError(
            f"causal_lm: images: {name} is none of the models whose image encoder is compiled for any size (Qwen2-VL, "
            "Qwen2.5-VL, Qwen3-VL and those like them): compile its encoder with untorch.export.export for one size, "
            "and use inputs_embeds=True"
        )
    return visual


def tables_of(visual: Any) -> tuple[str, ...]:
    """What it reads beside the patches: as ``VisionSettings.tables``."""
    has_windows = getattr(visual, "fullatt_block_indexes", None) is not None
    has_grid = getattr(visual, "num_grid_per_side", None) is not None
    if has_grid and (visual.interpolation_mode, visual.interpolation_align_corners) != ("bilinear", True):
        raise CompileError(
            f"causal_lm: images: {type(visual).__name__} interpolates its positions by {visual.interpolation_mode}, "
            f"align_corners={visual.interpolation_align_corners}: expected bilinear and True; use inputs_embeds=True "
            "with an encoder for one size"
        )
    return ("axes", *(["position_grid"] if has_grid else []), *(["windows"] if has_windows else []))


def encoder_method(encoder: VisionEncoder, settings: VisionSettings) -> dict[str, Any]:
    """The method with example inputs: an image of a few units, more than one window."""
    from torch.export import Dim

    rows, columns = settings.window_side + 3, settings.window_side + 4
    arrays = encoder_tables(rows, columns, settings)
    values = 3 * settings.temporal_patch_size * settings.patch_size**2
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(rows * columns, settings.merge_size**2, values, generator=generator)
    tables = tuple(torch.from_numpy(array) for array in arrays)
    units, windows = Dim("units", min=1, max=_MOST), Dim("windows", min=1, max=_MOST)
    shapes = tuple({0: units if len(table) == rows * columns else windows} for table in tables)
    return {"model": encoder, "args": (patches, *tables), "dynamic_shapes": ({0: units}, shapes)}


@contextmanager
def segment_attention(visual: Any) -> Iterator[None]:
    """The encoder's attention sees the whole image, or its windows, meanwhile."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    config = visual.config
    own = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = own


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    cu_seq_lens_q: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query, key and value [1, heads, patches, width]; the result [1, patches, heads, width]."""
    name = type(module).__name__
    if attention_mask is not None or not isinstance(cu_seq_lens_q, _Whole | _Windows):
        raise CompileError(f"{name}: its attention has a mask or segments of its own, which are not known")
    attend = nn.functional.scaled_dot_product_attention
    if isinstance(cu_seq_lens_q, _Whole):
        return attend(query, key, value, scale=scaling).transpose(1, 2), None
    windows = cu_seq_lens_q
    q, k, v = (x[0].transpose(0, 1)[windows.index].transpose(1, 2) for x in (query, key, value))
    out = attend(q, k, v, attn_mask=windows.is_real[:, None, None, :], scale=scaling)
    return out.transpose(1, 2).flatten(0, 1)[windows.places][None], None
