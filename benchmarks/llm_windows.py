"""What do block tables by window save? Pages that one long sequence holds, with them and with one table for all layers.

    PYTHONPATH=src python benchmarks/llm_windows.py [--lengths 8192 32768 131072] [--batch-tokens 1024]

No model is run: layers are those of the published configurations, and the engine's own scheduler computes a prompt in
steps of ``--batch-tokens`` and then some tokens more. What is counted is the most pages that are held in a step, and
those that are held afterwards, which is what decoding needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from untorch.export.lm.attention import Layer
from untorch.export.lm.groups import place_layers, pool_elements
from untorch.llm.blocks import BlockManager
from untorch.llm.scheduler import Scheduler
from untorch.llm.sequence import Sequence as TokenSequence

BLOCK, DECODED = 16, 8
MAX_POSITIONS = 1 << 20


@dataclass(frozen=True)
class Model:
    """Keys and values of its layers in bfloat16. every: of so many layers, the last one sees all keys."""

    layers: int
    heads_kv: int
    width: int
    every: int
    window: int = 0
    chunk: int = 0

    def pages(self) -> list[Layer]:
        """The layers."""
        return [
            Layer("Attention", self.heads_kv, self.width, self.width, *reach, torch.bfloat16)
            for i in range(self.layers)
            for reach in [(0, 0) if i % self.every == self.every - 1 else (self.window, self.chunk)]
        ]


MODELS = {
    "gpt-oss-20b": Model(24, 8, 64, 2, window=128),
    "Gemma 2 9B": Model(42, 8, 256, 2, window=4096),
    "Gemma 3 1B": Model(26, 1, 256, 6, window=512),
    "Gemma 3 27B": Model(62, 16, 128, 6, window=1024),
    "Llama 4 Scout": Model(48, 8, 128, 4, chunk=8192),
}


def held(layers: Sequence[Layer], grouped: bool, length: int, batch_tokens: int) -> tuple[int, int]:
    """Bytes that a sequence holds at most, and once its prompt is computed."""
    placed, groups = place_layers(layers, BLOCK, MAX_POSITIONS, grouped)
    row = pool_elements(placed) * 2
    most = sum(group.most(length + DECODED, batch_tokens) for group in groups)
    blocks = BlockManager(most, min(group.size for group in groups), groups=groups)
    scheduler = Scheduler(blocks, batch_tokens, 1)
    sequence = TokenSequence([0] * length)
    scheduler.add(sequence)
    peak = 0
    while len(sequence.tokens) < length + DECODED:
        plan = scheduler.schedule()
        assert sequence.table is not None
        peak = max(peak, blocks.held(sequence.table))
        scheduler.complete(plan)
        if sequence.remaining == 0:
            sequence.tokens.append(0)
    assert sequence.table is not None
    return peak * row, blocks.held(sequence.table) * row


def rows(lengths: Sequence[int], batch_tokens: int) -> Iterator[str]:
    """A table."""
    yield "| model | tokens | one table | by window: at most, decoding | of one table |"
    yield "|---|---|---|---|---|"
    for name, model in MODELS.items():
        for length in lengths:
            _, before = held(model.pages(), False, length, batch_tokens)
            peak, after = held(model.pages(), True, length, batch_tokens)
            numbers = [f"{value / 2**20:,.0f} MiB" for value in (before, peak, after)]
            yield f"| {name} | {length:,} | {numbers[0]} | {numbers[1]}, {numbers[2]} | {after / before:.2f} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32_768, 131_072])
    parser.add_argument("--batch-tokens", type=int, default=1024)
    given = parser.parse_args()
    print("\n".join(rows(given.lengths, given.batch_tokens)))


if __name__ == "__main__":
    main()
