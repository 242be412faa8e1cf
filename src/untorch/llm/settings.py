"""What a package says of its language model: sizes, pages, token ids and generation defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from untorch.llm.blocks import BlockGroup
from untorch.llm.params import SamplingParams
from untorch.runtime.errors import InvalidFileError, UnsupportedError

__all__ = [
    "FORMAT_VERSION", "GROUPS_VERSION", "KV_ITEMSIZE", "POOLINGS", "ROW_POOLINGS", "TASKS", "DraftSettings",
    "LoraLayer", "LoraSettings", "Settings", "read_settings",
]  # fmt: skip

TASKS = ("generate", "embed", "classify")
ROW_POOLINGS = ("last", "cls")  # of one token's row
POOLINGS = (*ROW_POOLINGS, "mean", "max", "weighted_mean", "mean_sqrt_len")
FORMAT_VERSION = 1  # all layers have one block table
GROUPS_VERSION = 2  # several groups of layers have a block table each
# Of the pages, by their dtype.
KV_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class DraftSettings:
    """Of a draft model, whose pages are beside those of the model's first group: as in Settings."""

    vocabulary: int
    block_elements: int
    dtype: str
    methods: tuple[tuple[int, str], ...]
    choose: str | None = None
    architecture: str = ""


@dataclass(frozen=True)
class LoraLayer:
    """A linear layer that adapters may change. offset: its first row in the array of adapters."""

    name: str
    inputs: int
    outputs: int
    offset: int


@dataclass(frozen=True)
class LoraSettings:
    """Of adapters beside the weights. rows, dtype: of the array of adapters. methods: as in Settings, with adapters."""

    dtype: str
    rows: int
    layers: tuple[LoraLayer, ...]
    methods: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Settings:
    """block_size: positions a page, of the group that has the fewest. block_elements: of the pool's rows. dtype: of
    the pool. groups: of layers, each with a block table; default: one, with ``window``.

    position_rows: 3 for multimodal rotary positions (M-RoPE). methods: names by the number of tokens that they are
    tuned for, ascending. choose: the method that chooses tokens on the GPU. process_logits: the one that applies
    penalties, bias and grammars there. logprobs: of the chosen tokens there. state_elements: float32 numbers that
    recurrent layers keep of a sequence; 0: the model has none.
    """

    vocabulary: int
    max_positions: int
    block_size: int
    block_elements: int = 0
    state_elements: int = 0
    dtype: str = "float32"
    position_rows: int = 1
    window: int = 0
    groups: tuple[BlockGroup, ...] = ()
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    architecture: str = ""
    methods: tuple[tuple[int, str], ...] = ()
    choose: str | None = None
    process_logits: str | None = None
    logprobs: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    chat_template: str | None = None
    task: str = "generate"
    pooling: str = "last"
    normalize: bool = False
    width: int = 0  # of embeddings or scores
    dense: str | None = None  # the method that pooled vectors go through
    labels: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts before an input, by name
    default_prompt: str | None = None
    embeds: tuple[tuple[int, str], ...] = ()  # as methods, with embeddings [T, hidden] as inputs
    hidden: int = 0
    draft: DraftSettings | None = None
    lora: LoraSettings | None = None

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (BlockGroup(self.block_size, self.window),))

    def default_params(self) -> SamplingParams:
        """What the model's authors recommend; max_tokens None: as many as fit."""
        given = self.generation
        fields = {
            name: given[name]
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            if isinstance(given.get(name), int | float)
        }
        if given.get("do_sample") is False or ("do_sample" not in given and not fields):
            fields["temperature"] = 0.0
        return SamplingParams(**fields, max_tokens=None)


