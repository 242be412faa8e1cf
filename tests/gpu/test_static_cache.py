"""benchmarks/static_cache.py on the GPU: token for token like eager, in sessions side by side, and decoding in graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conformance.test_static_cache import MODULE, NEW, PROMPTS, eager, static_cache

__all__ = ["static_cache"]  # a fixture

# Generations in turns on sessions of one program, then with graphs of their own for one token; as JSON. No torch.
RUN = """
import json, sys
sys.modules["torch"] = None
sys.path.insert(0, sys.argv[1])
import numpy as np
import static_cache, untorch
prompts, new = json.loads(sys.argv[3]), int(sys.argv[4])
with untorch.load(sys.argv[2]) as program:
    sessions = [program.session() for _ in prompts]
    turns = list(zip(*(static_cache.generate(s, p, new) for s, p in zip(sessions, prompts))))
    for session in sessions:
        session.reset()
    graphs = [session.decode.graph(np.array([[0]])) for session in sessions]
    for session in sessions:
        session.reset()
    found = []
    for session, prompt in zip(sessions, prompts):
        start = session.prefill if len(prompt) > 1 else session.decode
        found.append([int(start(np.array([prompt])).argmax())])
    for _ in range(new - 1):
        for graph, tokens in zip(graphs, found):
            tokens.append(int(graph(np.array([tokens[-1:]])).argmax()))
    print(json.dumps({"turns": [list(t) for t in zip(*turns)], "graphs": found,
                      "devices": [program[name].device for name in program.methods]}))
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_generates_like_eager(kind: str, static_cache: ModuleType, tmp_path: Path) -> None:
    model = static_cache.tiny_model(kind)
    package = tmp_path / "lm.pt2"
    static_cache.build(model, package, 32, device="cuda", progress=False)
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    command = [python, "-c", RUN, str(MODULE.parent), str(package), json.dumps(PROMPTS), str(NEW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = [eager(model, prompt) for prompt in PROMPTS]
    assert found["turns"] == expected
    assert found["graphs"] == expected
    assert found["devices"] == ["cuda:0", "cuda:0"]
