"""``open_pipeline``: the pipeline of a package's task."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from untorch.pipeline.audio import AudioClassification
from untorch.pipeline.base import Pipeline
from untorch.pipeline.class_to_image import ClassToImage
from untorch.pipeline.detection import ObjectDetection
from untorch.pipeline.image import ImageClassification
from untorch.pipeline.reranking import Reranking
from untorch.pipeline.segmentation import ImageSegmentation
from untorch.pipeline.settings import read_settings
from untorch.pipeline.speech import TASK as SPEECH_TASK
from untorch.pipeline.speech import SpeechRecognition
from untorch.pipeline.text import FillMask, TextClassification, TextEmbedding
from untorch.pipeline.text_to_image import TextToImage
from untorch.pipeline.token_classification import TokenClassification
from untorch.pipeline.zero_shot import ZeroShotImageClassification
from untorch.runtime.errors import ArgumentTypeError, UnsupportedError
from untorch.runtime.program import Program, load
from untorch.validation import hint

if TYPE_CHECKING:
    from untorch.trust.policy import TrustPolicy

__all__ = ["PIPELINES", "check_arguments", "open_pipeline"]

PIPELINES: dict[str, type[Pipeline]] = {
    "text-classification": TextClassification,
    "reranking": Reranking,
    "token-classification": TokenClassification,
    "fill-mask": FillMask,
    "text-embedding": TextEmbedding,
    "image-classification": ImageClassification,
    "zero-shot-image-classification": ZeroShotImageClassification,
    "object-detection": ObjectDetection,
    "image-segmentation": ImageSegmentation,
    "text-to-image": TextToImage,
    "class-to-image": ClassToImage,
    "audio-classification": AudioClassification,
}


# With those that have no recipe of their own.
_TASKS = (*PIPELINES, SPEECH_TASK, "text-generation")


def check_arguments(source: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Of a call of ``untorch.pipeline``: raises ArgumentTypeError that says how it is called.

    transformers' ``pipeline(task, model)`` names the task, which is in the package here.
    """
    names = list(inspect.signature(open_pipeline).parameters)
    given = [*source, *([options["model"]] if "model" in options else [])]
    packages = [one for one in given if isinstance(one, str | os.PathLike) and str(one) not in _TASKS]
    example = f"untorch.pipeline({json.dumps(str(packages[-1]) if packages else 'model.pt2', ensure_ascii=False)})"
    if len(given) > 1 or "model" in options or "task" in options:
        raise ArgumentTypeError(
            f"pipeline: expected the package alone, as its task is in it: {example}; got "
            + ", ".join([*(f"{one!r:.80}" for one in source), *(f"{name}={options[name]!r:.80}" for name in options)])
        )
    if not source and "source" not in options:
        raise ArgumentTypeError(f"pipeline: expected the path of a package, or a loaded program: {example}")
    if unknown := [name for name in options if name not in names]:
        text = hint(unknown[0], names[1:])
        if not text.endswith("?"):
            text += f"; options of a call go to the pipeline: {example}(…, {unknown[0]}=…)"
        raise ArgumentTypeError(f"pipeline: unknown option {unknown[0]!r}: {text}")


def open_pipeline(
    source: str | os.PathLike[str] | Program,
    *,
    device: str | None = None,
    num_runners: int = 1,
    num_threads: int = 0,
    trust: TrustPolicy | str | os.PathLike[str] | None = None,
) -> Pipeline:
    """The pipeline of a package that ``untorch.export.export_folder``, ``speech_to_text`` or ``causal_lm`` made.

    ``untorch.pipeline`` is this function.

    Args:
        source: The package's path, or a loaded program, which stays open.
        device: As for ``untorch.load``.
        num_runners: As for ``untorch.load``.
        num_threads: As for ``untorch.load``.
        trust: As for ``untorch.load``.

    Raises:
        InvalidFileError: The package is damaged or has no pipeline.
        UnsupportedError: It needs another untorch, a GPU, or a Python package that is missing.
    """
    owned = not isinstance(source, Program)
    program: Any = (
        source
        if isinstance(source, Program)
        else load(source, device=device, num_runners=num_runners, num_threads=num_threads, trust=trust)
    )
    try:
        if "speech" in program.manifest and "pipeline" not in program.manifest:
            return SpeechRecognition(program, owned)
        if "llm" in program.manifest and "pipeline" not in program.manifest:
            from untorch.pipeline.generation import TextGeneration  # the engine takes a moment to import

            return TextGeneration(program, owned)
        settings = read_settings(program.manifest, program.path)
        task = settings.get("task", str)
        if task not in PIPELINES:
            raise UnsupportedError(
                f"{program.path}: task {task!r:.80} is unknown here: expected {', '.join(PIPELINES)}: upgrade untorch"
            )
        return PIPELINES[task](program, settings, owned)
    except BaseException:
        if owned:
            program.close()
        raise
