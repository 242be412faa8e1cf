"""The soak under ThreadSanitizer: ``scripts/sanitize.sh thread`` runs it, with instrumented libraries."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from .run import soak

SECONDS = 20
RACE = """
#include <unistd.h>
int counter;
void work(void) { for (int i = 0; i < 50; ++i) { ++counter; usleep(1000); } }
"""
SCRIPT = """
import ctypes, sys, threading
work = ctypes.CDLL(sys.argv[1]).work
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("libtsan" not in os.environ.get("LD_PRELOAD", ""), reason="runs under ThreadSanitizer alone"),
]


def test_a_race_is_seen(tmp_path: pathlib.Path) -> None:
    """What the tests rely on: the options leave out libraries that are not instrumented, and no others."""
    (tmp_path / "race.c").write_text(RACE)
    library = tmp_path / "race.so"
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = ["cc", "-shared", "-fPIC", "-fsanitize=thread", str(tmp_path / "race.c"), "-o", str(library)]
    subprocess.run(command, check=True, env=plain)
    process = subprocess.run([sys.executable, "-c", SCRIPT, str(library)], capture_output=True, text=True, check=False)
    assert process.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in process.stderr


def test_many_threads_race_for_nothing() -> None:
    # Its shadow memory grows with what was touched: memory is no subject here.
    seen, problems = soak(SECONDS, memory=False)
    assert not problems, seen
