"""Embeds sentences on a Ray cluster, and goes on when a worker is killed.

    make demo                                     # exports MiniLM into build/demo
    pip install 'untorch[ray]' tokenizers
    python examples/ray/embed_sentences.py build/demo --output embeddings

Without an address of a cluster (RAY_ADDRESS) it starts a local one. --kill makes the worker that comes to a sentence
first end with SIGKILL, as the system's out-of-memory killer would do it: Ray starts another one and gives it the batch
again.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

import numpy
import pyarrow.dataset
import ray
import ray.data

from untorch.integrations.ray import BatchPredictor

SUBJECTS = ("A man", "The girl", "A woman", "Someone", "Two men", "The old dog", "My neighbour")
ACTIONS = ("is eating", "is carrying", "is playing", "pushes", "has painted", "will find", "sold")
OBJECTS = ("a piece of bread", "a baby", "the violin", "some carts", "his bicycle", "an umbrella", "the red house")


def sentences(batch: dict[str, numpy.ndarray]) -> dict[str, Any]:
    """The sentences of these numbers."""
    texts = []
    for number in batch["id"]:
        words = [SUBJECTS[number % 7], ACTIONS[number // 7 % 7], OBJECTS[number // 49 % 7]]
        texts.append(f"{' '.join(words)} {'again and ' * int(number // 343 % 5)}today.")
    return {"id": batch["id"], "sentence": texts}


class Embed(BatchPredictor):
    """Tokens by the package's tokenizer, then the model. Each actor has it once."""

    def __init__(self, folder: str, method: str, kill: list[int]) -> None:
        from tokenizers import Tokenizer

        super().__init__(os.path.join(folder, "minilm.pt2"), method, keep=["id", "sentence"], num_threads=1)
        self.tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.tokenizer.enable_padding()
        self.tokenizer.enable_truncation(256)
        self.folder = folder
        self.kill = kill

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Columns with the embeddings."""
        for number in self.kill:
            if number in batch["id"] and self.is_first(number):
                os.kill(os.getpid(), signal.SIGKILL)
        encoded = self.tokenizer.encode_batch([str(text) for text in batch["sentence"]])
        tokens = {
            "input_ids": numpy.array([item.ids for item in encoded]),
            "attention_mask": numpy.array([item.attention_mask for item in encoded]),
        }
        return super().__call__({**batch, **tokens})

    def is_first(self, number: int) -> bool:
        """Whether no worker came here before."""
        try:
            os.close(os.open(os.path.join(self.folder, f"killed-{number}"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="has minilm.pt2 and tokenizer.json")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="a folder for Parquet files")
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--method", default="forward")
    parser.add_argument("--kill", type=int, nargs="*", default=[], metavar="SENTENCE")
    options = parser.parse_args()
    folder = options.folder.absolute()
    for marker in folder.glob("killed-*"):
        marker.unlink()

    ray.init(log_to_driver=False, include_dashboard=False)
    dataset = ray.data.range(options.sentences, override_num_blocks=max(4, options.sentences // 2000))
    begin = time.perf_counter()
    dataset.map_batches(sentences).map_batches(
        Embed,
        fn_constructor_args=(str(folder), options.method, options.kill),
        batch_size=options.batch_size,
        compute=ray.data.ActorPoolStrategy(size=options.actors),
        num_cpus=0.5,
    ).write_parquet(str(options.output.absolute()))
    seconds = time.perf_counter() - begin

    table = pyarrow.dataset.dataset(options.output, format="parquet").to_table(columns=["id"])
    ids = numpy.sort(table["id"].to_numpy())
    complete = bool(numpy.array_equal(ids, numpy.arange(options.sentences)))
    report = {
        "sentences": options.sentences,
        "seconds": round(seconds, 1),
        "killed": len(list(folder.glob("killed-*"))),
        "each_once": complete,
    }
    print(json.dumps(report))
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
