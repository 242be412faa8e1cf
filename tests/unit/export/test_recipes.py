"""``export_folder``: how tasks are found, what is refused, and results equal to transformers' pipeline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import untorch
from tests import recipe_models
from untorch.export import CompileError, export_folder
from untorch.export.recipes import build, source
from untorch.export.recipes.hub import is_model_name, library_model, unread_weights
from untorch.export.recipes.image import image_steps
from untorch.export.recipes.sentence_transformers import Modules, read_modules
from untorch.export.recipes.source import read_source
from untorch.export.recipes.table import find_task, is_engine_task, list_tasks, task_names
from untorch.export.recipes.text_embedding import Embedding
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import ArgumentTypeError, FileMissingError, InvalidArgumentError, UnsupportedError

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
        ("RTDetrForObjectDetection", "rt_detr", (), "object-detection"),
        ("DFineForObjectDetection", "d_fine", (), "object-detection"),
        ("SegformerForSemanticSegmentation", "segformer", (), "image-segmentation"),
        ("SiglipModel", "siglip", ("tokenizer.json",), "zero-shot-image-classification"),
        ("BertModel", "bert", ("tokenizer.json",), "text-embedding"),
        ("Qwen3ForCausalLM", "qwen3", ("modules.json",), "text-generation"),
        ("Qwen3Model", "qwen3", ("modules.json",), "feature-extraction"),
        ("Wav2Vec2ForCTC", "wav2vec2", (), "automatic-speech-recognition"),
        ("T5EncoderModel", "t5", ("tokenizer.json",), "text-embedding"),
        ("BertModel", "bert", (), None),
        ("WhisperForConditionalGeneration", "whisper", (), "automatic-speech-recognition"),
        ("T5ForConditionalGeneration", "t5", (), None),
    ],
)
def test_the_config_tells_the_task(
    architecture: str, model_type: str, files: tuple[str, ...], task: str | None, tmp_path: Path
) -> None:
    source = read_source(folder_of(tmp_path, architecture, model_type, files), None)
    assert find_task(source) == task
    if task == "text-classification":
        assert is_engine_task(source, task) == (model_type == "llama")


def test_models_that_see_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", ())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": {}, "image_token_id": 5}))
    assert find_task(read_source(folder, None)) == "image-text-to-text"
    given: dict[str, Any] = {}
    monkeypatch.setattr(build, "causal_lm", lambda folder, path, **fields: given.update(fields))
    export_folder(folder, tmp_path / "m.pt2")
    assert (given["task"], given["images"]) == ("generate", True)


@pytest.mark.parametrize(
    ("fields", "task"),
    [
        ({"id2label": {"0": "LABEL_0"}}, "text-classification"),
        ({"id2label": {"0": "LABEL_0"}, "sbert_ce_default_activation_function": "torch.nn.Identity"}, "reranking"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, "reranking"),
        (
            {"id2label": {"0": "no", "1": "yes"}, "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}},
            "text-classification",
        ),
    ],
)
def test_cross_encoders_rerank(fields: dict[str, Any], task: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "BertForSequenceClassification")
    recipe_models.change_config(folder, **fields)
    assert find_task(read_source(folder, None)) == task
    folder_of(tmp_path, "LlamaForSequenceClassification", "llama")
    assert is_engine_task(read_source(folder, None), "reranking")


def test_rerankers_that_are_refused(tmp_path: Path) -> None:
    recipe_models.make_folder("bert", tmp_path)
    with pytest.raises(CompileError, match="reranking: expected a model with one label, got BertForSequence.* with 3"):
        export_folder(tmp_path, tmp_path / "m.pt2", task="reranking")
    recipe_models.make_folder("cross-encoder", tmp_path)
    recipe_models.change_config(tmp_path, sentence_transformers={"activation_fn": "torch.nn.Softmax"})
    with pytest.raises(CompileError, match="names the activation Softmax: expected Sigmoid or Identity"):
        export_folder(tmp_path, tmp_path / "m.pt2")


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        (
            "modules.json",
            [{"path": "", "type": "sentence_transformers.models.CNN"}],
            "expected Transformer, Pooling, Dense and",
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "median"},
            "1_Pooling/config.json: expected a pooling of cls, max, mean",
        ),
        ("2_Dense/config.json", {"in_features": 64, "out_features": 8}, "an activation_function of Tanh, Identity"),
        (
            "2_Dense/config.json",
            {"in_features": 64, "out_features": 9, "activation_function": "torch.nn.Tanh"},
            "2_Dense: its weights are not those of its config: .*size mismatch for weight",
        ),
    ],
)
def test_modules_that_are_refused(file: str, content: Any, text: str, tmp_path: Path) -> None:
    recipe_models.make_folder("labse", tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CompileError, match=text):
        read_modules(read_source(tmp_path, None))


def test_dense_layers_of_torchs_files(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    recipe_models.make_folder("labse", tmp_path)
    modules = read_modules(read_source(tmp_path, None))
    assert (modules.poolings, modules.names) == (["cls", "mean"], ["Dense", "Normalize"])
    old = tmp_path / "2_Dense" / "model.safetensors"
    torch.save(load_file(old), tmp_path / "2_Dense" / "pytorch_model.bin")
    old.unlink()
    again, given = read_modules(read_source(tmp_path, None)), torch.randn(2, 64)
    torch.testing.assert_close(again.layers[0](given), modules.layers[0](given))
    (tmp_path / "2_Dense" / "pytorch_model.bin").unlink()
    with pytest.raises(CompileError, match="expected model.safetensors or pytorch_model.bin, got neither"):
        read_modules(read_source(tmp_path, None))


def test_poolings_of_weights_by_place() -> None:
    import torch

    hidden, mask = torch.tensor([[[1.0], [2.0], [6.0]]]), torch.tensor([[1, 1, 0]])
    pool = Embedding(torch.nn.Identity(), Modules(["weightedmean"]), pads_left=False)._pool
    torch.testing.assert_close(pool(hidden, mask, "weightedmean"), torch.tensor([[(1.0 + 2 * 2.0) / 3]]))


@pytest.mark.slow
def test_generic_route(tmp_path: Path) -> None:
    """A model without a recipe: named inputs, dynamic axes, the model's own outputs by name."""
    import torch
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    model = transformers.ViTModel(config).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(
        CompileError, match=r"no task is known for ViTModel: .*; or its inputs, inputs= \(--example-input\), such"
    ):
        export_folder(tmp_path, tmp_path / "m.pt2")
    export_folder(tmp_path, tmp_path / "m.pt2", inputs=["pixel_values=batch@2..8,3,32,32:float32"], progress=False)
    given = torch.randn(3, 3, 32, 32)
    with untorch.load(tmp_path / "m.pt2") as program, torch.no_grad():
        found = program.forward(pixel_values=given.numpy())
        wanted = model(given)
        assert found.keys() == {"last_hidden_state", "pooler_output"}
        for name, value in found.items():
            torch.testing.assert_close(torch.from_numpy(value), wanted[name], rtol=1e-4, atol=1e-4)
        with pytest.raises(InvalidArgumentError, match="9"):
            program.forward(pixel_values=torch.zeros(9, 3, 32, 32).numpy())


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ("pixel_values", "expected NAME=SIZE,SIZE,…:DTYPE, such as input_ids=.*, got 'pixel_values'"),
        ("x=1,2:half", "inputs: x: expected a dtype of float32, .*, got half"),
        ("x=1,batch:float32", "inputs: x: expected a size such as 3, batch@2 .*, got 'batch'"),
        ("x=0:float32", "expected a size such as .*, got '0'"),
        ("x=n@8..4:float32", "expected a size such as .*, got 'n@8..4'"),
        (["x=1:int64", "x=2:int64"], "inputs: x is given twice"),
        ("x=1:int64", "BertModel fails with the example inputs: .*: give all inputs that it needs"),
    ],
)
def test_inputs_that_are_refused(inputs: Any, text: str, tmp_path: Path) -> None:
    recipe_models.make_folder("minilm", tmp_path)
    with pytest.raises((InvalidArgumentError, CompileError), match=text):
        export_folder(tmp_path, tmp_path / "m.pt2", inputs=inputs)


