"""Text encoders of diffusion pipelines: CLIP, T5, and several of them, as one method."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.source import Source
from untorch.export.recipes.text import text_front_end, text_inputs
from untorch.export.streaming import load_weights
from untorch.pipeline.settings import MORE_TOKENIZERS, TOKENIZER

__all__ = ["PipelineFolder", "TextPart", "clip", "clip_pair", "clip_t5", "clips_t5", "t5"]

_SD3_T5_LENGTH = 256  # diffusers' max_sequence_length
_FLUX_T5_LENGTH = 512
_NAMES = ("text_encoder", "text_encoder_2", "text_encoder_3")


@dataclass(frozen=True)
class PipelineFolder:
    """A pipeline's folder. dtype: what the caller asked for; None: nothing, and the weights become float32."""

    path: Path
    dtype: torch.dtype | None

    @property
    def kind(self) -> Any:
        """The weights' dtype."""
        return torch.float32 if self.dtype is None else self.dtype

    def index(self) -> dict[str, Any]:
        """model_index.json."""
        return self.json("model_index.json")

    def json(self, name: str) -> dict[str, Any]:
        """A file's object. Raises CompileError if there is no such file."""
        file = self.path / name
        if not file.is_file():
            raise CompileError(f"export_folder: {self.path}: expected {name}, got none")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def load(self, kind: Any, name: str, argument: str = "torch_dtype") -> Any:
        """A part of the pipeline, in evaluation mode. argument: the dtype's, "dtype" of transformers' classes."""
        given = {argument: self.kind, "local_files_only": True}
        return load_weights(partial(kind.from_pretrained, self.path / name, **given)).eval()

    def load_text(self, kind: str, name: str) -> Any:
        """A text encoder: a class of transformers."""
        import transformers

        return self.load(getattr(transformers, kind), name, "dtype")


@dataclass
class TextPart:
    """The method encode_text, its part of the section, tokenizers' files, and its outputs: names and shapes without the
    batch.
    """

    method: dict[str, Any]
    section: dict[str, Any]
    files: dict[str, bytes]
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)


class ClipText(nn.Module):
    """forward(input_ids [batch, sequence] int64) → hidden [batch, sequence, width] float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Of the last layer, normalised."""
        hidden: torch.Tensor = self.model(input_ids=input_ids)[0]
        return hidden.float()


class T5Text(nn.Module):
    """forward(input_ids, attention_mask; each [batch, sequence] int64) → hidden [batch, sequence, width], and the mask
    [batch, sequence]; float32.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last layer, normalised."""
        hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return hidden.float(), attention_mask.float()