def read_settings(manifest: Mapping[str, Any], path: str) -> Settings:
    """Of a program's manifest. Raises InvalidFileError; UnsupportedError for a newer format."""
    section = manifest.get("llm")
    if not isinstance(section, Mapping):
        raise InvalidFileError(
            f"{path} holds no language model: packages for the engine are made by untorch.export.causal_lm"
        )
    version = section.get("format_version")
    if version not in (FORMAT_VERSION, GROUPS_VERSION):
        raise UnsupportedError(
            f"{path}: its language model has format {version!r}, this untorch reads {FORMAT_VERSION} and "
            f"{GROUPS_VERSION}: export it again, or upgrade untorch"
        )
    try:
        groups = _groups(section, version)
        settings = Settings(
            vocabulary=int(section["vocabulary"]),
            max_positions=int(section["max_positions"]),
            block_size=int(section["block_size"]),
            block_elements=int(section["block_elements"]),
            state_elements=int(section.get("state_elements", 0)),
            dtype=str(section["dtype"]),
            position_rows=int(section.get("position_rows", 1)),
            window=0 if len(groups) > 1 or groups[0].chunk else groups[0].window,
            groups=groups,
            stop_ids=tuple(int(i) for i in section["stop_ids"]),
            bos_id=None if section["bos_id"] is None else int(section["bos_id"]),
            architecture=str(section["architecture"]),
            methods=_methods(section["methods"]),
            choose=section.get("choose"),
            process_logits=section.get("process_logits"),
            logprobs=section.get("logprobs"),
            generation=dict(section["generation"]),
            special_tokens={str(key): str(value) for key, value in section["special_tokens"].items()},
            tokenizer=section.get("tokenizer"),
            chat_template=section.get("chat_template"),
            task=str(section.get("task", "generate")),
            pooling=str(section.get("pooling", "last")),
            normalize=bool(section.get("normalize", False)),
            width=int(section.get("width", 0)),
            dense=section.get("dense"),
            labels=tuple(str(label) for label in section.get("labels", ())),
            prompts={str(key): str(value) for key, value in section.get("prompts", {}).items()},
            default_prompt=section.get("default_prompt"),
            embeds=_methods(section.get("embeds", ())),
            hidden=int(section.get("hidden", 0)),
            draft=_draft(section.get("draft")),
            lora=_lora(section.get("lora")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidFileError(f"{path}: the manifest's language model is damaged: {error!r}") from None
    positive = (settings.vocabulary, settings.max_positions, settings.block_size, settings.block_elements)
    if min(positive) < 1 or settings.state_elements < 0 or not settings.methods or settings.dtype not in KV_ITEMSIZE:
        raise InvalidFileError(f"{path}: the manifest's language model is damaged: a size or dtype is wrong")
    if any(
        group.size < 1 or group.size % settings.block_size or min(group.window, group.chunk) < 0 for group in groups
    ) or settings.block_size not in {group.size for group in groups}:
        raise InvalidFileError(f"{path}: the manifest's language model is damaged: a group of layers is wrong")
    if settings.position_rows not in (1, 3):
        raise UnsupportedError(
            f"{path}: its positions have {settings.position_rows} rows, which this untorch does not know: upgrade "
            "untorch"
        )
    if settings.task not in TASKS or settings.pooling not in POOLINGS:
        raise UnsupportedError(
            f"{path}: its task is {settings.task!r} with the pooling {settings.pooling!r}, which this untorch does not "
            "know: upgrade untorch"
        )
    if (settings.task != "generate" and settings.width < 1) or (settings.embeds and settings.hidden < 1):
        raise InvalidFileError(f"{path}: the manifest's language model is damaged: a width is wrong")
    if settings.lora is not None and (settings.embeds or not _fits(settings.lora)):
        raise InvalidFileError(
            f"{path}: the manifest's adapters are damaged: a size or dtype is wrong, or it takes embeddings, too"
        )
    draft = settings.draft
    if draft is not None and (
        min(draft.vocabulary, draft.block_elements) < 1 or not draft.methods or draft.dtype not in KV_ITEMSIZE
    ):
        raise InvalidFileError(f"{path}: the manifest's draft model is damaged: a size or dtype is wrong")
    return settings


def _groups(section: Mapping[str, Any], version: int) -> tuple[BlockGroup, ...]:
    """In the format of one block table: a window only if all layers have one, the largest."""
    if version == GROUPS_VERSION:
        found = tuple(
            BlockGroup(int(group["block_size"]), int(group["window"]), int(group["chunk"]))
            for group in section["groups"]
        )
        if not found:
            raise ValueError("no groups")
        return found
    layers = section["layers"]
    windows = [int(layer["window"]) for layer in layers if not layer["chunk"]]
    window = max(windows) if len(windows) == len(layers) and all(windows) else 0
    return (BlockGroup(int(section["block_size"]), window),)


def _lora(given: Any) -> LoraSettings | None:
    if given is None:
        return None
    layers = tuple(
        LoraLayer(str(layer["name"]), int(layer["inputs"]), int(layer["outputs"]), int(layer["offset"]))
        for layer in given["layers"]
    )
    return LoraSettings(str(given["dtype"]), int(given["rows"]), layers, _methods(given["methods"]))


def _fits(lora: LoraSettings) -> bool:
    """The layers lie one behind the other in the rows."""
    end = 0
    for layer in lora.layers:
        if min(layer.inputs, layer.outputs) < 1 or layer.offset != end:
            return False
        end += layer.inputs + layer.outputs
    return end == lora.rows and bool(lora.layers and lora.methods) and lora.dtype in ("float32", "bfloat16", "float16")


def _draft(given: Any) -> DraftSettings | None:
    if given is None:
        return None
    return DraftSettings(
        int(given["vocabulary"]), int(given["block_elements"]), str(given["dtype"]), _methods(given["methods"]),
        given.get("choose"), str(given["architecture"]),
    )  # fmt: skip


def _methods(given: Any) -> tuple[tuple[int, str], ...]:
    return tuple(sorted((int(method["tokens"]), str(method["name"])) for method in given))
