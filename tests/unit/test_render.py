"""The benchmarks' tables in the documents: markers, result files, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import types

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
MACHINE = {
    "cpu": "Test CPU",
    "avx512": True,
    "cores": 2,
    "kernel": "6.1.0-13-amd64",
    "date": "2026-01-02T03:04:05+00:00",
}
TABLE = {"columns": ["Runtime", "ms"], "rows": [["a|b", "1.00"], ["c", "2.00"]], "note": "Lower is better."}
MARKDOWN = (
    "| Runtime | ms |\n|---|---:|\n| a\\|b | 1.00 |\n| c | 2.00 |\n\n"
    "Lower is better. `benchmarks/speed.py`; Test CPU with AVX-512, 2 cores, Linux 6.1.0, 2026-01-02."
)


@pytest.fixture(scope="module")
def render() -> types.ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("benchmarks_render", BENCHMARKS / "render.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


def write_result(folder: pathlib.Path, name: str = "speed", quick: bool = False, table: str = "speed") -> None:
    folder.mkdir(exist_ok=True)
    document = {"script": f"benchmarks/{name}.py", "quick": quick, "machine": MACHINE, "tables": {table: TABLE}}
    (folder / f"{name}.json").write_text(json.dumps(document))


def test_a_marked_place_is_replaced_and_the_rest_is_kept(render: types.ModuleType) -> None:
    text = "before\n<!-- table: speed -->\nold\nlines\n<!-- end -->\nafter\n"
    expected = f"before\n<!-- table: speed -->\n{MARKDOWN}\n<!-- end -->\nafter\n"
    assert render.render(text, {"speed": MARKDOWN}, "x.md") == expected
    assert render.render(expected, {"speed": MARKDOWN}, "x.md") == expected


def test_several_places_and_text_without_markers(render: types.ModuleType) -> None:
    text = "<!-- table: a -->\n<!-- end -->\n<!-- other -->\n<!--table: b-->\n<!-- end -->"
    result = render.render(text, {"a": "A", "b": "B"}, "x.md")
    assert result == "<!-- table: a -->\nA\n<!-- end -->\n<!-- other -->\n<!--table: b-->\nB\n<!-- end -->"
    assert render.render("no marker\n<!-- end -->\n", {}, "x.md") == "no marker\n<!-- end -->\n"


def test_markers_in_a_code_block_are_text(render: types.ModuleType) -> None:
    text = "```\n<!-- table: unknown -->\n```\n"
    assert render.render(text, {}, "x.md") == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n<!-- table: slow -->\n<!-- end -->", "x.md:2: no result has a table 'slow'; there are: fast, speed"),
        ("<!-- table: fast -->\n", "x.md: the table 'fast' has no <!-- end -->"),
        (
            "<!-- table: fast -->\n<!-- table: speed -->\n<!-- end -->",
            "x.md:2: the table 'fast' has no <!-- end --> before this marker",
        ),
    ],
)
def test_wrong_markers_are_refused(render: types.ModuleType, text: str, message: str) -> None:
    with pytest.raises(render.RenderError) as caught:
        render.render(text, {"speed": "", "fast": ""}, "x.md")
    assert str(caught.value) == message


def test_tables_of_result_files(render: types.ModuleType, tmp_path: pathlib.Path) -> None:
    write_result(tmp_path)
    assert render.load_tables(tmp_path) == {"speed": MARKDOWN}


def test_a_quick_result_is_refused(render: types.ModuleType, tmp_path: pathlib.Path) -> None:
    write_result(tmp_path, quick=True)
    with pytest.raises(render.RenderError) as caught:
        render.load_tables(tmp_path)
    assert str(caught.value) == "speed.json: made with --quick, which gives no numbers to quote"


def test_a_table_in_two_result_files_is_refused(render: types.ModuleType, tmp_path: pathlib.Path) -> None:
    write_result(tmp_path)
    write_result(tmp_path, "other")
    with pytest.raises(render.RenderError) as caught:
        render.load_tables(tmp_path)
    assert str(caught.value) == "speed.json: the table 'speed' is in another result file as well"


def test_documents_are_written_once_and_checked(render: types.ModuleType, tmp_path: pathlib.Path) -> None:
    write_result(tmp_path / "results")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "speed.md"
    page.write_text("<!-- table: speed -->\n<!-- end -->\n")
    (tmp_path / "README.md").write_text("nothing to fill\n")
    assert render.run(tmp_path, tmp_path / "results", True) == ["docs/speed.md"]
    assert page.read_text() == "<!-- table: speed -->\n<!-- end -->\n"
    assert render.run(tmp_path, tmp_path / "results", False) == ["docs/speed.md"]
    assert page.read_text() == f"<!-- table: speed -->\n{MARKDOWN}\n<!-- end -->\n"
    assert render.run(tmp_path, tmp_path / "results", True) == []


def test_nothing_is_written_when_one_document_is_wrong(render: types.ModuleType, tmp_path: pathlib.Path) -> None:
    write_result(tmp_path / "results")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- table: speed -->\n<!-- end -->\n")
    (tmp_path / "docs" / "wrong.md").write_text("<!-- table: speed -->\n")
    with pytest.raises(render.RenderError):
        render.run(tmp_path, tmp_path / "results", False)
    assert (tmp_path / "README.md").read_text() == "<!-- table: speed -->\n<!-- end -->\n"


def test_the_repository_s_documents_render(render: types.ModuleType) -> None:
    assert render.run(render.ROOT, render.RESULTS, True) == []
