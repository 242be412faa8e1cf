"""Low-rank adapters (LoRA) in the format of PEFT, side by side in one array that the model's step takes.

A folder has adapter_config.json and adapter_model.safetensors: for each layer A [rank, inputs] and B [outputs, rank].
In the array an adapter has as many columns as its rank, padded to 16, and each layer has ``inputs`` rows of Aᵀ and
``outputs`` rows of B, which is scaled here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch import _core
from untorch.llm.settings import LoraLayer, LoraSettings
from untorch.runtime.arrays import zeros
from untorch.runtime.errors import (
    ArgumentTypeError,
    FileOpenError,
    InvalidArgumentError,
    InvalidFileError,
    UnsupportedError,
    file_error,
)

__all__ = ["Adapter", "Loras", "LorasNow", "read_adapter"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_UNIT = 16  # columns of an adapter are padded to: GEMMs of 16-bit dtypes then have aligned rows
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
_NAME = re.compile(r"\^?[A-Za-z0-9_.]+")  # PEFT takes regular expressions, and writes names
_MOST_CONFIG = 16 << 20


@dataclass(eq=False)
class Adapter:
    """values [rows, columns], float32; salt: of the prefix cache, what its keys and values depend on."""

    name: str
    rank: int
    values: NDArray[np.float32] = field(repr=False)
    salt: bytes = field(repr=False)

    @property
    def columns(self) -> int:
        """Its rank, padded."""
        return int(self.values.shape[1])


@dataclass(frozen=True)
class LorasNow:
    """What steps take: the array of all adapters, and the columns of each, which does not keep them."""

    array: Any
    columns: weakref.WeakKeyDictionary[Adapter, tuple[int, int]]


class Loras:
    """The adapters of an engine: those that have a name, and those that requests still use.

    load and unload may be called by any thread; ``now`` is what the engine's thread reads, once a step.
    """

    def __init__(self, settings: LoraSettings, device: str) -> None:
        self._settings, self._device = settings, device
        self._lock = threading.Lock()
        self._named: dict[str, Adapter] = {}
        self._used: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self.now = LorasNow(None, weakref.WeakKeyDictionary())

    @property
    def names(self) -> list[str]:
        """Those that requests may ask for."""
        return list(self._named)

    def get(self, name: Any) -> Adapter:
        """By its name. Raises InvalidArgumentError."""
        adapter = self._named.get(name) if isinstance(name, str) else None
        if adapter is None:
            raise _unknown(name, self.names)
        return adapter

    def load(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Reads a folder. Requests that use an adapter of that name go on with the one they have."""
        adapter = read_adapter(name, folder, self._settings)
        with self._lock:
            self._named[name] = adapter
            self._used.add(adapter)
            self._arrange()

    def unload(self, name: str) -> None:
        """Forgets the name; what requests use stays until an adapter is loaded or unloaded after them."""
        with self._lock:
            if self._named.pop(name, None) is None:
                raise _unknown(name, self.names)
            self._arrange()

    def _arrange(self) -> None:
        adapters = list(dict.fromkeys([*self._named.values(), *self._used]))
        columns: weakref.WeakKeyDictionary[Adapter, tuple[int, int]] = weakref.WeakKeyDictionary()
        end = 0
        for adapter in adapters:
            columns[adapter] = (end, end + adapter.columns)
            end += adapter.columns
        if not adapters:
            self.now = LorasNow(None, columns)
            return
        values = np.concatenate([adapter.values for adapter in adapters], axis=1)
        self.now = LorasNow(_placed(values, self._settings.dtype, self._device), columns)


def _unknown(name: Any, known: Sequence[str]) -> InvalidArgumentError:
    there = f"there are {', '.join(known)}" if known else "none is loaded: Engine(…, loras={name: folder})"
    return InvalidArgumentError(f"lora: expected the name of an adapter that is loaded, got {name!r}: {there}")


def _placed(values: NDArray[np.float32], dtype: str, device: str) -> Any:
    """On the device, in the dtype that the step takes."""
    if device == "cpu" and dtype == "float32":
        return np.ascontiguousarray(values)
    if device == "cpu":
        tensor = zeros(values.shape, "float32")
        tensor.assign(np.ascontiguousarray(values))
    else:
        tensor = _core.to_device(np.ascontiguousarray(values), int(device.partition(":")[2] or 0))
    if dtype != "float32":
        tensor.convert(dtype)
    return tensor


