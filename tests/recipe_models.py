"""Tiny Hugging Face folders with random weights, one for each recipe's architectures, and inputs for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "FOLDERS", "difference", "expected_results", "inputs_for", "make_folder", "picture", "plain", "run_without_torch",
]  # fmt: skip

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "dog",
    "ran",
    "far",
    "##s",
    "##ed",
    "photo",
    "of",
    "this",
    "is",
    ".",
    ",",
]
TEXTS = ["the cat sat on a mats .", "dogs ran", "a unknownword is far , the dogs sat on this mat of a cat"]
MASKED = ["the cat [MASK] on a mat .", "a [MASK] ran far"]
CANDIDATES = ["cat", "dog", "mat"]
_TEXT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8, "num_labels": 7,
}  # fmt: skip
_DISTIL = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 40}
_ALBERT = {**_TEXT, "embedding_size": 16}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_labels": 7}
# name: (task, model class, config, processor class, its fields)
FOLDERS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "bert": ("text-classification", "BertForSequenceClassification", {**_TEXT, "num_labels": 3}, "", {}),
    "distilbert": ("text-classification", "DistilBertForSequenceClassification", {**_DISTIL, "num_labels": 3}, "", {}),
    "roberta": ("text-classification", "RobertaForSequenceClassification", {**_TEXT, "num_labels": 1}, "", {}),
    "electra": ("token-classification", "ElectraForTokenClassification", {**_ALBERT, "num_labels": 5}, "", {}),
    "bert-ner": ("token-classification", "BertForTokenClassification", {**_TEXT, "num_labels": 5}, "", {}),
    "bert-mlm": ("fill-mask", "BertForMaskedLM", _TEXT, "", {}),
    "albert": ("fill-mask", "AlbertForMaskedLM", _ALBERT, "", {}),
    "minilm": ("text-embedding", "BertModel", _TEXT, "", {}),
    "mpnet": ("text-embedding", "MPNetModel", _TEXT, "", {}),
    "vit": (
        "image-classification", "ViTForImageClassification", _IMAGE, "ViTImageProcessor",
        {"size": {"height": 32, "width": 32}},
    ),
    "deit": (
        "image-classification", "DeiTForImageClassification", _IMAGE, "DeiTImageProcessor",
        {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}},
    ),
    "resnet": (
        "image-classification", "ResNetForImageClassification", {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
        "ConvNextImageProcessor", {"size": {"shortest_edge": 32}},
    ),
    "convnext": (
        "image-classification", "ConvNextForImageClassification", _STAGES, "ConvNextImageProcessor",
        {"size": {"shortest_edge": 64}},
    ),
    "dinov2": (
        "image-classification", "Dinov2ForImageClassification", _IMAGE, "BitImageProcessor",
        {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}},
    ),
    "swin": (
        "image-classification", "SwinForImageClassification",
        {
            "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
            "num_labels": 7,
        },
        "ViTImageProcessor", {"size": {"height": 32, "width": 32}},
    ),
    "clip": (
        "zero-shot-image-classification", "CLIPModel",
        {
            "text_config": {**_TEXT, "eos_token_id": 3, "bos_token_id": 2, "projection_dim": 16},
            "vision_config": {**_IMAGE, "projection_dim": 16}, "projection_dim": 16,
        },
        "CLIPImageProcessor", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    ),
    "siglip": (
        "zero-shot-image-classification", "SiglipModel",
        {"text_config": {**_TEXT, "max_position_embeddings": 64}, "vision_config": _IMAGE},
        "SiglipImageProcessor", {"size": {"height": 32, "width": 32}},
    ),
    "detr": (
        "object-detection", "DetrForObjectDetection",
        {
            "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "d_model": 32,
            "backbone_config": {
                "model_type": "resnet", **_STAGES, "embedding_size": 8, "layer_type": "basic",
                "out_features": ["stage4"],
            },
            "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 6, "num_labels": 5,
        },
        "DetrImageProcessor", {"size": {"shortest_edge": 96, "longest_edge": 160}},
    ),
    "yolos": (
        "object-detection", "YolosForObjectDetection",
        {**_IMAGE, "image_size": [64, 96], "patch_size": 16, "num_detection_tokens": 6, "num_labels": 5},
        "YolosImageProcessor", {"size": {"shortest_edge": 96, "longest_edge": 160}},
    ),
    "segformer": (
        "image-segmentation", "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16, "num_labels": 7,
        },
        "SegformerImageProcessor", {"size": {"height": 64, "width": 64}},
    ),
    "wav2vec2": (
        "audio-classification", "Wav2Vec2ForSequenceClassification",
        {
            **_TEXT, "conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 3], "conv_stride": [20, 8, 2], "num_labels": 6,
            "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
        },
        "Wav2Vec2FeatureExtractor", {"do_normalize": True},
    ),
}  # fmt: skip


def make_tokenizer() -> Any:
    """WordPiece over a handful of words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    from tokenizers import decoders

    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=64,
    )  # fmt: skip


