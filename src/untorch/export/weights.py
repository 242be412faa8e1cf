"""Collects the constants of all methods and stores each distinct tensor storage once."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from untorch import _core
from untorch.archive import BLOCK_BYTES
from untorch.export.errors import CompileError
from untorch.export.external import ExternalWeights
from untorch.export.passes.attributes import attribute
from untorch.export.signature import dtype_name

__all__ = ["Constant", "WeightFile", "WeightStore", "parse_constants"]

_Span = tuple[int, int]  # where bytes of a storage begin and end
_LARGE = 1 << 20  # bytes from which a weight is worth to be written early

_INFO = re.compile(r"constants_info_\[(\d+)\]\.(name|original_fqn|from_folded|shape|stride) = (.+);")


@dataclass(frozen=True)
class Constant:
    """One constant of the container: ``name`` as the container reports it, ``fqn`` as the model calls it."""

    name: str
    fqn: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def parse_constants(wrapper: str) -> list[Constant]:
    """The constants that the generated wrapper declares, in its order."""
    fields: dict[int, dict[str, str]] = {}
    for index, field, value in _INFO.findall(wrapper):
        fields.setdefault(int(index), {})[field] = value
    constants = []
    for index in sorted(fields):
        entry = fields[index]
        if entry.get("from_folded") == "true":
            continue
        missing = {"name", "original_fqn", "shape", "stride"} - entry.keys()
        if missing:
            raise CompileError(
                f"constant {index} of the generated wrapper has no {', '.join(sorted(missing))}: this torch "
                f"({torch.__version__}) writes it in a form that untorch does not know"
            )
        constants.append(
            Constant(
                entry["name"].strip('"'),
                entry["original_fqn"].strip('"'),
                _integers(entry["shape"]),
                _integers(entry["stride"]),
            )
        )
    return constants


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part.rstrip("Ll")) for part in text.strip("{} ").split(",") if part.strip())


@dataclass(frozen=True)
class WeightFile:
    """An entry of the archive: its bytes, and the digests of their blocks where there are several."""

    name: str
    data: memoryview
    digest: str | None


class WeightStore:
    """Deduplicates storages by content, dtype and length. ``files`` holds what is still to be written, in order.

    What ``external`` has is an entry alone.
    """

    def __init__(self, external: ExternalWeights | None = None) -> None:
        self.external = external
        self.files: list[WeightFile] = []
        self.entries: list[dict[str, Any]] = []
        self._by_content: dict[tuple[str, str, int], int] = {}
        # Methods share storages: each is read, and copied from a GPU, for the first one alone. The reference tells
        # whether the storage is still the one that was read, and keeps its identity from another one.
        self._by_storage: dict[tuple[int, int, int, str], tuple[StorageWeakRef, int]] = {}
        self._keep: list[torch.UntypedStorage] = []
        self._early: set[int] = set()

    @property
    def nbytes(self) -> int:
        """The bytes of all distinct storages."""
        return sum(entry["nbytes"] for entry in self.entries)

    def add_method(
        self,
        constants: list[Constant],
        tensors: dict[str, torch.Tensor],
        mutated: frozenset[str],
        device: str = "cpu",
        placed: frozenset[str] = frozenset(),
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Stores a method's constants; gives their manifest entries, and which of them lie in one storage (a number).

        ``tensors`` is by FQN; ``mutated`` are the FQNs that are written, whose storages count as written too.
        ``device`` is the method's: a constant that lies elsewhere says so, but for those ``placed`` there by FQN.
        """
        spans: dict[int, list[_Span]] = {}
        sizes: dict[int, set[int]] = {}  # of elements
        lengths: dict[int, int] = {}
        written: set[int] = set()
        for constant in constants:
            tensor = self._tensor(constant, tensors)
            pointer = tensor.untyped_storage().data_ptr()
            spans.setdefault(pointer, []).append(_span(tensor))
            sizes.setdefault(pointer, set()).add(tensor.element_size())
            lengths[pointer] = tensor.untyped_storage().nbytes()
            if constant.fqn in mutated:
                written.add(pointer)
        for pointer, parts in spans.items():
            joined = _joined(parts)
            # Parts that are most of a storage share it with other methods, which may have the whole: merged weights.
            scattered = 2 * sum(end - begin for begin, end in joined) < lengths[pointer]
            splits = scattered and pointer not in written and len(sizes[pointer]) == 1
            spans[pointer] = joined if splits or len(parts) == 1 else [(0, lengths[pointer])]
        stored: dict[tuple[int, int, int], int] = {}
        entries = []
        pointers: list[int] = []
        for constant in constants:
            tensor = self._tensor(constant, tensors)
            storage = tensor.untyped_storage()
            pointers.append(storage.data_ptr() or -len(pointers) - 1)  # empty ones share nothing
            pointer, (begin, end) = storage.data_ptr(), _span(tensor)
            start, stop = next(span for span in spans[pointer] if span[0] <= begin and end <= span[1])
            length = stop - start
            offset = (begin - start) // tensor.element_size()
            key = (pointer, start, length)
            if key not in stored or pointer == 0:
                stored[key] = self._add(storage, start, length, dtype_name(tensor.dtype))
                self._early.discard(stored[key])
            elsewhere = {} if tensor.device.type == device or constant.fqn in placed else {"device": tensor.device.type}
            entries.append(
                {
                    "name": constant.name,
                    "fqn": constant.fqn,
                    "dtype": dtype_name(tensor.dtype),
                    "shape": list(tensor.shape),
                    "strides": list(tensor.stride()),
                    "storage_offset": offset,
                    "weight": stored[key],
                    "mutated": constant.fqn in mutated or pointer in written,
                    **elsewhere,
                }
            )
        return entries, pointers

    def add_early(self, module: fx.GraphModule) -> None:
        """Stores large tensors of a graph that is still being compiled, as ``add_method`` will find them.

        Each is alone in its storage. Compiled code may do without one: ``has_unused`` tells.
        """
        if self.external is not None:
            return
        for name in dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "get_attr"):
            tensor = attribute(module, name)
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_mkldnn:
                continue
            length = tensor.untyped_storage().nbytes()
            if length >= _LARGE and _span(tensor) == (0, length):
                known = len(self.entries)
                index = self._add(tensor.untyped_storage(), 0, length, dtype_name(tensor.dtype))
                if index >= known:
                    self._early.add(index)

    @property
    def has_unused(self) -> bool:
        """Whether something was stored early that no method has."""
        return bool(self._early)

    def take_files(self) -> Iterator[WeightFile]:
        """What is to be written, once."""
        files, self.files = self.files, []
        yield from files

    def _tensor(self, constant: Constant, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        tensor = tensors.get(constant.fqn)
        if tensor is None:
            raise CompileError(f"constant {constant.fqn!r}: AOTInductor gave no value for it")
        if tensor.is_mkldnn or tensor.layout != torch.strided:
            raise CompileError(f"constant {constant.fqn!r} has the layout {tensor.layout}, expected strided")
        if tuple(tensor.shape) != constant.shape or (tensor.numel() and tuple(tensor.stride()) != constant.strides):
            raise CompileError(
                f"constant {constant.fqn!r}: the compiled code expects shape {constant.shape} and strides "
                f"{constant.strides}, its value has {tuple(tensor.shape)} and {tuple(tensor.stride())}"
            )
        return tensor

    def _add(self, storage: torch.UntypedStorage, start: int, length: int, dtype: str) -> int:
        place = (storage._cdata, start, length, dtype)
        reference, index = self._by_storage.get(place, (None, 0))
        if reference is None or reference.expired():  # type: ignore[no-untyped-call]
            index = self._add_bytes(storage, start, length, dtype)
            self._by_storage[place] = StorageWeakRef(storage), index  # type: ignore[no-untyped-call]
        return index

    def _add_bytes(self, storage: torch.UntypedStorage, start: int, length: int, dtype: str) -> int:
        storage = storage.cpu()  # type: ignore[no-untyped-call]
        if length:
            array = (ctypes.c_ubyte * length).from_address(storage.data_ptr() + start)
            data = memoryview(array).cast("B")
        else:
            data = memoryview(b"")
        digest = _core.sha256(data, BLOCK_BYTES)
        key = (digest, dtype, length)
        if key not in self._by_content:
            self._by_content[key] = len(self.entries)
            if self.external is not None and (entry := self.external.find(data, digest)) is not None:
                self.entries.append(entry)
                return self._by_content[key]
            name = f"data/weights/weight_{len(self.entries)}"
            self.files.append(WeightFile(name, data, digest if length > BLOCK_BYTES else None))
            self.entries.append({"file": name, "nbytes": length})
            self._keep.append(storage)
        return self._by_content[key]


def _span(tensor: torch.Tensor) -> _Span:
    """Where a tensor begins and ends in its storage."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + _extent(tensor) * tensor.element_size()


def _joined(spans: list[_Span]) -> list[_Span]:
    """Those that overlap as one: views of a large storage are stored without what none of them reads."""
    joined: list[_Span] = []
    for begin, end in sorted(spans):
        if joined and begin < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _extent(tensor: torch.Tensor) -> int:
    """How many elements of its storage a tensor spans, from its own offset."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
