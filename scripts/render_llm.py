"""Fills the table of docs/llm.md: ``measure`` runs tiny models of transformers, ``render`` writes the page from JSON.

``python scripts/render_llm.py measure [NAME …]`` needs torch and transformers. Each model's step runs in the engine,
not compiled, and its greedy tokens are compared with those of ``generate``. Results are kept in docs/llm.json.
A name of a language model and of one that sees images measures both.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "llm.json"
PAGE = ROOT / "docs" / "llm.md"
BEGIN, END = "<!-- architectures -->", "<!-- end -->"


def row_name(name: str, has_images: bool, texts: Sequence[str]) -> str:
    """The key of a model in the JSON. A few are both: a language model alone, and one that sees images."""
    return f"{name} with images" if has_images and name in texts else name


def measure(names: list[str]) -> None:
    """Of these models, or of all; those that were measured before stay."""
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers

    from tests.conformance.language_models import MORE, SERVED
    from tests.conformance.test_language_models import check_greedy
    from tests.conformance.test_vision_language import check_images_greedy
    from tests.vision_models import CONFIGS

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are too small for more
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    texts, images = [*SERVED, *MORE], [*CONFIGS]
    if unknown := [name for name in names if name not in (*texts, *images)]:
        sys.exit(f"unknown: {', '.join(unknown)}; known are {', '.join((*texts, *images))}")
    asked = [(name, False) for name in texts] + [(name, True) for name in images]
    for name, has_images in asked:
        if names and name not in names:
            continue
        row: dict[str, Any] = {"equal": False, "transformers": transformers.__version__}
        try:
            step = check_images_greedy(name) if has_images else check_greedy(name)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[-600:]
        else:
            row |= {
                "equal": True,
                "architecture": step.architecture,
                "windows": any(layer.window for layer in step.layers),
                "chunks": any(layer.chunk for layer in step.layers),
                "latents": bool(step.absorbed),
                "states": bool(step.state_layers),
                "images": has_images,
            }
        key = row_name(name, has_images, texts)
        rows[key] = row
        print(key, row, flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Architectures whose tokens are equal, by what the engine keeps for them."""
    kinds: dict[str, list[str]] = {}
    for row in rows.values():
        if row["equal"]:
            masks = [kind for kind in ("windows", "chunks") if row[kind]]
            kept = "latents" if row["latents"] else "keys and values"
            kept += f", {' and '.join(masks)}" if masks else ""
            kept += ", states of recurrent layers" if row["states"] else ""
            kept += "; images of any size" if row.get("images") else ""
            name = row["architecture"]
            for suffix in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
                name = name.removesuffix(suffix)
            kinds.setdefault(kept, []).append(name)
    lines = ["| What is kept, what is seen | Architectures |", "|---|---|"]
    lines += [f"| {kept} | {', '.join(sorted(names, key=str.lower))} |" for kept, names in sorted(kinds.items())]
    count = sum(map(len, kinds.values()))
    return f"{count} architectures of transformers give the tokens of its `generate`:\n\n" + "\n".join(lines)


def page(text: str) -> str:
    """The page with its table from the JSON."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(json.loads(RESULTS.read_text()))}\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2:])
    elif sys.argv[1:] == ["render"]:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        sys.exit("usage: render_llm.py measure [NAME …] | render")