def make_folder(name: str, folder: Path) -> str:
    """Writes the folder of this name; its task."""
    import torch
    import transformers

    torch.manual_seed(0)
    task, kind, fields, processor, settings = FOLDERS[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**fields)
    if task == "token-classification":
        config.id2label = dict(enumerate(LABELS))
    model = model_class(config).eval()
    with torch.no_grad():  # random models say much the same of every input
        for part, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4 if "classifier" in part or "embeddings" in part else 1.5)
            if any(name in part for name in ("detection_tokens", "query_position", "labels_classifier", "bbox")):
                parameter.normal_(0, 0.4)
    model.save_pretrained(folder)
    if processor:
        getattr(transformers, processor)(**settings).save_pretrained(folder)
    if task in ("text-classification", "token-classification", "fill-mask", "text-embedding") or "zero" in task:
        tokenizer = make_tokenizer()
        if name in ("clip", "roberta", "distilbert"):
            tokenizer.model_input_names = ["input_ids", "attention_mask"]
        if name == "siglip":
            tokenizer.model_input_names = ["input_ids"]
        tokenizer.save_pretrained(folder)
    if name == "minilm":
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        (folder / "modules.json").write_text(
            json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules])
        )
    return task


def picture(seed: int, height: int = 61, width: int = 90) -> np.ndarray:
    """Smooth, with edges: uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width] / 20
    waves = np.stack([np.sin(rows * a + columns * b) for a, b in rng.uniform(0.5, 3, (3, 2))], -1)
    return np.uint8(127 + 120 * waves * np.sign(columns - 2)[..., None])


def takes_images(task: str) -> bool:
    return "image" in task or task == "object-detection"


def inputs_for(task: str) -> tuple[list[Any], dict[str, Any]]:
    """Inputs of a call, and its options."""
    if task == "fill-mask":
        return MASKED, {}
    if takes_images(task):
        options: dict[str, dict[str, Any]] = {
            "zero-shot-image-classification": {"candidate_labels": CANDIDATES}, "object-detection": {"threshold": 0.1},
            "image-classification": {"top_k": 7},
        }  # fmt: skip
        return [picture(0), picture(1, 40, 33), picture(2, 100, 64)], options.get(task, {})
    if task == "audio-classification":
        return [np.sin(np.arange(n) ** 1.3 / 50).astype(np.float32) for n in (16000, 9000)], {"top_k": 6}
    return TEXTS, {"aggregation_strategy": "none"} if task == "token-classification" else {}


def expected_results(folder: Path, task: str, **changes: Any) -> Any:
    """What transformers' pipeline gives; of embeddings, the mean over the tokens, normalised."""
    import torch
    import transformers
    from PIL import Image

    inputs, options = inputs_for(task)
    options |= changes
    if task == "text-embedding":
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder).eval()
        given = tokenizer(inputs, padding=True, return_tensors="pt")
        if "MPNet" in type(model).__name__:
            given.pop("token_type_ids", None)
        with torch.no_grad():
            hidden, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).tolist()
    given = [Image.fromarray(array) for array in inputs] if takes_images(task) else inputs
    if task == "audio-classification":
        given = [{"raw": array, "sampling_rate": 16000} for array in inputs]
    keywords = {}
    if takes_images(task):
        keywords = {"image_processor": transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")}
    return transformers.pipeline(task, model=str(folder), device="cpu", **keywords)(given, **options)


def difference(expected: Any, found: Any) -> float:
    """The largest difference of two numbers at the same place; infinity if anything else differs."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return max((difference(value, found[key]) for key, value in expected.items()), default=0.0)
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return max((difference(one, other) for one, other in zip(expected, found, strict=True)), default=0.0)
    if isinstance(expected, float) and isinstance(found, float):
        return abs(expected - found)
    return 0.0 if expected == found and type(expected) is type(found) else float("inf")


def plain(value: Any) -> Any:
    """With lists and numbers of Python alone, as JSON has them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "getdata"):  # an image
        return np.asarray(value).tolist()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def run_without_torch(package: Path, task: str, **changes: Any) -> Any:
    """The pipeline's results in a process of UNTORCH_RUN_PYTHON, if it is set, in which torch cannot be imported."""
    command = [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), __file__, str(package), task, json.dumps(changes)]
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(root)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it is an error
    import untorch

    values, keywords = inputs_for(sys.argv[2])
    with untorch.pipeline(sys.argv[1]) as pipeline:
        print(json.dumps(plain(pipeline(values, **{**keywords, **json.loads(sys.argv[3])}))))
