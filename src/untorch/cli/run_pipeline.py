"""What ``untorch run`` does with a text, an image or an audio file: the pipeline of the package's front end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from untorch.cli.output import make_table, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

    from untorch.runtime.program import Program

__all__ = ["are_arrays", "parse_call_options", "render_pipeline", "run_pipeline"]

_SHOWN = 6  # values of an array


def are_arrays(inputs: Sequence[str]) -> bool:
    """Whether they are array files, which go to a method without a front end."""
    return all(text.endswith((".npy", ".npz")) for text in inputs)


def parse_call_options(texts: Sequence[str]) -> dict[str, Any]:
    """``["top_k=3"]`` → options of a pipeline's call. Values are JSON, or else plain text."""
    from untorch.runtime.errors import InvalidArgumentError

    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArgumentError(f"--call-option {text}: expected NAME=VALUE, such as top_k=3")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def run_pipeline(program: Program, inputs: Sequence[str], options: dict[str, Any], output: Path | None) -> Any:
    """The document of a run: a result an input, as ``untorch.pipeline`` gives it. Arrays and images go to ``output``.

    Raises InvalidArgumentError for a package without a front end, and what the pipeline raises.
    """
    from untorch.pipeline import open_pipeline
    from untorch.runtime.errors import InvalidArgumentError

    manifest = program.manifest
    if not manifest.keys() & {"pipeline", "speech", "llm"}:
        raise InvalidArgumentError(
            f"{program.path} has no front end that takes {inputs[0]!r:.80}: its methods take arrays, by --input "
            "NAME=FILE.npy; untorch inspect shows them"
        )
    with open_pipeline(program) as pipeline:
        given = [_json(text) if pipeline.task == "reranking" else text for text in inputs]
        start = time.perf_counter()
        results = [pipeline(given[0], **options)] if len(given) == 1 else pipeline(given, **options)
        seconds = time.perf_counter() - start
        writer = _Writer(output)
        return {
            "file": program.path,
            "task": pipeline.task,
            "seconds": seconds,
            "results": [
                {"input": text, "result": writer.plain(result, f"result_{index}")}
                for index, (text, result) in enumerate(zip(inputs, results, strict=True))
            ],
        }


def _json(text: str) -> Any:
    from untorch.runtime.errors import InvalidArgumentError

    try:
        return json.loads(text)
    except ValueError:
        raise InvalidArgumentError(
            f"""INPUT: reranking expects JSON such as '{{"query": "…", "documents": ["…"]}}', got {text!r:.80}"""
        ) from None


class _Writer:
    """Makes results JSON; arrays and images are files of the folder, if there is one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def plain(self, value: Any, name: str) -> Any:
        """``name``: of a file."""
        import numpy

        if isinstance(value, dict):
            return {str(key): self.plain(item, f"{name}_{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item, f"{name}_{index}") for index, item in enumerate(value)]
        if isinstance(value, numpy.ndarray):
            path = self._path(name, "npy")
            if path is not None:
                numpy.save(path, value, allow_pickle=False)
            return {
                "dtype": value.dtype.name,
                "shape": list(value.shape),
                "file": None if path is None else str(path),
                **({"values": value.tolist()} if path is None else {}),
            }
        if isinstance(value, numpy.generic):
            return value.item()
        if hasattr(value, "save") and hasattr(value, "size"):  # a Pillow image
            path = self._path(name, "png")
            if path is not None:
                value.save(path)
            return {"image": [*value.size], "file": None if path is None else str(path)}
        return value

    def _path(self, name: str, suffix: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{name}.{suffix}"


def render_pipeline(console: Console, document: dict[str, Any], python: str | None) -> None:
    """python: how the package is called in Python."""
    for entry in document["results"]:
        if len(document["results"]) > 1:
            console.print(entry["input"], style="bold", soft_wrap=True)
        _render_result(console, entry["result"])
    time_text = f"{document['file']}: {document['task']} ran in {seconds_text(document['seconds'])} (first call)"
    console.print(time_text + (f"; in Python: {python}" if python else ""), soft_wrap=True)


def _render_result(console: Console, result: Any) -> None:
    rows = [result] if isinstance(result, dict) else result
    if isinstance(result, dict) and "text" in result:
        console.print(result["text"], soft_wrap=True)
        for chunk in result.get("chunks") or ():
            begin, end = (("?" if time is None else f"{time:.2f}") for time in chunk["timestamp"])
            console.print(f"  {begin} – {end} s {chunk['text']}", soft_wrap=True)
    elif isinstance(result, dict) and ("values" in result or "file" in result):
        console.print(_cell(result), soft_wrap=True)
    elif isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        columns = list(rows[0])
        numbers = {name for name in columns if isinstance(rows[0][name], int | float)}
        titles = [f">{name}" if name in numbers else name for name in columns]
        console.print(make_table(None, titles, [[_cell(row.get(name)) for name in columns] for row in rows]))
    elif isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows):
        for row in rows:  # a table for each mask
            _render_result(console, row)
    else:
        console.print(str(result), soft_wrap=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict) and "shape" in value:
        flat = [item for item in value.get("values") or () if isinstance(item, int | float)]
        shown = ", ".join(f"{item:.4g}" for item in flat[:_SHOWN]) + (" …" if len(flat) > _SHOWN else "")
        kind = f"{value['dtype']}[{', '.join(map(str, value['shape']))}]"
        return f"{kind}: {value['file'] or shown}".rstrip(": ")
    if isinstance(value, dict) and "image" in value:
        width, height = value["image"]
        return f"image {width} × {height}" + (f": {value['file']}" if value["file"] else " (--output saves it)")
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(item)}" for name, item in value.items())
    return "" if value is None else str(value)
