"""Runs the steps of a package: its model, and the pool of pages that its memory allows."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from untorch._core import Tensor
from untorch.llm.logits import DeviceMethods, Logits
from untorch.llm.lora import Loras
from untorch.llm.paged_model import PagedModel
from untorch.llm.scheduler import Plan
from untorch.llm.settings import KV_ITEMSIZE, DraftSettings, Settings, read_settings
from untorch.llm.vision.encoder import ImageEncoder
from untorch.llm.vision.settings import read_vision
from untorch.runtime.arrays import zeros
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.program import Program, load

if TYPE_CHECKING:
    from untorch.llm.speculation import SpeculativeOptions
    from untorch.runtime.method import Method
    from untorch.trust.policy import TrustPolicy

__all__ = ["PackageRunner", "Runner", "kv_bytes"]

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_DEFAULT_PART = 0.25  # of the memory that is available
_DEFAULT_DEVICE_PART = 0.95  # of what weights, the largest step and its graph leave
_SNAPSHOT_PART = 0.25  # of what the states of running sequences leave
_SNAPSHOTS_A_SEQUENCE = 4  # at most, of max_sequences
_GRAPH_BYTES = 24 << 20  # of each further graph that shares the largest one's memory: small blocks, and nodes


class Runner(ABC):
    """What the engine asks of a model. blocks: pages of the pool. snapshots: rows of the state pool behind those of
    the sequences that run.
    """

    settings: Settings
    blocks: int
    snapshots: int = 0
    loras: Loras | None = None  # the adapters beside its weights; only where ``settings.lora`` is set
    vision: ImageEncoder | None = None

    @abstractmethod
    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        """The logits [rows, width] of these tokens of the plan. Copies the plan's blocks and states first.

        tokens: What an earlier step's logits chose (``Choice.device``), if they are the plan's tokens.
        """

    def propose(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        """As ``run``, of the draft model; only where ``settings.draft`` is one. A plan may have copies alone."""
        raise NotImplementedError

    def dense(self, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        """The layers behind the pooling; only where ``settings.dense`` names them."""
        raise NotImplementedError

    def file(self, name: str) -> bytes:
        """A file of the package."""
        raise NotImplementedError

    def memory(self) -> dict[str, Any]:
        """Bytes by kind, as ``Engine.memory``."""
        return {}

    def close(self) -> None:  # noqa: B027 - a runner may hold nothing
        """Free what it holds."""


class PackageRunner(Runner):
    """A package of ``untorch.export.causal_lm``, with a pool where its methods run.

    On a GPU a step's small arrays are uploaded. Steps that decode alone are CUDA graphs, padded to ``graph_sizes``.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Program,
        kv_memory: int | str | None,
        max_batch_tokens: int,
        max_sequences: int,
        num_threads: int,
        trust: TrustPolicy | str | os.PathLike[str] | None,
        graph_sizes: Sequence[int] = (),
        progress: Callable[[int, int], None] | None = None,
        speculative: SpeculativeOptions | None = None,
        snapshot_memory: int | str | None = 0,
    ) -> None:
        self._owned = not isinstance(source, Program)
        program = source if isinstance(source, Program) else load(source, num_threads=num_threads, trust=trust)
        try:
            self.settings = read_settings(program.manifest, program.path)
            settings = self.settings
            row = settings.block_elements * KV_ITEMSIZE[settings.dtype]
            methods = [(tokens, program[name]) for tokens, name in settings.methods]
            draft = settings.draft if speculative is not None and speculative.method == "draft" else None
            drafts = [] if draft is None else [(tokens, program[name]) for tokens, name in draft.methods]
            if draft is not None:
                row += draft.block_elements * KV_ITEMSIZE[draft.dtype]
            on_gpu = program.device != "cpu"
            if (vision := read_vision(program.manifest, program.path)) is not None:
                self.vision = ImageEncoder(vision, program[vision.method], settings.position_rows)
            adapted: list[tuple[int, Method]] = []
            if settings.lora is not None:
                self.loras = Loras(settings.lora, program.device)
                adapted = [(tokens, program[name]) for tokens, name in settings.lora.methods]
            sizes = graph_sizes if on_gpu and settings.task == "generate" else ()

            def make(blocks: int, slots: int) -> list[PagedModel]:
                """The model, and its draft model."""
                states = None
                if settings.state_elements:
                    states = zeros((slots, settings.state_elements), "float32", program.device)
                models = [
                    PagedModel(
                        methods,
                        [(tokens, program[name]) for tokens, name in settings.embeds],
                        _device_methods(program, settings),
                        [group.size for group in settings.groups],
                        settings.hidden,
                        zeros((blocks, settings.block_elements), settings.dtype, program.device),
                        states,
                        sizes,
                        1 if speculative is None else speculative.num_speculative_tokens + 1,
                        adapted=adapted,
                        loras=self.loras,
                        position_rows=settings.position_rows,
                    )
                ]
                if draft is not None:
                    models.append(
                        PagedModel(
                            drafts,
                            [],
                            _device_methods(program, draft),
                            [settings.groups[0].size],
                            0,
                            zeros((blocks, draft.block_elements), draft.dtype, program.device),
                            graph_sizes=sizes,
                            most_tokens=2,  # when a draft was accepted as a whole, its last token and the one behind it
                            vocabulary=draft.vocabulary if draft.vocabulary < settings.vocabulary else None,
                            groups=[0],
                        )
                    )
                return models

            if kv_memory is not None or not on_gpu:
                available = int(_available() * _DEFAULT_PART)
            else:
                # What is free while a trial's steps and graphs have their memory.
                trial = make(2 * len(settings.groups), 1)
                for model in trial:
                    model.rehearse(max_batch_tokens, max_sequences)
                if self.vision is not None:
                    self.vision.rehearse()
                available = int(program.memory()["free"] * _DEFAULT_DEVICE_PART) - len(sizes) * _GRAPH_BYTES
                for model in trial:
                    model.close()
            self.snapshots = _snapshot_count(settings, row, kv_memory, snapshot_memory, max_sequences, available)
            slots = max_sequences + self.snapshots
            self.blocks = _block_count(
                settings, row, kv_memory, max_sequences, max_batch_tokens, available, self.snapshots
            )  # fmt: skip
            self._kv_bytes = self.blocks * row + slots * settings.state_elements * KV_ITEMSIZE["float32"]
            self._model, *others = make(self.blocks, slots)
            self._draft = others[0] if others else None
            for model in (self._model, *others):
                model.prepare(progress or (lambda done, of: None))
        except BaseException:
            if self._owned:
                program.close()
            raise
        self._program = program

    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        """The logits [rows, width] of these tokens of the plan. Copies the plan's blocks and states first."""
        return self._model.run(plan, rows, tokens)

    def propose(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        """The draft model's logits of these tokens of the plan, whose blocks are copied in its own pool first."""
        assert self._draft is not None
        if not plan.items:
            self._draft.copy_blocks(plan.copies)
            return Logits(np.empty((0, 0), np.float32))
        return self._draft.run(plan, rows, tokens)

    def dense(self, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
        """The layers behind the pooling."""
        assert self.settings.dense is not None
        found: Any = self._program[self.settings.dense](pooled)
        return found.numpy() if isinstance(found, Tensor) else np.asarray(found)

    def file(self, name: str) -> bytes:
        """A file of the package."""
        return self._program._program.entry(name)

    def memory(self) -> dict[str, Any]:
        """Bytes by kind, as ``Engine.memory``."""
        return {**self._program.memory(), "kv_cache": self._kv_bytes}

    def close(self) -> None:
        """Free what it holds."""
        self._model.close()
        if self._draft is not None:
            self._draft.close()
        if self._owned:
            self._program.close()


def kv_bytes(given: Any, name: str = "kv_memory") -> int:
    """ "2GiB" → 2147483648. Raises InvalidArgumentError."""
    expected = 'expected bytes as an integer, or a string such as "512MiB" or "2GiB"'
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    if isinstance(given, str) and (match := re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", given)):
        number, unit = match.groups()
        try:
            value = int(float(number) * _UNITS[unit.upper()])
        except (KeyError, ValueError):
            value = 0
        if value > 0:
            return value
    raise InvalidArgumentError(f"Engine: {name}: {expected}, got {given!r}")


def _device_methods(program: Program, settings: Settings | DraftSettings) -> DeviceMethods | None:
    if settings.choose is None:
        return None
    others = (settings.process_logits, settings.logprobs) if isinstance(settings, Settings) else ()
    return DeviceMethods(
        settings.vocabulary, program[settings.choose], *(None if name is None else program[name] for name in others)
    )


def _block_count(
    settings: Settings, row: int, kv_memory: Any, max_sequences: int, max_batch_tokens: int, default: int,
    snapshots: int = 0,
) -> int:  # fmt: skip
    fewest, kept = len(settings.groups), snapshots * settings.state_elements * KV_ITEMSIZE["float32"]
    states = max_sequences * settings.state_elements * KV_ITEMSIZE["float32"]
    if kv_memory is not None:
        count = (kv_bytes(kv_memory) - states - kept) // row
        if count < fewest:
            what = f", and {states} for the states of {max_sequences} sequences" if states else ""
            what += f", and {kept} for those of known prefixes" if kept else ""
            blocks = " and ".join(f"one block of {group.size} positions" for group in settings.groups)
            raise InvalidArgumentError(
                f"Engine: kv_memory: expected at least {fewest * row + states + kept} bytes, {blocks}{what}, got "
                f"{kv_memory!r}"
            )
        return count
    if states and states + kept + row > default:
        of_prefixes = f" and those of known prefixes {kept}" if kept else ""
        raise InvalidArgumentError(
            f"Engine: max_sequences: the states of {max_sequences} sequences take {states} bytes{of_prefixes}, and "
            f"{default} are for states, keys and values: choose fewer, or say kv_memory"
        )
    enough = max_sequences * sum(group.most(settings.max_positions, max_batch_tokens) for group in settings.groups)
    return max(fewest, min(enough, (default - states - kept) // row))


def _snapshot_count(
    settings: Settings, row: int, kv_memory: Any, snapshot_memory: Any, max_sequences: int, default: int
) -> int:
    """Of states beside those of the sequences that run."""
    each = settings.state_elements * KV_ITEMSIZE["float32"]
    if not each or snapshot_memory in (0, "0"):
        return 0
    if snapshot_memory is not None:
        count = kv_bytes(snapshot_memory, "snapshot_memory") // each
        if count < 1:
            raise InvalidArgumentError(
                f"Engine: snapshot_memory: expected 0, or at least {each} bytes, the states of one sequence, got "
                f"{snapshot_memory!r}"
            )
        return count
    left = (default if kv_memory is None else kv_bytes(kv_memory)) - max_sequences * each - len(settings.groups) * row
    return max(0, min(_SNAPSHOTS_A_SEQUENCE * max_sequences, int(left * _SNAPSHOT_PART) // each))


def _available() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 4 << 30
