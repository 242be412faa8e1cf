"""torchao from build/torchao, where ``make test`` puts it, or wherever it is installed."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def torchao(module: str) -> Any:
    """The module of torchao, such as "quantization"; the test is skipped if torchao is not there."""
    folder = ROOT / "build" / "torchao"
    if (folder / "torchao").is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
    level = logging.root.manager.disable
    # It warns of its own CUDA kernels, which a CPU build of torch cannot load.
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"torchao.{module}")
    except ModuleNotFoundError:
        pytest.skip("torchao is not installed")
    finally:
        logging.disable(level)
