"""Compiles a tiny sentence encoder with its front end: ``python embedding_models.py minilm PATH``."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[3]


def main(path: str) -> None:
    """Compiles the package."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT))
    from tests.recipe_models import make_folder
    from untorch.export import export_folder

    with tempfile.TemporaryDirectory() as folder:
        make_folder("minilm", pathlib.Path(folder))
        export_folder(folder, path, progress=False)


if __name__ == "__main__":
    main(sys.argv[2])