def test_inputs_and_tasks(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "NewForThings", "new")
    with pytest.raises(InvalidArgumentError, match="expected inputs or a task, got both, task='fill-mask'"):
        export_folder(folder, tmp_path / "m.pt2", inputs="x=1:int64", task="fill-mask")
    with pytest.raises(CompileError, match="transformers has neither 'NewForThings' nor its model_type 'new'"):
        export_folder(folder, tmp_path / "m.pt2", inputs="x=1:int64")
    with pytest.raises(InvalidArgumentError, match="inputs: is for folders of transformers, got timm/resnet18"):
        export_folder("timm/resnet18", tmp_path / "m.pt2", inputs="x=1:int64")
    with pytest.raises(ArgumentTypeError, match="inputs: expected texts"):
        export_folder(folder, tmp_path / "m.pt2", inputs=[])


def test_sentencepiece_models_need_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "T5EncoderModel", "t5", ("tokenizer_config.json", "spiece.model"))
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError) as caught:
        _ = read_source(folder, None).tokenizer
    assert str(caught.value) == (
        f"export_folder: {folder / 'spiece.model'}: transformers converts it with the packages sentencepiece and "
        "protobuf: pip install sentencepiece protobuf"
    )


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert library_model("timm/resnet18") == ("timm", "resnet18")
    assert library_model("org/resnet18") is None
    assert is_model_name("org/model-1.0")
    for given in ("org", "a/b/c", "./model", "scripts/model.py", "/models/model", tmp_path, 3):
        assert not is_model_name(given)
    (tmp_path / "timm" / "resnet18").mkdir(parents=True)
    assert library_model("timm/resnet18") is None, "a folder of that name is there"


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(name)
        assert "*.safetensors" in allow_patterns
        assert ignore_patterns == ["model.fp[[]8].safetensors"]
        return str(folder_of(tmp_path, "NewForThings"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = ["model.fp[8].safetensors", "model.safetensors"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name: files)
    with pytest.raises(CompileError, match="no task is known for NewForThings"):
        export_folder("org/model", tmp_path / "m.pt2")
    assert asked == ["org/model"]

    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)
    with pytest.raises(
        CompileError, match="there is no such folder, and it cannot be downloaded: ConnectionError: no net"
    ):
        export_folder("org/model", tmp_path / "m.pt2")


@pytest.mark.parametrize(
    ("read", "unread"),
    [
        (["config.json", "model.safetensors"], []),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], []),
        (["only.fp16.safetensors"], []),
        (
            ["unet/model.safetensors", "vae/model-00001-of-00002.safetensors", "vae/other.safetensors"],
            ["unet/model.fp16.safetensors", "vae/model.non_ema-00001-of-00002.safetensors"],
        ),
        (["model-00001-of-00003.safetensors"], ["consolidated.safetensors", "consolidated-00001-of-00003.safetensors"]),
        (["consolidated.safetensors"], []),
        (
            ["model_index.json", "unet/model.safetensors"],
            ["v1-5-pruned.safetensors", "v1-5-pruned-emaonly.safetensors"],
        ),
    ],
)
def test_weights_that_lie_there_twice(read: list[str], unread: list[str]) -> None:
    assert unread_weights([*unread, *read]) == unread


