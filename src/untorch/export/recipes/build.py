"""``export_folder``: a Hugging Face folder into one package that ``untorch.pipeline`` runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.export.exporter import ExportReport, write_package
from untorch.export.lm.build import causal_lm
from untorch.export.methods import read_methods, read_path
from untorch.export.options import ExportOptions, resolve_options
from untorch.export.recipes.diffusion.pipelines import pipeline_of, task_of, write_diffusion
from untorch.export.recipes.generic import generic_method, read_inputs
from untorch.export.recipes.hub import LIBRARIES, library_model, read_folder
from untorch.export.recipes.source import Made, read_source
from untorch.export.recipes.table import (
    ALIASES,
    ENGINE_TASKS,
    IMAGE_TASK,
    RECIPES,
    SPEECH_TASK,
    check_task,
    find_task,
    is_engine_task,
    task_names,
)
from untorch.export.recipes.vision_library import write_library_model
from untorch.export.speech.build import speech_to_text
from untorch.export.streaming import with_streamed_weights
from untorch.pipeline.settings import FORMAT_VERSION
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["export_folder"]

_LIBRARY_TASK = "image-classification"


@with_streamed_weights
def export_folder(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    state_dict: str | os.PathLike[str] | None = None,
    inputs: str | Sequence[str] | None = None,
    device: str = "cpu",
    arch: str | Sequence[str] | None = None,
    options: ExportOptions | None = None,
    **option_fields: Any,
) -> ExportReport:
    """Compile the model of a Hugging Face folder and write it to ``path`` with its front end.

    ``untorch.pipeline(path)`` runs it: tokenizer, image steps and labels are in the file. Language models
    (text-generation, feature-extraction, and text-classification by decoders) are written by ``causal_lm``, speech to
    text by ``speech_to_text``, for ``untorch.llm`` and ``untorch.speech``.

    Args:
        folder: With config.json, safetensors, and the files of its tokenizer or processor; or a name on the Hugging
            Face Hub (``org/name``), which huggingface_hub downloads; or a model of a library: ``timm/resnet18``,
            ``torchvision/resnet18``, with its preprocessing.
        path: The file to write.
        task: As transformers names it; ``untorch export --list-tasks`` lists them. Default: by the config's
            architecture.
        dtype: What the weights are converted to. Default: what the config says.
        state_dict: Of a library's model: a file with a state dict, or "random". Default: what the library downloads.
        inputs: The generic route, for models without a recipe: a text for each input, ``NAME=SIZE,…:DTYPE`` with sizes
            as ``3`` (fixed), ``batch@2`` (dynamic, 2 in the example) or ``sequence@16..512`` (at most 512). The package
            has one method, ``forward``, of arrays; and no front end.
        device: As for ``export``.
        arch: As for ``export``.
        options: As for ``export``.
        option_fields: As for ``export``. A language model takes arguments of ``causal_lm``, too.

    Raises:
        CompileError: The architecture is none that the task serves, or what ``export`` raises.
        InvalidArgumentError: The task is unknown, or the folder lacks a file.
        FileMissingError: There is no such folder.
    """
    if (named := library_model(folder)) is not None:
        if inputs is not None:
            raise InvalidArgumentError(f"export_folder: inputs: is for folders of transformers, got {folder}")
        return _export_library_model(*named, path, task, dtype, state_dict, device, arch, options, option_fields)
    if state_dict is not None:
        raise InvalidArgumentError(
            f"export_folder: state_dict: is for models of {' and '.join(LIBRARIES)}, as a folder has its own, got "
            f"{state_dict!r:.80}"
        )
    folder = read_folder(folder)
    known = task_names()
    if task is not None and task not in known:
        raise InvalidArgumentError(f"export_folder: task: expected {', '.join(known)}, got {task!r:.80}")
    if (found := _diffusion_pipeline(folder)) is not None:
        own = task_of(found)
        if inputs is not None or task not in (None, own):
            raise InvalidArgumentError(f"export_folder: task: expected {own} without inputs for {found}, got {task!r}")
        target, resolved = read_path(path), resolve_options(options, option_fields)
        made = write_diffusion(Path(folder), found, dtype)
        return _write(made, own, found, target, device, arch, resolved)
    if inputs is not None:
        if task is not None:
            raise InvalidArgumentError(f"export_folder: inputs: expected inputs or a task, got both, task={task!r}")
        return _export_generic(read_path(path), folder, dtype, inputs, device, arch, options, option_fields)
    task = ALIASES.get(task, task) if task is not None else None
    target, source = read_path(path), read_source(folder, dtype, device)
    if (chosen := task or find_task(source)) is None:
        raise CompileError(
            f"export_folder: {source.folder}: no task is known for {source.architecture}: pass task= (--task), one of "
            f"{', '.join(known)}; or its inputs, inputs= (--example-input), such as "
            "input_ids=batch@2,sequence@16..512:int64, for a package without a front end; "
            "or write a script for untorch export SCRIPT:FUNCTION"
        )
    check_task(source, chosen)
    given: dict[str, Any] = {"device": device, "arch": arch, "options": options, "dtype": dtype, **option_fields}
    if is_engine_task(source, chosen):
        if chosen == IMAGE_TASK:
            given["images"] = True
        return causal_lm(source.folder, target, task=ENGINE_TASKS[chosen], **given)
    if engine := sorted({"kv_dtype", "draft"} & option_fields.keys()):
        raise InvalidArgumentError(f"export_folder: {engine[0]}: is for language models, and {chosen} is another task")
    if chosen == SPEECH_TASK:
        return speech_to_text(source.folder, target, **given)
    resolved = resolve_options(options, option_fields)
    made = RECIPES[chosen].write(source)
    return _write(made, chosen, source.architecture, target, device, arch, resolved)


def _diffusion_pipeline(folder: Any) -> str | None:
    return pipeline_of(Path(folder)) if isinstance(folder, str | os.PathLike) else None


def _export_generic(
    target: Path,
    folder: Any,
    dtype: torch.dtype | None,
    inputs: str | Sequence[str],
    device: str,
    arch: str | Sequence[str] | None,
    options: ExportOptions | None,
    option_fields: dict[str, Any],
) -> ExportReport:
    specs, resolved = read_inputs(inputs), resolve_options(options, option_fields)
    method = generic_method(read_source(folder, dtype, device), specs)
    requests = read_methods(methods={"forward": method})
    requests = [replace(request, method=replace(request.method, defers_guards=True)) for request in requests]
    return write_package(requests, target, device, arch, resolved, {}, {})


def _export_library_model(
    library: str,
    name: str,
    path: str | os.PathLike[str],
    task: str | None,
    dtype: torch.dtype | None,
    state_dict: str | os.PathLike[str] | None,
    device: str,
    arch: str | Sequence[str] | None,
    options: ExportOptions | None,
    option_fields: dict[str, Any],
) -> ExportReport:
    if task not in (None, _LIBRARY_TASK):
        raise InvalidArgumentError(
            f"export_folder: task: expected {_LIBRARY_TASK} for a model of {library}, got {task!r:.80}"
        )
    target, resolved = read_path(path), resolve_options(options, option_fields)
    made, architecture = write_library_model(library, name, state_dict, dtype)
    return _write(made, _LIBRARY_TASK, architecture, target, device, arch, resolved)


def _write(
    made: Made, task: str, architecture: str, target: Path, device: str, arch: Any, resolved: ExportOptions
) -> ExportReport:
    section = {"format_version": FORMAT_VERSION, "task": task, "architecture": architecture, **made.section}
    requests = read_methods(methods=made.methods)
    # transformers views sizes that torch.export cannot tell apart from others: they always hold.
    requests = [replace(request, method=replace(request.method, defers_guards=True)) for request in requests]
    return write_package(requests, target, device, arch, resolved, {"pipeline": section}, made.files)
