"""One server for all tests that leave it as it is."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator

import pytest

from tests import packages
from tests.serve.process import Server, serve

MODELS = pathlib.Path(__file__).parents[1] / "unit" / "models.py"


@pytest.fixture(scope="session")
def package() -> pathlib.Path:
    """Methods linear (a dynamic batch from 1 to 64), alias, types, counter."""
    return packages.compiled(MODELS, "own")


@pytest.fixture(scope="session")
def served_package() -> pathlib.Path:
    """Methods forward, types, similarity and centre of models.py."""
    return packages.compiled(pathlib.Path(__file__).with_name("models.py"), "served")


@pytest.fixture(scope="session")
def front_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves "colours", which classifies pictures as red, green and blue."""
    package = packages.compiled(pathlib.Path(__file__).with_name("front_end_models.py"), "colours")
    with serve(tmp_path_factory.mktemp("front_ends"), package, "--grpc-port", "-1", "--max-pixels", "10000") as one:
        yield one


@pytest.fixture(scope="session")
def server(
    package: pathlib.Path, served_package: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Serves the package as "own", and a folder with the other one as "served"."""
    folder = tmp_path_factory.mktemp("serve")
    repository = folder / "repository"
    repository.mkdir()
    shutil.copy(served_package, repository / "served.pt2")
    with serve(folder, f"own={package}", "--repository", repository, "--max-body", "1MiB") as one:
        yield one