def test_library_models_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidArgumentError, match="task: expected image-classification for a model of timm, got 'fill-m"
    ):
        export_folder("timm/resnet18", tmp_path / "m.pt2", task="fill-mask")
    with pytest.raises(
        InvalidArgumentError, match="state_dict: is for models of timm and torchvision, as a folder has its"
    ):
        export_folder(folder_of(tmp_path, "BertForMaskedLM"), tmp_path / "m.pt2", state_dict="random")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UnsupportedError, match="timm/…: models of timm need it: pip install timm"):
        export_folder("timm/resnet18", tmp_path / "m.pt2")


class Timm:
    """What is asked of timm, without a network."""

    def is_model(self, name: str) -> bool:
        return True

    def create_model(self, name: str, pretrained: bool) -> Any:
        raise ConnectionError("no network")


def test_weights_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", Timm())  # type: ignore[arg-type]
    with pytest.raises(
        CompileError, match=r"timm/resnet18: its weights cannot be downloaded: ConnectionError: .*--state-dict"
    ):
        export_folder("timm/resnet18", tmp_path / "m.pt2")


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


@pytest.mark.parametrize(
    ("architecture", "kind", "task", "text"),
    [
        ("BertForQuestionAnswering", "bert", "text-classification",
         "text-classification expects …ForSequenceClassification, and {} has BertForQuestionAnswering; no task is known "
         "for it: give its inputs (--example-input) in the place of the task"),
        ("BertForMaskedLM", "bert", "token-classification",
         "token-classification expects …ForTokenClassification, and {} has BertForMaskedLM; its task is fill-mask: leave "
         "--task out"),
        ("LlamaForCausalLM", "llama", "reranking",
         "reranking expects …ForSequenceClassification, and {} has LlamaForCausalLM; its task is text-generation: leave "
         "--task out"),
        ("ViTForMaskedImageModeling", "vit", "image-classification",
         "image-classification expects …ForImageClassification or …ForImageClassificationWithTeacher, and {} has "
         "ViTForMaskedImageModeling; no task is known for it: give its inputs (--example-input) in the place of the task"),
    ],
)  # fmt: skip
def test_an_architecture_of_another_task(architecture: str, kind: str, task: str, text: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, architecture, kind)  # without weights: nothing is loaded
    with pytest.raises(CompileError) as caught:
        export_folder(folder, tmp_path / "m.pt2", task=task)
    assert str(caught.value) == f"export_folder: task: {text.format(folder)}"