def read_adapter(name: Any, folder: Any, settings: LoraSettings) -> Adapter:
    """A folder of PEFT as an adapter of the package's layers.

    Raises:
        ArgumentTypeError, InvalidArgumentError: The name or the folder is none.
        InvalidFileError: A file is damaged, or does not fit the model. FileMissingError if there is none.
        UnsupportedError: It is no LoRA, or of a kind that is not served.
    """
    if not isinstance(name, str) or not isinstance(folder, str | os.PathLike):
        raise ArgumentTypeError(f"lora: expected a name and the path of a folder, got {name!r} and {folder!r}")
    if not name:
        raise InvalidArgumentError("lora: expected a name that is not empty, got ''")
    path = Path(os.fsdecode(folder))
    config = _read_config(path / _CONFIG)
    pairs = _read_pairs(path / _WEIGHTS)
    by_name = {layer.name: layer for layer in settings.layers}
    rank = max(a.shape[0] for a, _ in pairs.values())
    values = np.zeros((settings.rows, -(-rank // _UNIT) * _UNIT), np.float32)
    for module, (a, b) in pairs.items():
        layer = by_name.get(module) or by_name.get(module.replace("language_model.", "", 1))
        if layer is None:
            last = sorted({known.rpartition(".")[2] for known in by_name})
            raise InvalidFileError(
                f"{path / _WEIGHTS}: adapts {module!r}, and the package takes adapters for {len(by_name)} layers "
                f"({', '.join(last)}), that is none of them: export it with causal_lm(…, lora=True), or with the "
                "adapter's target_modules"
            )
        _check_shapes(path / _WEIGHTS, layer, a, b)
        r = a.shape[0]
        start = layer.offset
        values[start : start + layer.inputs, :r] = a.T
        values[start + layer.inputs : start + layer.inputs + layer.outputs, :r] = b * config.scale(module, r)
    salt = hashlib.blake2b(values.tobytes(), digest_size=16).digest()
    return Adapter(name, rank, values, salt)


def _check_shapes(path: Path, layer: LoraLayer, a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != layer.inputs or b.shape != (layer.outputs, a.shape[0]):
        raise InvalidFileError(
            f"{path}: {layer.name}: expected A [rank, {layer.inputs}] and B [{layer.outputs}, rank], got "
            f"{list(a.shape)} and {list(b.shape)}: is it an adapter of another model?"
        )


@dataclass(frozen=True)
class _Config:
    path: Path
    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def scale(self, module: str, rank: int) -> float:
        """What B is multiplied with. The rank is that of the weights, which has to be what the config says."""
        expected = _by_pattern(self.ranks, module, self.rank)
        if rank != expected:
            raise InvalidFileError(f"{self.path}: the rank of {module} is {expected} there, its weights have {rank}")
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return float(alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rank_pattern and alpha_pattern: by the module's last parts, or with ^ by its whole name."""
    for pattern, value in patterns.items():
        if module == pattern.removeprefix("^") or (pattern[:1] != "^" and module.endswith(f".{pattern}")):
            return value
    return default


def _read_config(path: Path) -> _Config:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_CONFIG + 1)
    except OSError as error:
        text = f"lora: {path}: {error.strerror}: expected a folder as PEFT's save_pretrained writes it"
        raise file_error(text, error.errno, str(path)) from None
    try:
        if len(data) > _MOST_CONFIG:
            raise ValueError(f"it has more than {_MOST_CONFIG} bytes")
        given = json.loads(data)
        kind = given.get("peft_type")
        config = _Config(
            path, int(given["r"]), float(given["lora_alpha"]), bool(given.get("use_rslora")),
            {str(key): int(value) for key, value in (given.get("rank_pattern") or {}).items()},
            {str(key): float(value) for key, value in (given.get("alpha_pattern") or {}).items()},
        )  # fmt: skip
        if min(config.rank, *config.ranks.values(), 1) < 1 or not math.isfinite(config.alpha):
            raise ValueError("r or lora_alpha is out of range")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidFileError(f"{path}: it is no configuration of a LoRA: {error!r:.200}") from None
    for pattern in (*config.ranks, *config.alphas):
        if not _NAME.fullmatch(pattern):
            raise UnsupportedError(
                f"{path}: rank_pattern, alpha_pattern: expected names of modules, got {pattern!r:.100}"
            )
    if kind != "LORA":
        raise UnsupportedError(f"{path}: its peft_type is {kind!r:.100}, expected 'LORA'")
    for option, none in (
        ("use_dora", False), ("bias", "none"), ("lora_bias", False), ("modules_to_save", None),
        ("layer_replication", None), ("trainable_token_indices", None), ("target_parameters", None),
    ):  # fmt: skip
        value = given.get(option)
        if value and value != none:
            raise UnsupportedError(
                f"{path}: {option} is {value!r:.100}, expected {none!r}: merge the adapter, and export that"
            )
    return config


def _read_pairs(path: Path) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """A and B by the module's name."""
    try:
        tensors = _core.open_safetensors(os.fsencode(path)).tensors()
    except FileOpenError as error:
        error.filename = str(path)
        raise
    found: dict[str, dict[str, NDArray[np.float32]]] = {}
    for key, (dtype, shape, data) in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise UnsupportedError(
                f"{path}: tensor {key!r:.200}: expected the lora_A and lora_B of linear layers alone: merge the "
                "adapter, and export that"
            )
        found.setdefault(match[1], {})[match[2]] = _floats(path, key, dtype, shape, data)
    if not found:
        raise InvalidFileError(f"{path}: it has no tensors")
    for module, pair in found.items():
        if len(pair) != 2:
            raise InvalidFileError(f"{path}: {module} has lora_{next(iter(pair))} alone, expected lora_A and lora_B")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _floats(path: Path, key: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> NDArray[np.float32]:
    if dtype == "BF16":
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    kinds = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
    if dtype not in kinds:
        raise UnsupportedError(f"{path}: tensor {key!r:.200} is {dtype}, expected F32, F16 or BF16")
    return np.frombuffer(data, kinds[dtype]).astype(np.float32).reshape(shape)