class ClipPair(nn.Module):
    """forward(input_ids, input_ids_2; each [batch, sequence] int64) → hidden [batch, sequence, width] of both encoders,
    side by side, and pooled [batch, projection] of the second one; float32.
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.train(first.training)

    def encode(self, *ids: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Hidden states of the layers before the last ones, not normalised; both encoders' outputs."""
        found = [
            model(input_ids=one, output_hidden_states=True)
            for model, one in zip((self.first, self.second), ids, strict=True)
        ]
        return torch.cat([one.hidden_states[-2] for one in found], -1), found

    def forward(self, input_ids: torch.Tensor, input_ids_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of Stable Diffusion XL."""
        hidden, found = self.encode(input_ids, input_ids_2)
        return hidden.float(), found[1].text_embeds.float()


class ClipsT5(ClipPair):
    """forward(input_ids, input_ids_2, input_ids_3; each [batch, its sequence] int64) → hidden [batch, sequences of CLIP
    and T5, width of T5] and pooled [batch, projections of both]; float32.

    third: None: zeros stand for its part.
    """

    def __init__(self, first: nn.Module, second: nn.Module, third: nn.Module | None, shape: tuple[int, int]) -> None:
        super().__init__(first, second)
        self.third, self.shape = third, shape

    def forward(
        self, input_ids: torch.Tensor, input_ids_2: torch.Tensor, input_ids_3: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of Stable Diffusion 3."""
        hidden, found = self.encode(input_ids, input_ids_2)
        hidden = nn.functional.pad(hidden, (0, self.shape[1] - hidden.shape[-1])).float()
        pooled = torch.cat([one.text_embeds for one in found], -1).float()
        if self.third is None:
            return nn.functional.pad(hidden, (0, 0, 0, self.shape[0])), pooled
        return torch.cat([hidden, self.third(input_ids=input_ids_3)[0].float()], 1), pooled


class ClipT5(nn.Module):
    """forward(input_ids, input_ids_2; each [batch, its sequence] int64) → hidden [batch, sequence of T5, width] and
    pooled [batch, width of CLIP]; float32.
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.train(first.training)

    def forward(self, input_ids: torch.Tensor, input_ids_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of Flux."""
        pooled: torch.Tensor = self.first(input_ids=input_ids).pooler_output
        hidden: torch.Tensor = self.second(input_ids=input_ids_2)[0]
        return hidden.float(), pooled.float()


def clip(folder: PipelineFolder) -> TextPart:
    """Stable Diffusion 1 and 2."""
    text = folder.load_text("CLIPTextModel", "text_encoder")
    front, files = _front_end(folder, "tokenizer", text)
    shape = (front["max_length"], int(text.config.hidden_size))
    return TextPart(text_inputs(ClipText(text), front, shape[0]), front, files, {"hidden": shape})


def clip_pair(folder: PipelineFolder) -> TextPart:
    """Stable Diffusion XL."""
    first = folder.load_text("CLIPTextModel", _NAMES[0])
    second = folder.load_text("CLIPTextModelWithProjection", _NAMES[1])
    fronts = [_front_end(folder, name, one) for name, one in (("tokenizer", first), ("tokenizer_2", second))]
    length = _one_length(folder, fronts)
    made = _several(ClipPair(first, second), fronts)
    made.section["zeros_without_negative_prompt"] = bool(folder.index().get("force_zeros_for_empty_prompt", True))
    width = int(first.config.hidden_size) + int(second.config.hidden_size)
    made.outputs = {"hidden": (length, width), "pooled": (int(second.config.projection_dim),)}
    return made


def clips_t5(folder: PipelineFolder) -> TextPart:
    """Stable Diffusion 3. Its T5 may be left out."""
    width = int(folder.json("transformer/config.json")["joint_attention_dim"])
    first, second = (folder.load_text("CLIPTextModelWithProjection", name) for name in _NAMES[:2])
    fronts = [_front_end(folder, name, one) for name, one in (("tokenizer", first), ("tokenizer_2", second))]
    length = _one_length(folder, fronts)
    third = None
    if (folder.index().get(_NAMES[2]) or [None])[0] is not None:
        if not (folder.path / _NAMES[2]).is_dir():
            raise CompileError(
                f'export_folder: {folder.path}: expected {_NAMES[2]}, got none: write "{_NAMES[2]}": [null, null] into '
                "model_index.json to do without it"
            )
        third = folder.load_text("T5EncoderModel", _NAMES[2])
        fronts.append(_front_end(folder, "tokenizer_3", third, _SD3_T5_LENGTH))
    made = _several(ClipsT5(first, second, third, (_SD3_T5_LENGTH, width)), fronts)
    pooled = int(first.config.projection_dim) + int(second.config.projection_dim)
    made.outputs = {"hidden": (length + _SD3_T5_LENGTH, width), "pooled": (pooled,)}
    return made


def clip_t5(folder: PipelineFolder) -> TextPart:
    """Flux."""
    first, second = folder.load_text("CLIPTextModel", _NAMES[0]), folder.load_text("T5EncoderModel", _NAMES[1])
    fronts = [_front_end(folder, "tokenizer", first), _front_end(folder, "tokenizer_2", second, _FLUX_T5_LENGTH)]
    made = _several(ClipT5(first, second), fronts)
    widths = int(second.config.d_model), int(first.config.hidden_size)
    made.outputs = {"hidden": (_FLUX_T5_LENGTH, widths[0]), "pooled": (widths[1],)}
    return made


def t5(folder: PipelineFolder, length: int) -> TextPart:
    """PixArt, whose texts are in lower case."""
    text = folder.load_text("T5EncoderModel", "text_encoder")
    front, files = _front_end(folder, "tokenizer", text, length)
    front |= {"text_inputs": ["input_ids", "attention_mask"], "lower_case": True}
    outputs = {"hidden": (length, int(text.config.d_model)), "attention_mask": (length,)}
    return TextPart(text_inputs(T5Text(text), front, length), front, files, outputs)


_Front = tuple[dict[str, Any], dict[str, bytes]]


def _front_end(folder: PipelineFolder, name: str, text: Any, length: int | None = None) -> _Front:
    """length: of T5's texts, which has no positions; None: the model's and the tokenizer's own."""
    source = Source(folder.path / name, {}, type(text).__name__, folder.dtype)
    front, files = text_front_end(source, text)
    length = length or front["max_length"]
    fixed = {"text_inputs": ["input_ids"], "max_length": length, "fixed_length": length, "padding_side": "right"}
    return front | fixed, files


def _one_length(folder: PipelineFolder, fronts: list[_Front]) -> int:
    """Of the texts of both CLIP encoders. Raises CompileError if they differ."""
    found: list[int] = [section["max_length"] for section, _ in fronts]
    if found[0] != found[1]:
        raise CompileError(
            f"export_folder: {folder.path}: expected one length of both tokenizers, got {found[0]} and {found[1]}"
        )
    return found[0]


def _several(module: nn.Module, fronts: list[_Front]) -> TextPart:
    """A method on the texts of several tokenizers."""
    methods = [text_inputs(module, section, section["max_length"]) for section, _ in fronts]
    method = methods[0] | {key: sum((one[key] for one in methods), ()) for key in ("args", "dynamic_shapes")}
    section, files = dict(fronts[0][0]), dict(fronts[0][1])
    section["more_texts"] = [front for front, _ in fronts[1:]]
    files |= {name: found[TOKENIZER] for name, (_, found) in zip(MORE_TOKENIZERS, fronts[1:], strict=False)}
    return TextPart(method, section, files)