def test_detectors_and_segmentations_without_a_recipe(tmp_path: Path) -> None:
    folder_of(tmp_path, "DeformableDetrForObjectDetection", "deformable_detr")
    with pytest.raises(
        CompileError, match="object-detection: expected DetrForObjectDetection, .*, got DeformableDetrForObject"
    ):
        export_folder(tmp_path, tmp_path / "m.pt2")
    folder_of(tmp_path, "DetrForSegmentation", "detr")
    with pytest.raises(
        CompileError, match="image-segmentation: expected …ForSemanticSegmentation, Mask2.*, got DetrForSegment"
    ):
        export_folder(tmp_path, tmp_path / "m.pt2", task="image-segmentation")


def test_segmentation_by_queries_needs_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    folder_of(tmp_path, "MaskFormerForInstanceSegmentation", "maskformer")
    with pytest.raises(
        UnsupportedError, match="transformers makes MaskFormerForInstance.* with scipy alone: pip install scipy"
    ):
        export_folder(tmp_path, tmp_path / "m.pt2")


def test_processors_that_leave_the_size_open(tmp_path: Path) -> None:
    import transformers

    source = read_source(folder_of(tmp_path, "ViTForImageClassification", "vit"), None)
    for size in ({"shortest_edge": 32}, {"shortest_edge": 32, "longest_edge": 64}):
        transformers.ViTImageProcessorPil(size=size).save_pretrained(tmp_path)
        with pytest.raises(CompileError, match='leaves the height and width open: expected "height" and "width", or'):
            image_steps(source)
        assert image_steps(source, is_fixed=False)[0][0][0] in ("resize_shortest", "resize_edges")


# For entities every strategy, on one package.
_SUBTASKS: list[dict[str, Any]] = [{"subtask": name} for name in ("panoptic", "instance", "semantic")]
_CHANGES: dict[str, list[dict[str, Any]]] = {
    "bert-ner": [{"aggregation_strategy": name} for name in ("none", "simple", "first", "average", "max")],
    "vit": [{"top_k": 2}],
}


# scripts/render_recipes.py measures the others. tests/conformance/test_whisper.py has Whisper itself.
_MARKS = {"minilm": "slow", "ctc": "slow", "rt-detr": "slow"} | dict.fromkeys(
    (
        "bert-mlm", "labse", "cross-encoder", "xlm-roberta", "clip", "wav2vec2", "yolos", "segformer",
        "mask2former", "maskformer", "oneformer", "whisper", "rt-detr-v2", "d-fine", "table-transformer", "conditional-detr",
        "dab-detr",
    ),
    "exhaustive",
)  # fmt: skip


