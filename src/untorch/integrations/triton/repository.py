"""Writes a model repository for Triton: one model a method, each with config.pbtxt, model.py and the package."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from untorch.integrations.triton.config import check_servable, config_text, max_batch_size
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError
from untorch.runtime.program import Program, load

__all__ = ["Repository", "write_repository"]

PACKAGE = "model.pt2"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MODEL = '''"""Serves the method of model.pt2 that config.pbtxt names. Written by `untorch triton`.

The Python that Triton runs this with needs untorch and numpy. It does not need torch.
"""

from untorch.integrations.triton.backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class Repository:
    """What was written. models: of each method the Triton model. left_out: why Triton cannot serve a method."""

    path: Path
    models: dict[str, str]
    max_batch_sizes: dict[str, int]
    left_out: dict[str, str]


def write_repository(
    package: str | os.PathLike[str],
    repository: str | os.PathLike[str],
    *,
    method: str | None = None,
    name: str | None = None,
    max_batch_size: int | None = None,
    model_version: int = 1,
    num_threads: int = 0,
) -> Repository:
    """Write a Triton model for each method of the package, or for one of them.

    A package with one method becomes the model ``name``, one with several ``name_method`` for each. The package is
    copied once; the models of its other methods have hard links to that copy where the file system has them.

    Args:
        package: The ``.pt2`` file.
        repository: The repository's folder, which may have other models.
        method: Only this method.
        name: The model's name. Default: the file's name without its suffix.
        max_batch_size: Rows that Triton may join for a call; 0: none. Default: the largest batch in the manifest, 64 if
            it has no maximum, and 0 for methods whose inputs and outputs do not all begin with the same dynamic
            dimension.
        model_version: The version's number, which must not be there yet.
        num_threads: As for ``untorch.load``, for the server.

    Raises:
        UnsupportedError: Triton can serve no method of the package.
        InvalidArgumentError: An argument is wrong, or the version is there already.
    """
    package, root = Path(package), Path(repository)
    base = package.stem if name is None else name
    if not _NAME.fullmatch(base):
        raise InvalidArgumentError(
            f"write_repository: name: expected letters, digits, '_', '-' and '.', got {base!r}: give another one"
        )
    if model_version < 1:
        raise InvalidArgumentError(f"write_repository: model_version: expected 1 or more, got {model_version}")
    with load(package) as program:
        if program.is_stock:
            raise UnsupportedError(
                f"{package}: a stock package does not tell its inputs and outputs, which Triton has to know: export it "
                "with untorch"
            )
        texts, sizes, left_out = _configs(program, base, method, max_batch_size, num_threads)
    models = {chosen: model for chosen, (model, _) in texts.items()}
    for model in models.values():
        if (folder := root / model / str(model_version)).exists():
            raise InvalidArgumentError(f"{folder} is there already: remove it, or write another version")
    first: Path | None = None
    for model, text in texts.values():
        first = _write_model(root / model, str(model_version), text, package, first)
    return Repository(root, models, sizes, left_out)


def _configs(
    program: Program, base: str, only: str | None, batch: int | None, num_threads: int
) -> tuple[dict[str, tuple[str, str]], dict[str, int], dict[str, str]]:
    """For each method its model's name and config.pbtxt; the batch sizes; what is left out."""
    texts: dict[str, tuple[str, str]] = {}
    sizes: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for name in [only] if only is not None else list(program):
        method = program[name]
        try:
            check_servable(method)
        except UnsupportedError as error:
            if only is not None:
                raise
            left_out[name] = str(error)
            continue
        model = base if len(program) == 1 else f"{base}_{name}"
        if not _NAME.fullmatch(model):
            raise InvalidArgumentError(
                f"method {name!r}: expected letters, digits, '_', '-' and '.' in a name that becomes a Triton model's"
            )
        sizes[name] = max_batch_size(method, batch)
        parameters: dict[str, Any] = {"method": name}
        if num_threads:
            parameters["num_threads"] = num_threads
        texts[name] = model, config_text(model, method, sizes[name], parameters)
    if not texts:
        raise UnsupportedError(f"{program.path}: Triton can serve no method: {'; '.join(left_out.values())}")
    return texts, sizes, left_out


def _write_model(folder: Path, version: str, config: str, package: Path, copy: Path | None) -> Path:
    """The version appears whole: a server that polls the repository never sees a part. Returns its package."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{version}.{os.getpid()}"
    try:
        part.mkdir()
        (part / "model.py").write_text(_MODEL, encoding="utf-8")
        if copy is None or not _link(copy, part / PACKAGE):
            shutil.copyfile(package, part / PACKAGE)
        text = folder / f".config.{os.getpid()}"
        text.write_text(config, encoding="utf-8")
        text.replace(folder / "config.pbtxt")
        part.replace(folder / version)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return folder / version / PACKAGE


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
