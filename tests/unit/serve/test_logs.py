"""Logs: every record is a line of the chosen format, those of other packages, too."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from untorch.serve.logs import set_up_logs


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    loggers = [
        logging.getLogger(name) for name in (None, "untorch", "uvicorn", "uvicorn.error", "grpc", "uvicorn.access")
    ]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_records_of_other_packages(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json")
    logging.getLogger("python_multipart.multipart").warning("Skipping data after last boundary")
    logging.getLogger("python_multipart.multipart").info("nothing")
    logging.getLogger("untorch.serve").info("ready")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", UserWarning, stacklevel=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["level"]) for line in lines] == [
        ("python_multipart.multipart", "warning"), ("untorch.serve", "info"), ("py.warnings", "warning"),
    ]  # fmt: skip


def test_errors_alone(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("none")
    logging.getLogger("python_multipart.multipart").warning("Skipping data after last boundary")
    assert capsys.readouterr().err == ""
