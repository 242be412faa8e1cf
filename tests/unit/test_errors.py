"""The exceptions: what Python code catches catches them, and their messages read as they were written."""

from __future__ import annotations

import copy
import errno
import os
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import untorch
from untorch.archive import ArchiveReader, ArchiveWriter
from untorch.runtime import errors
from untorch.runtime.errors import file_error

BUILTIN: dict[type[untorch.UntorchError], tuple[type[Exception], ...]] = {
    untorch.InvalidArgumentError: (ValueError,),
    untorch.ArgumentTypeError: (TypeError, untorch.InvalidArgumentError),
    untorch.UnknownMethodError: (KeyError, untorch.InvalidArgumentError),
    untorch.InvalidFileError: (ValueError,),
    untorch.FileOpenError: (OSError, untorch.InvalidFileError),
    untorch.FileMissingError: (FileNotFoundError, untorch.FileOpenError),
    untorch.FilePermissionError: (PermissionError, untorch.FileOpenError),
    untorch.FileIsDirectoryError: (IsADirectoryError, untorch.FileOpenError),
    untorch.UnsupportedError: (NotImplementedError,),
    untorch.ClosedError: (RuntimeError,),
    untorch.OutOfMemoryError: (MemoryError,),
    untorch.ModelError: (RuntimeError,),
    untorch.DeviceLostError: (RuntimeError,),
    untorch.SystemResourceError: (OSError,),
    untorch.UntrustedError: (RuntimeError,),
}


def test_errors_are_builtin_errors_too() -> None:
    for error, builtin in BUILTIN.items():
        assert issubclass(error, (untorch.UntorchError,))
        assert all(issubclass(error, base) for base in builtin)
    public = [value for name, value in vars(errors).items() if not name.startswith("_")]
    defined = {value for value in public if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == {untorch.UntorchError, *BUILTIN}
    assert all(getattr(untorch, error.__name__) is error for error in defined)


@pytest.mark.parametrize("error", [e for e in BUILTIN if not issubclass(e, OSError)])
def test_the_message_is_printed_plainly(error: type[untorch.UntorchError]) -> None:
    """A KeyError would print the repr, with quotes and escapes."""
    raised = error("method 'x': expected µ\nand more")
    for same in (raised, copy.copy(raised), pickle.loads(pickle.dumps(raised))):
        assert type(same) is error
        assert str(same) == "method 'x': expected µ\nand more"
    assert str(error()) == ""


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOENT, untorch.FileMissingError),
        (errno.EACCES, untorch.FilePermissionError),
        (errno.EPERM, untorch.FilePermissionError),
        (errno.EISDIR, untorch.FileIsDirectoryError),
        (errno.ELOOP, untorch.FileOpenError),
        (None, untorch.FileOpenError),
    ],
)
def test_file_errors_have_pythons_attributes(number: int | None, error: type[untorch.FileOpenError]) -> None:
    raised = file_error("cannot open m.pt2: no", number, "m.pt2")
    for same in (raised, copy.copy(raised), pickle.loads(pickle.dumps(raised))):
        assert type(same) is error
        assert str(same) == "cannot open m.pt2: no"
        assert (same.errno, same.filename) == (number or errno.EIO, "m.pt2")
        assert same.strerror == os.strerror(number or errno.EIO)


def test_a_missing_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "none.pt2"
    for given in (path, str(path)):
        with pytest.raises(FileNotFoundError) as caught:
            untorch.load(given)
        assert isinstance(caught.value, untorch.InvalidFileError)
        assert str(caught.value) == f"cannot open {path}: No such file or directory"
        assert caught.value.errno == errno.ENOENT
        assert caught.value.filename == str(path)
        assert caught.value.__context__ is None
    with pytest.raises(FileNotFoundError) as caught:
        ArchiveReader(path)
    assert str(caught.value) == f"cannot open {path}: No such file or directory"
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(path))


def test_a_directory(tmp_path: pathlib.Path) -> None:
    for open_it in (untorch.load, ArchiveReader):
        with pytest.raises(IsADirectoryError) as caught:
            open_it(tmp_path)
        assert str(caught.value) == f"cannot open {tmp_path}: Is a directory"
        assert (caught.value.errno, caught.value.filename) == (errno.EISDIR, str(tmp_path))


