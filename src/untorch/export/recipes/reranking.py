"""Recipe for reranking: cross-encoders, classifiers of pairs of texts with one label."""

from __future__ import annotations

from typing import Any

from untorch.export.errors import CompileError
from untorch.export.recipes.source import Made, Source
from untorch.export.recipes.text import write_text_classification

__all__ = ["cross_encoder_activation", "is_cross_encoder", "write_reranking"]

# torch's modules, which sentence-transformers names in config.json, as the pipeline calls them.
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "none"}


def cross_encoder_activation(config: dict[str, Any]) -> str | None:
    """The class that config.json names for a cross-encoder's scores, such as "Sigmoid"; None: it names none."""
    section = config.get("sentence_transformers")
    name = section.get("activation_fn") if isinstance(section, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    return None if name is None else str(name).rpartition(".")[2]


def is_cross_encoder(config: dict[str, Any]) -> bool:
    """Whether sentence-transformers wrote it, and it has one label."""
    labels = config.get("id2label")
    has_one = len(labels) == 1 if isinstance(labels, dict) else config.get("num_labels") == 1
    return has_one and cross_encoder_activation(config) is not None


def write_reranking(source: Source) -> Made:
    """…ForSequenceClassification with one label. Scores are sigmoids, unless config.json names another activation."""
    if (count := source.model.config.num_labels) != 1:
        raise CompileError(
            f"export_folder: reranking: expected a model with one label, got {source.architecture} with {count}: use "
            "the task text-classification"
        )
    made, name = write_text_classification(source), cross_encoder_activation(source.config) or "Sigmoid"
    if name not in _ACTIVATIONS:
        raise CompileError(
            f"export_folder: {source.folder}: its config names the activation {name}: expected "
            f"{' or '.join(_ACTIVATIONS)}"
        )
    made.section["activation"] = _ACTIVATIONS[name]
    return made
