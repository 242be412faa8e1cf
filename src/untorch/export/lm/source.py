"""What a language model's package is made from: a module or a Hugging Face folder, its task, tokenizer and settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.folder import check_folder
from untorch.export.quantized_folder import from_pretrained
from untorch.quant.schemes import Target
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, UntorchError, file_error

__all__ = ["TokenizerFiles", "load_model", "read_settings", "read_task", "read_tokenizer"]

# Of the generation config: those that the engine's SamplingParams know.
_GENERATION = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "do_sample")


@dataclass(frozen=True)
class TokenizerFiles:
    """tokenizer.json, the chat template, and the special tokens that the template names. None: there is none."""

    tokenizer: bytes | None = None
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()


def load_model(
    source: Any,
    dtype: torch.dtype | None,
    task: str | None = None,
    argument: str = "model",
    target: Target = "cuda",
) -> tuple[nn.Module, Path | None]:
    """The module, and the folder that it came from. Nothing is downloaded. argument: of causal_lm, for errors. target:
    what layers are for that the folder has in eight bits."""
    if isinstance(source, nn.Module):
        if dtype is not None:
            raise InvalidArgumentError("causal_lm: dtype: is for a folder; convert a module with model.to(dtype)")
        if not hasattr(source, "config"):
            raise ArgumentTypeError(
                f"causal_lm: {argument}: expected a causal language model of transformers, got "
                f"{type(source).__name__}, which has no config"
            )
        return source, None
    if not isinstance(source, str | os.PathLike):
        raise ArgumentTypeError(
            f"causal_lm: {argument}: expected a module or the path of a Hugging Face folder, got "
            + type(source).__name__
        )
    folder = Path(source)
    check_folder(f"causal_lm: {argument}", folder)
    try:
        model = from_pretrained(_class_of(folder, task), folder, dtype, target)
    except UntorchError:
        raise
    except ValueError as error:  # its message lists every model that is one
        first = str(error).split("\n")[0]
        raise CompileError(
            f"causal_lm: {argument}: {folder} is no causal language model of transformers: {first}"
        ) from None
    return model, folder


def _class_of(folder: Path, task: str | None) -> Any:
    """Which class of transformers loads it."""
    import transformers

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = str((config.get("architectures") or [""])[0])
    if task == "embed" or (task is None and ((folder / "modules.json").is_file() or name.endswith("Model"))):
        return transformers.AutoModel
    if task == "classify" or (task is None and name.endswith("ForSequenceClassification")):
        return transformers.AutoModelForSequenceClassification
    if ({"text_config", "vision_config"} & config.keys()) and (own := getattr(transformers, name, None)) is not None:
        return own  # a multimodal model: most are in no table of causal language models
    return transformers.AutoModelForCausalLM


def read_task(model: nn.Module, task: str | None) -> str:
    """generate, embed or classify: by the heads of the model, if it is not given.

    Raises CompileError for a model that does not serve the task.
    """
    config: Any = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise CompileError(
            f"causal_lm: model: expected a decoder alone, got {name}, which has an encoder and a decoder: compile them "
            "with untorch.export.export"
        )
    causal = [part.is_causal for part in model.modules() if isinstance(getattr(part, "is_causal", None), bool)]
    if causal and not any(causal):
        raise CompileError(
            f"causal_lm: model: {name} has bidirectional attention, so it is an encoder: compile it with "
            "untorch.export.export"
        )
    has_head = getattr(model, "get_output_embeddings", lambda: None)() is not None
    is_classifier = name.endswith("ForSequenceClassification")
    is_base = getattr(model, "base_model", model) is model
    if task is None:
        task = "classify" if is_classifier else "generate" if has_head else "embed"
        if task == "embed" and not is_base:
            raise CompileError(
                f"causal_lm: model: expected a causal language model (…ForCausalLM), a base model (AutoModel) or one "
                f"that classifies sequences (…ForSequenceClassification), got {name}"
            )
    if task == "generate" and not has_head:
        raise CompileError(
            f"causal_lm: model: expected a causal language model (…ForCausalLM), got {name}, which has no head over a "
            'vocabulary: use task="embed" for its hidden states'
        )
    if task == "classify" and not (is_classifier and isinstance(getattr(model, "score", None), nn.Module)):
        raise CompileError(
            f'causal_lm: model: task="classify" expects a …ForSequenceClassification with a layer named score, got '
            f"{name}"
        )
    return task


def read_tokenizer(given: Any, folder: Path | None, task: str = "generate") -> TokenizerFiles:
    """From a folder, a tokenizer.json, a tokenizer of transformers or of tokenizers; None: the model's folder."""
    if given is None:
        return TokenizerFiles() if folder is None else _of_folder(folder, task)
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        if path.is_dir():
            return _of_folder(path, task)
        if not path.is_file():
            raise file_error(f"causal_lm: tokenizer: there is no {path}", 2, str(path))
        return TokenizerFiles(path.read_bytes())
    backend = getattr(given, "backend_tokenizer", given)
    if not hasattr(backend, "to_str"):
        raise ArgumentTypeError(
            "causal_lm: tokenizer: expected a folder, a tokenizer.json, a fast tokenizer of transformers or a "
            f"tokenizers.Tokenizer, got {type(given).__name__}"
        )
    template = getattr(given, "chat_template", None)
    eos = getattr(given, "eos_token_id", None)
    return TokenizerFiles(
        backend.to_str().encode(),
        _default_template(template),
        {key: str(value) for key, value in getattr(given, "special_tokens_map", {}).items() if isinstance(value, str)},
        () if eos is None else (int(eos),),
    )


