"""The documentation: its Python code runs, its links lead somewhere, what scripts write into it is up to date."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import untorch
from tests import recipe_models
from tests.warm_process import run_warm

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
)
# <!-- not run: reason --> above a block leaves it out; <!-- setup … --> holds code that runs but is not shown.
CODE = re.compile(
    r"(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```$|<!-- setup\n(.*?)^-->$", re.DOTALL | re.MULTILINE
)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
TABLE = re.compile(r"<!-- table: (\w+) -->\n.+?<!-- end -->", re.DOTALL)
TABLES = {
    "README.md": ["cpu_models_first", "cpu_minilm", "cold_start_minilm"],
    "docs/serving.md": ["serve", "serve_overhead"],
    "docs/cpu-benchmarks.md": [
        "cpu_models_1_thread",
        "cpu_models_2_threads",
        "cpu_models_2_threads_busy",
        "cpu_int8_1_thread",
        "cpu_int8_2_threads",
        "cpu_llm_1_thread",
        "cpu_llm_2_threads",
        "cpu_small_calls",
        "cold_start_mlp",
        "size_runtimes",
        "size_files",
        "export_time",
    ],
}


def code(page: str) -> str:
    """The Python code of a page, in order; empty without a block that is shown."""
    parts, shown = [], False
    for match in CODE.finditer(page):
        skipped, block, hidden = match.groups()
        if not skipped:
            shown = shown or block is not None
            parts.append(block if block is not None else hidden)
    return "\n".join(parts) if shown else ""


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    broken = []
    for target in LINK.findall(FENCE.sub("", path.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or (anchor and anchor not in anchors(found.read_text())):
            broken.append(target)
    return broken


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run_python(script: Path, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a script with this process's untorch."""
    paths = [str(Path(untorch.__path__[0]).parent), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if "import torch" in script.read_text() or "untorch.export" in script.read_text():
        return run_warm([script, *arguments], folder, environment)
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


# The pages for those who come from another runtime compile the same small models: `make docs CODE=1` runs them.
WITH_CODE = [
    path
    for path in PAGES
    if code(path.read_text()) and (path.parent.name != "migrate" or os.environ.get("UNTORCH_TEST_SITE"))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"  # a file: torch.export looks for source lines
    script.write_text(code(page.read_text()))
    done = run_python(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_pages_with_code_are_found() -> None:
    assert {"README.md", "docs/runtime.md", "docs/export.md"} <= {name(page) for page in WITH_CODE}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: `x`\n[a](#a-title-x) [b](#b) [c](page.md#a-title-x) [d](none.md) [e](https://example.org)\n"
    )
    assert broken_links(page) == ["#b", "none.md"]


def test_every_page_is_linked_from_the_readme_the_decisions_or_the_site() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "decisions" / "README.md").read_text()
    linked = {Path(target.partition("#")[0]).name for target in LINK.findall(text)}
    linked |= {
        Path(target).name for target in re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    }
    assert [name(page) for page in PAGES if page.name not in linked and page != ROOT / "README.md"] == []


@pytest.mark.parametrize("page", TABLES)
def test_a_page_has_its_tables(page: str) -> None:
    assert TABLE.findall((ROOT / page).read_text()) == TABLES[page]


def test_every_benchmark_table_is_on_one_page() -> None:
    """Two tables by thread count repeat the one on the first page."""
    found = [table for page in PAGES for table in TABLE.findall(page.read_text())]
    measured = [name for path in RESULTS.glob("*.json") for name in json.loads(path.read_text())["tables"]]
    assert sorted(found) == sorted(set(measured) - {"cpu_minilm_1_thread", "cpu_minilm_2_threads"})


def test_the_readme_has_the_demo() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.search(r"<!-- demo output -->\n```\n.*?```\n<!-- end -->", text, re.DOTALL)


def load_script(stem: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(stem, ROOT / "scripts" / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lists_of_operators_are_up_to_date() -> None:
    from untorch import _core

    if not _core.has_symbol("aoti_torch_cuda_mm_out"):
        pytest.skip("the library was built without nvcc: the page lists what a build with it serves")
    # A process of its own: other tests register kernels.
    done = run_python(ROOT / "scripts" / "render_limits.py", "--check")
    assert done.returncode == 0, done.stderr


def test_the_table_of_passes_is_up_to_date() -> None:
    pytest.importorskip("torch")
    done = run_python(ROOT / "scripts" / "render_passes.py", "--check")
    assert done.returncode == 0, done.stderr
    with pytest.raises(ValueError, match="the page lacks the marker"):
        load_script("render_passes").replaced("no markers", "")


def test_the_table_of_language_models_is_up_to_date() -> None:
    script = load_script("render_llm")
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run python scripts/render_llm.py render"
    rows = json.loads(script.RESULTS.read_text())
    assert [name for name, row in rows.items() if not row["equal"]] == []
    assert f"interface, {len(rows)} architectures among the tests" in (ROOT / "README.md").read_text()
    assert f"\n{len(rows)} architectures of transformers give the tokens of its `generate`:" in text
    assert script.row_name("Qwen3_5", True, ["Qwen3_5"]) == "Qwen3_5 with images"
    assert script.row_name("Qwen3VL", True, ["Qwen3_5"]) == "Qwen3VL"
    assert script.row_name("Qwen3_5", False, ["Qwen3_5"]) == "Qwen3_5"


def test_the_table_of_recipes_is_up_to_date() -> None:
    script = load_script("render_recipes")
    text = script.PAGE.read_text()
    rows = json.loads(script.RESULTS.read_text())
    assert script.table(rows) in text, "run python scripts/render_recipes.py render"
    assert [name for name, row in rows.items() if not row.get("difference", 1) <= script.TOLERANCE] == []
    assert rows.keys() == {*recipe_models.FOLDERS, *recipe_models.DIFFUSION}, "measure those that are new"


def test_what_the_lists_say() -> None:
    script = load_script("render_limits")
    text = script.render(
        [
            "aoti_torch_cpu_mm_out",
            "aoti_torch_cuda_sort",
            "aoti_torch_clone",
            "Sleef_expf8_u10",
            "aoti_torch_cpu_dance",
        ],
        ["aten::median"],
        {"aoti_torch_cpu_dance": "it has no steps", "aoti_torch_cuda_waltz": "it has three"},
        {"cpu": ["torchvision::nms"], "cuda": ["aten::bincount", "torchvision::nms"]},
    )
    assert "1 operators on the CPU (`aoti_torch_cpu_…`) and 1 on CUDA (`aoti_torch_cuda_…`), 1 functions for" in text
    assert "\n`mm_out`\n" in text
    assert "\n`sort`\n" in text
    assert "- On the CPU: `torchvision::nms`.\n- On CUDA: `aten::bincount`, `torchvision::nms`.\n" in text
    assert "`aten::median`" in text
    assert "| it has no steps | `dance` |" in text
    assert "| it has three | `waltz` |" in text
    assert text.index("`dance`") < text.index("1 that they declare for CUDA") < text.index("`waltz`")
    with pytest.raises(ValueError, match="the page lacks the marker"):
        script.replaced("no markers", text)


def test_the_options_on_the_page_are_the_options() -> None:
    pytest.importorskip("torch")
    from dataclasses import fields

    from untorch.export import ExportOptions

    section = (ROOT / "docs" / "export.md").read_text().partition("## Options")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE))
    made = ExportOptions()
    assert list(rows) == [field.name for field in fields(ExportOptions)]
    for option, default in rows.items():
        value = getattr(made, option)
        assert (float(default) if isinstance(value, float) else default.strip('"')) == (
            value if isinstance(value, float) else str(value)
        ), option


def test_the_errors_on_the_page_are_the_errors() -> None:
    section = (ROOT / "docs" / "runtime.md").read_text().partition("## Errors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
    expected = [name for name in untorch.__all__ if name.endswith("Error") and name != "UntorchError"]
    assert sorted(row[0] for row in rows) == sorted(expected)
    for error, bases in rows:
        own = {base.__name__ for base in getattr(untorch, error).__bases__} - {"UntorchError"}
        assert set(re.findall(r"\w+", bases)) == {name for name in own if not name.startswith("_")}


def test_the_manifest_page_has_every_field(tmp_path: Path) -> None:
    """The fields that the command line's test package has, and those of exporter.py, are on the page."""
    page = (ROOT / "docs" / "file-format.md").read_text()
    source = (ROOT / "src" / "untorch" / "export" / "exporter.py").read_text()
    source = source.partition("def _method_entry")[2]
    for module in ("signature", "weights"):
        source += (ROOT / "src" / "untorch" / "export" / f"{module}.py").read_text()
    target = (ROOT / "src" / "untorch" / "export" / "target" / "cuda.py").read_text()
    source += target.partition("def manifest_fields")[2].partition("\n\n")[0]
    written = set(re.findall(r'"(\w+)": ', source)) | set(re.findall(r'entry\["(\w+)"\] = ', source))
    written -= set(re.findall(r'"(\w+)": "[-+*/%a-z]+"', source)) - {"format", "device"}  # the table of operators
    missing = [field for field in sorted(written) if f"`{field}`" not in page and f'"{field}"' not in page]
    assert missing == [], json.dumps(missing)
