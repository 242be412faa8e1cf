"""benchmarks/static_cache.py: language models in two methods on one cache, token for token like eager without a cache."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

MODULE = Path(__file__).parents[2] / "benchmarks" / "static_cache.py"
PROMPTS = [[5, 17, 3, 8], [40, 2], [7]]
NEW = 12

# Several generations in turns on sessions of one program, then on threads; as JSON. No torch.
RUN = """
import json, sys, threading
sys.modules["torch"] = None
sys.path.insert(0, sys.argv[1])
import static_cache, untorch
prompts, new = json.loads(sys.argv[3]), int(sys.argv[4])
with untorch.load(sys.argv[2]) as program:
    sessions = [program.session() for _ in prompts]
    turns = list(zip(*(static_cache.generate(s, p, new) for s, p in zip(sessions, prompts))))
    for session in sessions:
        session.reset()
    found = [None] * len(prompts)
    def work(i):
        found[i] = list(static_cache.generate(sessions[i], prompts[i], new))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for t in threads: t.start()
    for t in threads: t.join()
    sessions[0].reset()
    first = list(static_cache.generate(sessions[0], prompts[0], 4))
    fork = sessions[0].fork()
    rest = [list(static_cache.generate(s, first[-1:], new - 4)) for s in (sessions[0], fork)]
    weights = sum(w["nbytes"] for w in program.manifest["weights"])
    print(json.dumps({"turns": [list(t) for t in zip(*turns)], "threads": found, "rest": [first + r for r in rest],
                      "weights": weights, "state": sessions[0].nbytes}))
"""


@pytest.fixture(scope="module")
def static_cache() -> ModuleType:
    spec = importlib.util.spec_from_file_location("static_cache", MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def eager(model: torch.nn.Module, tokens: list[int]) -> list[int]:
    found: list[int] = []
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(input_ids=torch.tensor([tokens + found]), use_cache=False).logits
            found.append(int(logits[0, -1].argmax()))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gemma3"])
def test_generates_like_eager(kind: str, static_cache: ModuleType, tmp_path: Path) -> None:
    model = static_cache.tiny_model(kind)
    package = tmp_path / "lm.pt2"
    static_cache.build(model, package, 32, progress=False)
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    command = [python, "-c", RUN, str(MODULE.parent), str(package), json.dumps(PROMPTS), str(NEW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = [eager(model, prompt) for prompt in PROMPTS]
    assert found["turns"] == expected
    assert found["threads"] == expected
    assert found["rest"] == [expected[0]] * 2
    # Two methods, weights once: parameters, rotary frequencies, and one initial cache for all layers.
    parameters = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    if model.config.tie_word_embeddings:  # as an output layer it is packed
        parameters += model.get_input_embeddings().weight.numel() * 4
    assert found["weights"] <= 1.05 * parameters + found["state"]