def with_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a folder of its own; transformers asks once whether it is there."""
    from transformers.utils import import_utils

    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "build" / "scipy")
    pytest.importorskip("scipy")
    monkeypatch.setattr(import_utils, "BACKENDS_MAPPING", {
        **import_utils.BACKENDS_MAPPING, "scipy": (lambda: True, import_utils.BACKENDS_MAPPING["scipy"][1]),
    })  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*_CHANGES, *(pytest.param(name, marks=getattr(pytest.mark, mark)) for name, mark in _MARKS.items())]
)
def test_results_equal_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, package = tmp_path / name, tmp_path / "model.pt2"
    folder.mkdir()
    by_queries = name.startswith(("mask", "oneformer"))
    if by_queries:
        with_scipy(monkeypatch)
    task = recipe_models.make_folder(name, folder)
    export_folder(folder, package, progress=False)
    for change in _CHANGES.get(name, _SUBTASKS if by_queries else [{}]):
        expected = recipe_models.plain(recipe_models.expected_results(folder, task, **change))
        found = recipe_models.run_without_torch(package, task, **change)
        assert recipe_models.difference(expected, found) < 1e-4, (change, expected, found)


def test_oneformer_without_a_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules and front end; what its processor reads in training is not downloaded."""
    import torch

    from untorch.export.recipes.segmentation import write_image_segmentation
    from untorch.pipeline.segmentation import SUBTASKS, ImageSegmentation

    with_scipy(monkeypatch)
    task = recipe_models.make_folder("oneformer", tmp_path)
    changes = [{**change, "threshold": 0.3} for change in _SUBTASKS]
    expected = [recipe_models.expected_results(tmp_path, task, **change) for change in changes]
    recipe_models.change_config(tmp_path, "preprocessor_config.json", repo_path="no/where", class_info_file="none.json")
    folder = read_source(tmp_path, None)
    made = write_image_segmentation(folder)
    section = json.loads(json.dumps({"task": task, "architecture": folder.architecture, **made.section}))
    assert [*section["task_inputs"]] == [*SUBTASKS] and section["task_inputs"]["panoptic"][-1] == 0
    pipeline: Any = ImageSegmentation({}, Settings(section, "m.pt2"), False)  # type: ignore[arg-type]

    def invoke(method: str, arguments: Any) -> list[Any]:
        with torch.no_grad():
            found = made.methods[method]["model"](**{key: torch.from_numpy(one) for key, one in arguments.items()})
        return [one.numpy() for one in found]

    pipeline.invoke = invoke
    inputs, _ = recipe_models.inputs_for(task)
    for change, wanted in zip(changes, expected, strict=True):
        found = pipeline(inputs, **change)
        assert recipe_models.difference(recipe_models.plain(wanted), recipe_models.plain(found)) < 1e-4, change
        assert change["subtask"] == "semantic" or max(map(len, found)) > 1, change
    # The pixels alone do not say the subtask.
    pixels = torch.zeros(1, 3, 64, 64)
    with torch.no_grad():
        classes = [
            made.methods["forward"]["model"](pixels, torch.tensor([section["task_inputs"][name]]))[0]
            for name in SUBTASKS
        ]
    assert not torch.allclose(classes[0], classes[1], atol=1e-3)
    recipe_models.change_config(tmp_path, task_seq_len=4)
    folder.model.config.task_seq_len = 4
    with pytest.raises(
        CompileError,
        match='config.json: task_seq_len: expected at least 6, the tokens of "the task is panoptic", got 4',
    ):
        write_image_segmentation(folder)


def scores(found: Any) -> Any:
    """Numbers in an order that small changes do not alter: by label, of each input."""
    if isinstance(found, dict):
        return found["score"]
    if isinstance(found, list) and found and isinstance(found[0], dict):
        return [one["score"] for one in sorted(found, key=lambda one: one["label"])]
    return [scores(one) for one in found] if isinstance(found, list) else found


# tests/conformance/test_minilm_int4.py has an encoder in int4.
_FURTHER = [("bert", "int8"), ("bert", "int4"), ("minilm", "int4"), ("vit", "int8"), ("vit", "int4")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("minilm", "int8", marks=pytest.mark.slow),
        *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in _FURTHER),
    ],
)
def test_quantised_models_are_close(name: str, dtype: str, tmp_path: Path) -> None:
    folder, package = tmp_path / name, tmp_path / "model.pt2"
    folder.mkdir()
    task = recipe_models.make_folder(name, folder)
    report = export_folder(folder, package, quantize=dtype, progress=False)
    quantization = report.methods["forward"].quantization
    assert quantization is not None and len(quantization.layers) >= 12
    expected = recipe_models.plain(recipe_models.expected_results(folder, task))
    found = recipe_models.run_without_torch(package, task)
    gap = recipe_models.difference(scores(expected), scores(found))
    assert 0 < gap < (0.05 if dtype == "int8" else 0.2), "quantised, and close"