def test_a_file_that_may_not_be_read(own_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """In a process of its own: root reads everything, and so gives its rights up."""
    path = tmp_path / "m.pt2"
    path.write_bytes(own_package.read_bytes())
    path.chmod(0)
    os.chmod(tmp_path, 0o755)
    code = f"""
import os, sys
import untorch
from untorch.archive import ArchiveReader
for folder in {[str(p) for p in tmp_path.parents]!r}:
    assert os.stat(folder).st_mode & 0o001 or os.getuid() != 0, folder
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
for open_it in (untorch.load, ArchiveReader):
    try:
        open_it({str(path)!r})
    except PermissionError as error:
        print(type(error).__name__, error.errno, error.filename, error)
"""
    if os.getuid() == 0:
        for folder in tmp_path.parents:  # pytest's folders are its user's only
            if not os.stat(folder).st_mode & 0o001:
                os.chmod(folder, 0o755)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    line = f"FilePermissionError {errno.EACCES} {path} cannot open {path}: Permission denied\n"
    assert (done.stdout, done.stderr) == (2 * line, "")


def test_where_an_archive_cannot_be_written(tmp_path: pathlib.Path) -> None:
    missing = tmp_path / "none" / "m.pt2"
    with pytest.raises(FileNotFoundError) as caught:
        ArchiveWriter(missing)
    assert str(caught.value) == f"cannot write {missing}: the directory {missing.parent} does not exist"
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(missing.parent))
    with pytest.raises(IsADirectoryError) as found:
        ArchiveWriter(tmp_path)
    assert str(found.value) == f"cannot write {tmp_path}: it is a directory"
    assert isinstance(caught.value, untorch.UntorchError) and isinstance(found.value, untorch.UntorchError)


def test_a_damaged_file_is_no_system_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"no archive at all, but long enough to look for one")
    with pytest.raises(untorch.InvalidFileError) as caught:
        untorch.load(path)
    assert type(caught.value) is untorch.InvalidFileError
    assert (
        str(caught.value)
        == f"{path} is no .pt2 file, or is cut off: it does not end with a zip directory without a comment"
    )


X = np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda _: untorch.load(3),
            "load: source: expected a path (str or os.PathLike), or the contents of a file (bytes, or another object "
            "with the buffer protocol), got int",
        ),
        (lambda program: program[None], ": expected a method's name as a string, got None"),
        (
            lambda _: untorch.manual_seed("1"),
            "manual_seed: expected an integer from 0 to 2**64 - 1 for `seed`, got '1'",
        ),
        (
            lambda _: untorch.manual_seed(True),
            "manual_seed: expected an integer from 0 to 2**64 - 1 for `seed`, got True",
        ),
        (lambda _: untorch.stream(object()), "stream: expected None, a cudaStream_t as an int, or an object with"),
        (lambda _: untorch.register_kernel("a::b", 3), "register_kernel: expected a callable for `a::b`, got `int`"),
        (lambda _: untorch.register_kernel(3), "operator name: expected `namespace::operator` or"),
        (lambda program: program.linear(X, X), "method 'linear': expected 1 positional arguments, got 2"),
        (lambda program: program.linear(), "method 'linear': "),
        (lambda program: program.linear(X, y=X), "method 'linear': unknown argument 'y'"),
        (lambda program: program.linear([1.0]), "method 'linear', "),
        (lambda program: program.linear("x"), "expected an array (numpy, or anything with __dlpack__), got str"),
        (lambda program: program.linear(X, out=[1]), "out[0]: expected a numpy array to write to, got list"),
    ],
)
def test_wrong_types_are_type_errors(own_package: pathlib.Path, call: Any, text: str) -> None:
    with untorch.load(own_package) as program, pytest.raises(TypeError) as caught:
        call(program)
    assert isinstance(caught.value, untorch.ArgumentTypeError)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda _: untorch.manual_seed(-1), "manual_seed: expected an integer from 0 to 2**64 - 1 for `seed`, got -1"),
        (lambda _: untorch.stream(-1), "stream: expected None, a cudaStream_t as an int"),
        (lambda _: untorch.register_kernel("b", print), "operator name: expected `namespace::operator` or"),
        (lambda program: program.linear(X.astype(np.float64)), "expected float32[batch, 4], got float64[2, 4]"),
        (lambda program: program.linear(X[:, :3]), "expected float32[batch, 4], got float32[2, 3]"),
    ],
)
def test_wrong_values_are_value_errors_only(own_package: pathlib.Path, call: Any, text: str) -> None:
    with untorch.load(own_package) as program, pytest.raises(untorch.InvalidArgumentError) as caught:
        call(program)
    assert type(caught.value) is untorch.InvalidArgumentError and not isinstance(caught.value, TypeError)
    assert text in str(caught.value)


def test_an_unknown_attribute_is_an_attribute_error(own_package: pathlib.Path) -> None:
    with untorch.load(own_package) as program:
        assert not hasattr(program, "nope")
        with pytest.raises(AttributeError) as caught:
            _ = program.nope
    assert str(caught.value) == f"{own_package} has no method 'nope', there are: alias, counter, linear, types"
