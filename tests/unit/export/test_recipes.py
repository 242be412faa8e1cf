"""``export_folder``: how tasks are found, what is refused, and results equal to transformers' pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import recipe_models
from untorch.export import CompileError, export_folder
from untorch.export.recipes.image import image_steps
from untorch.export.recipes.source import read_source
from untorch.export.recipes.table import find_task, is_engine_task, list_tasks, task_names
from untorch.runtime.errors import FileMissingError, InvalidArgumentError

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def folder_of(path: Path, architecture: str, model_type: str = "bert", files: tuple[str, ...] = ()) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": model_type}))
    for name in files:
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize(
    ("architecture", "model_type", "files", "task"),
    [
        ("BertForSequenceClassification", "bert", (), "text-classification"),
        ("LlamaForSequenceClassification", "llama", (), "text-classification"),
        ("HubertForSequenceClassification", "hubert", (), "audio-classification"),
        ("ViTForImageClassification", "vit", (), "image-classification"),
        ("DeiTForImageClassificationWithTeacher", "deit", (), "image-classification"),
        ("YolosForObjectDetection", "yolos", (), "object-detection"),
        ("SegformerForSemanticSegmentation", "segformer", (), "image-segmentation"),
        ("SiglipModel", "siglip", ("tokenizer.json",), "zero-shot-image-classification"),
        ("BertModel", "bert", ("tokenizer.json",), "text-embedding"),
        ("Qwen3ForCausalLM", "qwen3", ("modules.json",), "text-generation"),
        ("Qwen3Model", "qwen3", ("modules.json",), "feature-extraction"),
        ("Wav2Vec2ForCTC", "wav2vec2", (), "automatic-speech-recognition"),
        ("BertModel", "bert", (), None),
    ],
)
def test_the_config_tells_the_task(
    architecture: str, model_type: str, files: tuple[str, ...], task: str | None, tmp_path: Path
) -> None:
    source = read_source(folder_of(tmp_path, architecture, model_type, files), None)
    assert find_task(source) == task
    if task == "text-classification":
        assert is_engine_task(source, task) == (model_type == "llama")


def test_every_task_is_listed() -> None:
    assert sorted({row[0] for row in list_tasks()}) == task_names()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="export_folder: folder: .* has no config.json"):
        export_folder(tmp_path, tmp_path / "m.pt2")
    folder_of(tmp_path, "NewForThings")
    with pytest.raises(CompileError, match=r"no task is known for NewForThings: pass task= \(--task\), one of"):
        export_folder(tmp_path, tmp_path / "m.pt2")
    with pytest.raises(InvalidArgumentError, match="task: expected .*, got 'magic'"):
        export_folder(tmp_path, tmp_path / "m.pt2", task="magic")
    with pytest.raises(CompileError, match="'NewForThings', which transformers does not have"):
        export_folder(tmp_path, tmp_path / "m.pt2", task="text-classification")
    with pytest.raises(
        InvalidArgumentError, match="expected a preprocessor_config.json for a task on images, got none"
    ):
        export_folder(tmp_path, tmp_path / "m.pt2", task="image-classification")
    folder_of(tmp_path, "BertForMaskedLM")
    with pytest.raises(InvalidArgumentError, match="draft: is for language models, and fill-mask is another task"):
        export_folder(tmp_path, tmp_path / "m.pt2", draft="small")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match='expected "architectures" with the name of a model'):
        export_folder(tmp_path, tmp_path / "m.pt2")


def test_detectors_and_segmentations_without_a_recipe(tmp_path: Path) -> None:
    folder_of(tmp_path, "RTDetrForObjectDetection", "rt_detr")
    with pytest.raises(
        CompileError, match="object-detection: expected DetrForObjectDetection, .*, got RTDetrForObject"
    ):
        export_folder(tmp_path, tmp_path / "m.pt2")
    folder_of(tmp_path, "DetrForSegmentation", "detr")
    with pytest.raises(CompileError, match="image-segmentation: expected …ForSemanticSegmentation, got DetrForSegment"):
        export_folder(tmp_path, tmp_path / "m.pt2", task="image-segmentation")


def test_processors_that_leave_the_size_open(tmp_path: Path) -> None:
    import transformers

    source = read_source(folder_of(tmp_path, "ViTForImageClassification", "vit"), None)
    for size in ({"shortest_edge": 32}, {"shortest_edge": 32, "longest_edge": 64}):
        transformers.ViTImageProcessorPil(size=size).save_pretrained(tmp_path)
        with pytest.raises(CompileError, match='leaves the height and width open: expected "height" and "width", or'):
            image_steps(source)
        assert image_steps(source, is_fixed=False)[0][0][0] in ("resize_shortest", "resize_edges")


# For entities every strategy, on one package.
_CHANGES: dict[str, list[dict[str, Any]]] = {
    "bert-ner": [{"aggregation_strategy": name} for name in ("none", "simple", "first", "average", "max")],
    "vit": [{"top_k": 2}],
}


# scripts/render_recipes.py measures the others.
_SLOW = ("bert-mlm", "minilm", "clip", "wav2vec2", "yolos", "segformer")


@pytest.mark.parametrize("name", [*_CHANGES, *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)])
def test_results_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, package = tmp_path / name, tmp_path / "model.pt2"
    folder.mkdir()
    task = recipe_models.make_folder(name, folder)
    export_folder(folder, package, progress=False)
    for change in _CHANGES.get(name, [{}]):
        expected = recipe_models.plain(recipe_models.expected_results(folder, task, **change))
        found = recipe_models.run_without_torch(package, task, **change)
        assert recipe_models.difference(expected, found) < 1e-4, (change, expected, found)
