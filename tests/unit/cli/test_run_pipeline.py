"""untorch run with what a front end takes: which calls reach the pipeline, and what is printed and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import write_package
from .test_inspect import PIPELINE


class Pipeline:
    """Gives ``results`` in turn, and keeps its calls."""

    def __init__(self, task: str, results: Sequence[Any]) -> None:
        self.task, self.results, self.calls = task, list(results), list[tuple[Any, dict[str, Any]]]()

    def __call__(self, inputs: Any, **options: Any) -> Any:
        self.calls.append((inputs, options))
        return self.results if isinstance(inputs, list) else self.results[0]

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def text(library: bytes, tmp_path: Path) -> Path:
    return write_package(tmp_path / "text.pt2", library, "forward", change=lambda made: made.update(pipeline=PIPELINE))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pipeline]:
    def use(task: str, *results: Any) -> Pipeline:
        pipeline = Pipeline(task, results)
        monkeypatch.setattr("untorch.pipeline.open_pipeline", lambda program: pipeline)
        return pipeline

    return use


LABELS = [{"label": "good", "score": 0.987654}, {"label": "bad", "score": 0.012346}]


def test_one_text(cli: Callable[..., Any], text: Path, use: Callable[..., Pipeline]) -> None:
    pipeline = use("text-classification", LABELS)
    done = cli(
        "run", text, "some text", "--call-option", "top_k=2", "--call-option", "function_to_apply=none", "--json"
    )
    assert done.code == 0, done.err
    document = done.document()
    assert document.pop("seconds") >= 0
    assert document == {
        "file": str(text), "task": "text-classification", "results": [{"input": "some text", "result": LABELS}],
    }  # fmt: skip
    assert pipeline.calls == [("some text", {"top_k": 2, "function_to_apply": "none"})]
    lines = cli("run", text, "some text").out.splitlines()
    assert [line.split() for line in lines if "good" in line or "label" in line] == [
        ["label", "score"], ["good", "0.9877"],
    ]  # fmt: skip
    assert lines[-1].startswith(f"{text}: text-classification ran in ")
    assert lines[-1].endswith(f'; in Python: untorch.pipeline("{text}")("…")')


def test_several_texts(cli: Callable[..., Any], text: Path, use: Callable[..., Pipeline]) -> None:
    pipeline = use("text-generation", "one", "two")
    assert cli("run", text, "a", "b").out.splitlines()[:4] == ["a", "one", "b", "two"]
    assert pipeline.calls == [(["a", "b"], {})]


def test_speech_with_times(cli: Callable[..., Any], text: Path, use: Callable[..., Pipeline]) -> None:
    use("automatic-speech-recognition", {"text": "a b", "chunks": [{"text": "a b", "timestamp": (0.5, None)}]})
    assert cli("run", text, "a.wav").out.splitlines()[:2] == ["a b", "  0.50 – ? s a b"]


def test_arrays_and_images_are_written(
    cli: Callable[..., Any], text: Path, use: Callable[..., Pipeline], tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    array = np.arange(8, dtype=np.float32)
    use("text-embedding", array)
    assert cli("run", text, "a").out.splitlines()[0] == "float32[8]: 0, 1, 2, 3, 4, 5 …"
    (entry,) = cli("run", text, "a", "--json").document()["results"]
    assert entry["result"] == {"dtype": "float32", "shape": [8], "file": None, "values": array.tolist()}
    done = cli("run", text, "a", "--output", tmp_path / "out")
    assert done.out.splitlines()[0] == f"float32[8]: {tmp_path / 'out' / 'result_0.npy'}"
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "result_0.npy"), array)
    use("image-segmentation", [{"score": None, "label": "cat", "mask": image.new("L", (3, 2))}])
    assert "image 3 × 2 (--output saves it)" in cli("run", text, "a.jpg").out
    assert cli("run", text, "a.jpg", "--output", tmp_path / "out").code == 0
    with image.open(tmp_path / "out" / "result_0_0_mask.png") as mask:
        assert mask.size == (3, 2)


def test_reranking_takes_json(cli: Callable[..., Any], text: Path, use: Callable[..., Pipeline]) -> None:
    pipeline = use("reranking", [{"index": 0, "score": 0.5, "document": "b"}])
    assert cli("run", text, '{"query": "a", "documents": ["b"]}').code == 0
    assert pipeline.calls == [({"query": "a", "documents": ["b"]}, {})]
    assert "INPUT: reranking expects JSON such as" in cli("run", text, "some text").err


def test_array_files_go_to_the_method(cli: Callable[..., Any], text: Path, package: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.float32))
    for path in (text, package):
        done = cli("run", path, tmp_path / "x.npy", "--json")
        assert done.document()["outputs"][0]["max"] == 2.5
    out = cli("run", text, tmp_path / "x.npy").out
    assert out.splitlines()[-1].endswith(f'; in Python: untorch.pipeline("{text}")("…")')
    out = cli("run", package, tmp_path / "x.npy").out
    assert out.splitlines()[-1].endswith(f'; in Python: untorch.load("{package}").forward(x)')


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("some text", "--input", "x=ones"),
            2,
            "Invalid value for --input: is for arrays: leave it out, or INPUT; see",
        ),
        (("some text", "--dim", "s0=2"), 2, "Invalid value for --dim: is for arrays: leave it out, or INPUT; see"),
        (("--call-option", "top_k=1"), 2, "Invalid value for --call-option: is for an INPUT, and there is none; see"),
        (("some text", "--call-option", "top_k"), 1, "--call-option top_k: expected NAME=VALUE, such as top_k=3"),
        (
            ("some text",),
            1,
            "has no front end that takes 'some text': its methods take arrays, by --input NAME=FILE.npy",
        ),
    ],
)
def test_refusals(cli: Callable[..., Any], package: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = cli("run", package, *arguments)
    assert done.code == code and message in done.err


def test_without_an_input_the_front_end_is_named(cli: Callable[..., Any], text: Path, package: Path) -> None:
    done = cli("run", text)
    assert f'; or use its front end: untorch run {text} "some text", in Python untorch.pipeline("{text}")(' in done.err
    assert "front end" not in cli("run", package).err
