"""Fills the table of docs/recipes.md: ``measure`` exports tiny random folders, ``render`` writes the page from JSON.

``python scripts/render_recipes.py measure [NAME …]`` needs torch and transformers, of diffusion diffusers, too, and
runs the packages with UNTORCH_RUN_PYTHON. Results are kept in docs/recipes.json, with the date and the versions.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "recipes.json"
PAGE = ROOT / "docs" / "recipes.md"
BEGIN, END = "<!-- recipes -->", "<!-- end -->"
TOLERANCE = 1e-4


def measure(names: list[str]) -> None:
    sys.path.insert(0, str(ROOT))
    from tests import diffusion_models, recipe_models
    from untorch.export import export_folder

    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    folders = {name: fields[:2] for name, fields in recipe_models.FOLDERS.items()}
    folders |= {
        name: (recipe_models.diffusion_task(name), architecture)
        for name, architecture in recipe_models.DIFFUSION.items()
    }
    for name in names or folders:
        task, architecture = folders[name]
        row: dict[str, Any] = {"architecture": architecture, "task": task, "exported": False}
        row["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        row |= {library: importlib.metadata.version(library) for library in ("torch", "transformers")}
        if name in recipe_models.DIFFUSION:
            row["diffusers"] = diffusion_models.import_diffusers().__version__
        with tempfile.TemporaryDirectory() as temporary:
            folder, package = Path(temporary, name), Path(temporary, "model.pt2")
            folder.mkdir()
            try:
                recipe_models.make_folder(name, folder)
                expected = recipe_models.plain(recipe_models.expected_results(folder, task))
                begin = time.perf_counter()
                report = export_folder(folder, package, progress=False)
                row |= {"exported": True, "seconds": time.perf_counter() - begin, "bytes": report.nbytes}
                found = recipe_models.run_without_torch(package, task)
                row["difference"] = recipe_models.difference(expected, found)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[-600:]
        rows[name] = row
        print(name, row, flush=True)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| Architecture | Task | Exported | Equal to transformers' pipeline | File | Export |",
        "|---|---|---|---|---:|---:|",
    ]
    for row in sorted(rows.values(), key=lambda row: (row["task"], row["architecture"])):
        gap = row.get("difference", float("inf"))
        equal = f"yes ({gap:.0e})" if gap <= TOLERANCE else "no"
        size = f"{row['bytes'] / 1024:.0f} KiB" if "bytes" in row else ""
        seconds = f"{row['seconds']:.0f} s" if "seconds" in row else ""
        exported = "yes" if row["exported"] else "no"
        lines.append(f"| {row['architecture']} | {row['task']} | {exported} | {equal} | {size} | {seconds} |")
    return "\n".join(lines)


def render() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(json.loads(RESULTS.read_text()))}\n{END}{after}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2:])
    elif sys.argv[1:] == ["render"]:
        render()
    else:
        sys.exit("usage: render_recipes.py measure [NAME …] | render")
