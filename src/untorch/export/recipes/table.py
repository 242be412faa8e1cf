"""The table of recipes: a row a task, with the architectures that it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from untorch.export.errors import CompileError
from untorch.export.recipes.audio import write_audio_classification
from untorch.export.recipes.detection import DETECTORS, write_object_detection
from untorch.export.recipes.diffusion.pipelines import DIFFUSION_PIPELINES
from untorch.export.recipes.image import write_image_classification, write_zero_shot_image_classification
from untorch.export.recipes.reranking import is_cross_encoder, write_reranking
from untorch.export.recipes.segmentation import QUERY_SEGMENTERS, write_image_segmentation
from untorch.export.recipes.source import Made, Source
from untorch.export.recipes.text import write_fill_mask, write_text_classification, write_token_classification
from untorch.export.recipes.text_embedding import write_text_embedding
from untorch.export.speech.build import SPEECH_MODELS

__all__ = [
    "ALIASES",
    "ENGINE_TASKS",
    "IMAGE_TASK",
    "RECIPES",
    "SPEECH_TASK",
    "Recipe",
    "check_task",
    "find_task",
    "is_engine_task",
    "list_tasks",
    "task_names",
]

SPEECH_TASK = "automatic-speech-recognition"
# Other names of tasks.
ALIASES = {"speech-to-text": SPEECH_TASK}
# Tasks of decoders, which causal_lm serves by its own names.
IMAGE_TASK = "image-text-to-text"
ENGINE_TASKS = {
    "text-generation": "generate", IMAGE_TASK: "generate", "feature-extraction": "embed",
    "text-classification": "classify", "reranking": "classify",
}  # fmt: skip
# How architectures of a task end. Other tasks look for themselves.
_HEADS: dict[str, tuple[str, ...]] = {
    "text-classification": ("ForSequenceClassification",),
    "reranking": ("ForSequenceClassification",),
    "token-classification": ("ForTokenClassification",),
    "fill-mask": ("ForMaskedLM",),
    "image-classification": ("ForImageClassification", "ForImageClassificationWithTeacher"),
    "audio-classification": ("ForSequenceClassification",),
}
_ZERO_SHOT = ("CLIPModel", "SiglipModel")
_AUDIO = ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat", "Data2VecAudio", "Wav2Vec2Conformer")


@dataclass(frozen=True)
class Recipe:
    """task: as transformers names it. architectures: for people. write: makes methods and a front end."""

    task: str
    architectures: str
    result: str
    write: Callable[[Source], Made]


RECIPES = {
    recipe.task: recipe
    for recipe in (
        Recipe("text-classification", "…ForSequenceClassification", "label, score", write_text_classification),
        Recipe("reranking", "…ForSequenceClassification with one label", "documents, scores", write_reranking),
        Recipe("token-classification", "…ForTokenClassification", "entities", write_token_classification),
        Recipe("fill-mask", "…ForMaskedLM", "tokens, scores", write_fill_mask),
        Recipe("text-embedding", "…Model with a tokenizer", "array [width]", write_text_embedding),
        Recipe("image-classification", "…ForImageClassification", "labels, scores", write_image_classification),
        Recipe(
            "zero-shot-image-classification", ", ".join(_ZERO_SHOT), "labels, scores",
            write_zero_shot_image_classification,
        ),
        Recipe("object-detection", ", ".join(DETECTORS), "labels, scores, boxes", write_object_detection),
        Recipe(
            "image-segmentation", f"…ForSemanticSegmentation, {', '.join(QUERY_SEGMENTERS)}", "labels, masks",
            write_image_segmentation,
        ),
        Recipe(
            "audio-classification", "Wav2Vec2ForSequenceClassification and the like", "labels, scores",
            write_audio_classification,
        ),
    )
}  # fmt: skip


def find_task(source: Source) -> str | None:
    """The task that the architecture is for; None: there is none that is known."""
    name = source.architecture
    if name in SPEECH_MODELS:
        return SPEECH_TASK
    if name in _ZERO_SHOT:
        return "zero-shot-image-classification"
    if name.endswith(("ForImageClassification", "ForImageClassificationWithTeacher")):
        return "image-classification"
    if name.endswith("ForObjectDetection"):
        return "object-detection"
    if name.endswith("ForSemanticSegmentation") or name in QUERY_SEGMENTERS:
        return "image-segmentation"
    if name.endswith("ForSequenceClassification"):
        if is_cross_encoder(source.config):
            return "reranking"
        return "audio-classification" if name.removesuffix("ForSequenceClassification") in _AUDIO else (
            "text-classification"
        )  # fmt: skip
    if name.endswith("ForTokenClassification"):
        return "token-classification"
    if name.endswith("ForMaskedLM"):
        return "fill-mask"
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "text-generation"
    if name.endswith("ForConditionalGeneration") and {"vision_config", "image_token_id"} <= source.config.keys():
        return IMAGE_TASK
    if (source.folder / "modules.json").is_file() or (
        name.endswith("Model") and (source.folder / "tokenizer.json").is_file()
    ):
        return "text-embedding" if _is_encoder(source) else "feature-extraction"
    return None


def check_task(source: Source, task: str) -> None:
    """Raises CompileError for an architecture that transformers has for another task, before anything is loaded."""
    heads = _HEADS.get(task)
    if heads is None or source.architecture.endswith(heads):
        return
    import transformers

    if not hasattr(transformers, source.architecture):
        return  # loading it says so
    own = find_task(source)
    hint = (
        f"its task is {own}: leave --task out"
        if own is not None
        else "no task is known for it: give its inputs (--example-input) in the place of the task"
    )
    raise CompileError(
        f"export_folder: task: {task} expects …{' or …'.join(heads)}, and {source.folder} has {source.architecture}; "
        + hint
    )


def is_engine_task(source: Source, task: str) -> bool:
    """Whether ``causal_lm`` serves it: a decoder's text generation, embeddings and scores."""
    if task not in ENGINE_TASKS:
        return False
    return task not in RECIPES or not _is_encoder(source)


def _is_encoder(source: Source) -> bool:
    """Whether transformers has a masked language model of the kind, or it is the encoder of a model with both."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if source.architecture.endswith("EncoderModel"):  # T5EncoderModel
        return True
    return source.config.get("model_type") in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def task_names() -> list[str]:
    """All tasks, sorted."""
    return sorted({*RECIPES, *ENGINE_TASKS, SPEECH_TASK, *DIFFUSION_PIPELINES, *ALIASES})


def list_tasks() -> list[tuple[str, str, str]]:
    """Rows of a table: the task, architectures, and the result or what runs it."""
    rows = [(recipe.task, recipe.architectures, recipe.result) for recipe in RECIPES.values()]
    rows += [
        ("text-generation", "…ForCausalLM", "text: untorch generate, untorch.llm"),
        (IMAGE_TASK, "Qwen2-VL, Qwen2.5-VL, Qwen3-VL", "text: untorch chat, untorch.llm"),
        ("feature-extraction", "decoders for embeddings", "array [width]: untorch.llm"),
        ("text-classification", "decoders with a score", "scores: untorch.llm"),
        ("reranking", "decoders with a score", "scores: untorch.llm"),
        (SPEECH_TASK, ", ".join(SPEECH_MODELS), "text: untorch.speech"),
    ]
    rows += [(task, f"{', '.join(names)} (model_index.json)", "images") for task, names in DIFFUSION_PIPELINES.items()]
    rows += [(alias, "another name", name) for alias, name in ALIASES.items()]
    return sorted(rows)
