"""The option ``weights``: weights that a .safetensors file has already are referred to there, and not stored again."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from untorch import _core
from untorch.archive import BLOCK_BYTES
from untorch.runtime.errors import FileOpenError
from untorch.validation import OptionError

__all__ = ["ExternalWeights", "open_weights"]

_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"


@dataclass
class _Tensor:
    """A tensor of a file; its digests are computed when a weight of its length comes."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    _sample: str = ""
    _digest: str = ""

    @property
    def sample(self) -> str:
        """SHA-256 of its first and last bytes."""
        self._sample = self._sample or _core.sample_digest(self.data)
        return self._sample

    @property
    def digest(self) -> str:
        """SHA-256 of its blocks."""
        self._digest = self._digest or _core.sha256(self.data, BLOCK_BYTES)
        return self._digest


@dataclass
class ExternalWeights:
    """The tensors of some .safetensors files of one folder, by their length.

    files: the names of those that weights were found in, in the order of the manifest. nbytes: of what was found.
    """

    paths: list[Path]
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    _tensors: dict[int, list[_Tensor]] = field(default_factory=lambda: defaultdict(list), repr=False)

    @property
    def where(self) -> str:
        """What ``load`` needs as ``weights`` on this machine."""
        return str(self.paths[0] if len(self.paths) == 1 else self.paths[0].parent)

    def find(self, data: memoryview, digest: str) -> dict[str, Any] | None:
        """The manifest's entry of a weight that is in a file byte for byte; None if it is in none.

        digest: SHA-256 of its blocks.
        """
        candidates = self._tensors.get(data.nbytes, ()) if data.nbytes else ()
        if not candidates:
            return None
        sample = _core.sample_digest(data)
        for tensor in candidates:
            if tensor.sample != sample or tensor.digest != digest:
                continue
            if tensor.path.name not in self.files:
                self.files.append(tensor.path.name)
            self.nbytes += data.nbytes
            return {
                "external": self.files.index(tensor.path.name),
                "tensor": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "sample": sample,
                "sha256": digest,
                "nbytes": data.nbytes,
            }
        return None


def open_weights(value: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> ExternalWeights:
    """Opens what the option names: a file, an index of shards, a folder, or several files of one folder.

    Raises:
        OptionError: A file is missing, has another suffix, or lies in another folder than the first.
        InvalidFileError: One is no .safetensors file.
    """
    given = [value] if isinstance(value, str | os.PathLike) else list(value)
    paths = [path for entry in given for path in _files(Path(entry))]
    if not paths:
        raise OptionError("option weights: expected .safetensors files, got an empty list")
    if len({path.parent.resolve() for path in paths}) > 1:
        raise OptionError(
            f"option weights: expected files of one folder, got {paths[0]} and "
            f"{next(path for path in paths if path.parent.resolve() != paths[0].parent.resolve())}: load() looks for "
            f"all of them in one place"
        )
    found = ExternalWeights(paths)
    for path in paths:
        try:
            file = _core.open_safetensors(os.fsencode(path))
        except FileOpenError as error:
            raise OptionError(f"option weights: {error}") from error
        for name, (dtype, shape, data) in file.tensors().items():
            if len(name.encode()) <= 1024:  # what a manifest may have
                found._tensors[data.nbytes].append(_Tensor(path, name, dtype, shape, data))
    return found


def _files(path: Path) -> Iterator[Path]:
    """The .safetensors files of one entry of the option."""
    if path.is_dir():
        files = sorted(path.glob(f"*{_SUFFIX}"))
        if not files:
            raise OptionError(f"option weights: expected a folder with {_SUFFIX} files, {path} has none")
        yield from files
    elif path.name.endswith(_INDEX):
        yield from _shards(path)
    elif path.suffix == _SUFFIX and not path.name.startswith("."):
        yield path
    else:
        raise OptionError(
            f"option weights: expected a {_SUFFIX} file, an index of such files ({_INDEX}) or their folder, got {path}"
        )


def _shards(index: Path) -> list[Path]:
    """The files that an index names, once each."""
    try:
        names = json.loads(index.read_text())["weight_map"].values()
    except OSError as error:
        raise OptionError(f"option weights: {index}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"option weights: {index}: expected JSON with weight_map, an object: {error}") from error
    shards = []
    for name in dict.fromkeys(names):
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(_SUFFIX):
            raise OptionError(f"option weights: {index}: expected plain names of {_SUFFIX} files, got {name!r}")
        shards.append(index.parent / name)
    return shards
