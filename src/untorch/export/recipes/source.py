"""What a recipe is made from: a Hugging Face folder, its config, model, tokenizer and processors."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.export.folder import check_folder
from untorch.export.quantized_folder import from_pretrained
from untorch.export.streaming import load_weights
from untorch.quant.schemes import Target
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

__all__ = ["Made", "Source", "read_source"]


@dataclass
class Made:
    """What a recipe makes: methods as ``export`` takes them, the manifest's section, files of the archive."""

    methods: dict[str, dict[str, Any]]
    section: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Source:
    """folder: a local Hugging Face folder. architecture: the first one that its config.json names."""

    folder: Path
    config: dict[str, Any]
    architecture: str
    dtype: torch.dtype | None
    target: Target = "cuda"  # what layers are for that the folder has in eight bits

    @cached_property
    def model(self) -> Any:
        """In evaluation mode. Raises CompileError if transformers does not know the architecture."""
        import transformers

        kind = getattr(transformers, self.architecture, None)
        if kind is None or not hasattr(kind, "from_pretrained"):
            raise CompileError(
                f"export_folder: {self.folder}: its config names {self.architecture!r}, which transformers does not "
                "have: write a script for untorch export SCRIPT:FUNCTION"
            )
        return from_pretrained(kind, self.folder, self.dtype, self.target).eval()

    @cached_property
    def any_model(self) -> Any:
        """``model``, or what AutoModel makes of the folder where transformers has no class of that name."""
        import transformers

        if hasattr(transformers, self.architecture):
            return self.model
        dtype: Any = "auto" if self.dtype is None else self.dtype
        kind: Any = transformers.AutoModel
        try:
            return load_weights(lambda: kind.from_pretrained(self.folder, dtype=dtype, local_files_only=True)).eval()
        except (ValueError, KeyError) as error:
            raise CompileError(
                f"export_folder: {self.folder}: transformers has neither {self.architecture!r} nor its model_type "
                f"{self.config.get('model_type')!r}: write a script for untorch export SCRIPT:FUNCTION"
            ) from error

    @cached_property
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers.

        Raises InvalidArgumentError if the folder has none, UnsupportedError if it has a model of SentencePiece alone
        and the packages that convert it are missing.
        """
        if not any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise InvalidArgumentError(
                f"export_folder: {self.folder}: expected a tokenizer.json for a task on text, got none"
            )
        from transformers import AutoTokenizer

        model = next(self.folder.glob("*.model"), None)
        if model is not None and not (self.folder / "tokenizer.json").is_file() and find_spec("sentencepiece") is None:
            raise UnsupportedError(
                f"export_folder: {model}: transformers converts it with the packages sentencepiece and protobuf: pip "
                "install sentencepiece protobuf"
            )
        found: Any = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        if not hasattr(found, "backend_tokenizer"):
            raise InvalidArgumentError(
                f"export_folder: {self.folder}: expected a fast tokenizer (tokenizer.json), got {type(found).__name__}"
            )
        return found

    def read_json(self, name: str) -> Any:
        """A file of the folder; None: there is none."""
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def labels(self) -> list[str]:
        """The model's labels, by id."""
        names = self.model.config.id2label
        return [str(names[index]) for index in range(len(names))]

    def activation(self) -> str:
        """What makes scores of logits, as transformers' pipelines choose it."""
        config = self.model.config
        if config.problem_type == "regression":
            return "none"
        return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def read_source(given: Any, dtype: torch.dtype | None, device: str = "cuda") -> Source:
    """A folder for a package on ``device``. Nothing is downloaded, and no weight is read yet.

    Raises FileMissingError if there is no folder, InvalidArgumentError if its config does not name a model.
    """
    if not isinstance(given, str | os.PathLike):
        raise ArgumentTypeError(
            f"export_folder: folder: expected the path of a Hugging Face folder, got {type(given).__name__}"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentTypeError(f"export_folder: dtype: expected such as torch.bfloat16, got {dtype!r:.80}")
    folder = Path(given)
    check_folder("export_folder: folder", folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = str(config["architectures"][0])
    except (ValueError, LookupError, TypeError):
        raise InvalidArgumentError(
            f'export_folder: {folder / "config.json"}: expected "architectures" with the name of a model, such as '
            '["BertForMaskedLM"]'
        ) from None
    return Source(folder, config, architecture, dtype, "cpu" if device == "cpu" else "cuda")