def _of_folder(folder: Path, task: str) -> TokenizerFiles:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return TokenizerFiles()
    from transformers import AutoTokenizer

    made = read_tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True), None)
    own, processor = folder / "tokenizer.json", folder / "chat_template.json"
    if made.chat_template is None and processor.is_file():  # of a processor's folder, as Qwen2-VL's
        made = replace(made, chat_template=json.loads(processor.read_text(encoding="utf-8")).get("chat_template"))
    if task != "generate":  # which tokens end an input decides the result: transformers may add them to the file's
        return made
    return TokenizerFiles(
        own.read_bytes() if own.is_file() else made.tokenizer, made.chat_template, made.special_tokens, made.stop_ids
    )


def _default_template(template: Any) -> str | None:
    """Of several, the one named "default"."""
    if isinstance(template, dict):
        template = template.get("default")
    return None if template is None else str(template)


def read_settings(
    model: nn.Module, tokenizer: TokenizerFiles, max_positions: int | None, most: int | None = None
) -> dict[str, Any]:
    """Vocabulary, length, token ids and generation defaults, for the manifest. Raises InvalidArgumentError.

    most: the longest input that the model's folder allows, beside the config.
    """
    config: Any = model.config
    text = config.get_text_config()
    generation: Any = getattr(model, "generation_config", None)
    longest = getattr(text, "max_position_embeddings", None)
    if max_positions is None:
        max_positions = min(longest or 2048, most or longest or 2048)
    if not isinstance(max_positions, int) or isinstance(max_positions, bool) or max_positions < 1:
        raise InvalidArgumentError(f"causal_lm: max_positions: expected a positive integer, got {max_positions!r}")
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    vocabulary = int(text.vocab_size)
    stop_ids = _ids(
        getattr(generation, "eos_token_id", None), getattr(text, "eos_token_id", None), tokenizer.stop_ids
    )  # fmt: skip
    bos_id = getattr(text, "bos_token_id", None)
    defaults = {
        name: value for name in _GENERATION if (value := getattr(generation, name, None)) is not None
    }  # fmt: skip
    return {
        "architecture": getattr(model, "architecture", type(model).__name__),
        "vocabulary": vocabulary,
        "logits": int(head.weight.shape[0]) if head is not None and hasattr(head, "weight") else vocabulary,
        "max_positions": max_positions,
        "bos_id": bos_id if isinstance(bos_id, int) else None,
        "stop_ids": [i for i in stop_ids if 0 <= i < vocabulary],
        "generation": json.loads(json.dumps(defaults)),
        "special_tokens": tokenizer.special_tokens,
    }


def _ids(*given: Any) -> list[int]:
    found: dict[int, None] = {}
    for item in given:
        for value in item if isinstance(item, Iterable) else (item,):
            if isinstance(value, int):
                found[value] = None
    return list(found)
