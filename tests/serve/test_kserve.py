"""KServe's clients as they come. ``make`` puts them into build/kserve."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.serve.process import Server

FOLDER = pathlib.Path(__file__).parents[2] / "build" / "kserve"


def test_kserve_clients(server: Server) -> None:
    if not FOLDER.is_dir():
        pytest.skip("needs KServe's client: make build/stamps/clients")
    script = pathlib.Path(__file__).with_name("kserve_client.py")
    done = subprocess.run(
        [sys.executable, str(script), server.http, server.grpc],
        env={**os.environ, "PYTHONPATH": str(FOLDER)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stderr[-3000:]
