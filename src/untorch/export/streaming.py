"""The option ``stream_weights``: large tensors that an export loads or makes lie in files instead of memory.

Each is a shared mapping of a file beside the package, so that the system writes its pages out and takes them back when
memory is short. A file has no name once it is mapped: nothing is left behind, whatever ends the process.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from untorch.export.environment import environment
from untorch.runtime.errors import file_error

__all__ = ["load_weights", "on_disk", "stream_weights", "with_streamed_weights"]

# Below it a file costs more than its pages are worth.
_MIN_BYTES = 1 << 20

# glibc's: from how many bytes on an allocation is a mapping of its own. It grows with what is freed, up to the last.
_MMAP_THRESHOLD, _SMALL_THRESHOLD, _LARGEST_THRESHOLD = -3, 1 << 20, 32 << 20

_Model = TypeVar("_Model", bound=nn.Module)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class _WeightFiles:
    """Files for tensors, in a folder that is empty but while one is made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values and strides in a file. Raises FileOpenError where the file system has no room."""
        size = tensor.untyped_storage().nbytes()
        descriptor, name = tempfile.mkstemp(dir=self._folder)
        try:
            try:
                os.posix_fallocate(descriptor, 0, size)  # a page that cannot be written later would end the process
            except OSError as error:
                text = f"option stream_weights: {self._folder.parent} has no room for {size} bytes: {error.strerror}"
                raise file_error(text, error.errno, str(self._folder.parent)) from error
            storage: Any = torch.UntypedStorage.from_file(name, shared=True, nbytes=size)
        finally:
            os.close(descriptor)
            os.unlink(name)
        storage.copy_(tensor.untyped_storage())
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made


_files: ContextVar[_WeightFiles | None] = ContextVar("weight_files", default=None)


@contextlib.contextmanager
def stream_weights(wanted: bool, path: Path) -> Iterator[None]:
    """Meanwhile ``on_disk`` and ``load_weights`` use files beside ``path``, if that is wanted.

    Raises FileOpenError if there can be none.
    """
    if not wanted or _files.get() is not None:
        yield
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise file_error(f"cannot write {path}: {error.strerror}", error.errno, str(path)) from error
    with folder as name:
        token = _files.set(_WeightFiles(Path(name)))
        # What a layer needed goes back to the system when it is freed: the heap would keep it.
        _set_mmap_threshold(_SMALL_THRESHOLD)
        try:
            yield
        finally:
            _set_mmap_threshold(_LARGEST_THRESHOLD)
            _files.reset(token)


def _set_mmap_threshold(nbytes: int) -> None:
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # other C libraries have none
        mallopt(_MMAP_THRESHOLD, nbytes)


def with_streamed_weights(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """For functions of a path, options and option_fields, which load a model: the option holds from their start."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def within(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which raises it as Python does
        wanted = given.get("option_fields", {}).get(
            "stream_weights", getattr(given.get("options"), "stream_weights", False)
        )
        path = given["path"]
        wanted = wanted is True and isinstance(path, str | os.PathLike)
        with stream_weights(wanted, Path(path if wanted else ".")):
            return function(*args, **kwargs)

    return within


def on_disk(tensor: torch.Tensor) -> torch.Tensor:
    """A large tensor of the CPU that has its memory for itself, in a file; any other, or without the option, itself."""
    files = _files.get()
    return tensor if files is None or not _takes(tensor) else files.copy(tensor)


def load_weights(load: Callable[[], _Model]) -> _Model:
    """``load()``, which reads a model's weights; with the option, those that it converts or joins go to files."""
    files = _files.get()
    if files is None:
        return load()
    with environment("HF_DEACTIVATE_ASYNC_LOAD", "1"), _ResultsInFiles(files):  # a mode is that of one thread
        model = load()
    mapped = _mapped_files()
    moved: dict[int, torch.Tensor] = {}
    for part in model.modules():
        tensors: Any
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not _takes(tensor) or _contains(mapped, tensor.data_ptr()):
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = files.copy(tensor)
                tensors[name] = moved[id(tensor)]
    return model


class _ResultsInFiles(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts large results of functional operators in files."""

    def __init__(self, files: _WeightFiles) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = files

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.is_mutable or any(each.alias_info is not None for each in schema.returns):
            return result
        return pytree.tree_map_only(torch.Tensor, lambda each: self._given.copy(each) if _takes(each) else each, result)


def _mapped_files() -> list[tuple[int, int]]:
    """The addresses of this process that are mappings of files, in ascending order: safetensors' weights are."""
    found = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, _, _, _, inode, *_ = line.split()
            if inode != "0":
                first, _, end = addresses.partition("-")
                found.append((int(first, 16), int(end, 16)))
    return sorted(found)


def _contains(ranges: list[tuple[int, int]], address: int) -> bool:
    index = bisect.bisect_right(ranges, address, key=lambda each: each[0]) - 1
    return index >= 0 and address < ranges[index][1]


def _takes(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return False
    if tensor.layout != torch.strided or tensor.is_mkldnn or tensor.is_conj() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() < _MIN_BYTES or storage.filename is not None:
        return False
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() == 0 and reach * tensor.element_size() == storage.nbytes()
