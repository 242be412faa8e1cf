"""Builds the documentation site: ``python scripts/build_docs.py`` in an environment of requirements-docs.txt.

The pages stay readable on a code host: they link to README.md and to sources, relative to where they are. Here they are
staged into build/docs/src: README.md becomes index.md, links follow, and a link to a source becomes its path as text.
Code for the tests alone (``<!-- setup``) is left out. mkdocs then builds strictly: every broken link and anchor fails.
``--stage`` does not call mkdocs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
STAGED = ROOT / "build" / "docs" / "src"
# Pages at the root, and what they are called in the site.
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md",
              "CHANGELOG.md": "CHANGELOG.md"}  # fmt: skip
SUFFIXES = {".md", ".svg", ".png"}
# Module, title, and members of the API reference.
API = {
    "untorch": ("untorch", [
        "load", "Program", "Method", "Session", "Graph", "Tensor", "TensorSpec", "SymbolicDim", "empty", "zeros",
        "profile", "stream", "current_stream", "CurrentStream", "manual_seed", "initial_seed", "register_kernel",
        "Predictor", "TrustPolicy", "Identity", "cmake_dir", "UntorchError", "InvalidArgumentError",
        "ArgumentTypeError", "InvalidFileError", "UnsupportedError", "UnknownMethodError", "ModelError",
        "OutOfMemoryError", "ClosedError", "DeviceLostError", "UntrustedError", "FileOpenError",
        "FileMissingError", "FilePermissionError", "FileIsDirectoryError", "SystemResourceError",
    ]),
    "export": ("untorch.export", None),
    "llm": ("untorch.llm", None),
    "pipeline": ("untorch.pipeline", None),
    "speech": ("untorch.speech", None),
    "profiler": ("untorch.profiler", None),
}  # fmt: skip
LINK = re.compile(r"(!?\[[^\]\n]*(?:\n[^\]\n]*)?\])\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"(`[^`\n]*(?:\n[^`\n]*)?`)")
HIDDEN = re.compile(r"<!-- (?:setup\n.*?^-->|not run: [^\n]+ -->)\n?", re.DOTALL | re.MULTILINE)


def staged_name(path: PurePosixPath) -> PurePosixPath | None:
    """Where a file of the repository is in the site; None for one that is not there."""
    if str(path) in ROOT_PAGES:
        return PurePosixPath(ROOT_PAGES[str(path)])
    if path.parts[:1] == ("docs",) and path.suffix in SUFFIXES:
        return path.relative_to("docs")
    return None


def stage_page(source: PurePosixPath, text: str) -> str:
    """The page with its links as they are in the site."""
    target = staged_name(source)
    assert target is not None, source

    def link(match: re.Match[str]) -> str:
        label, address = match.groups()
        if re.match(r"[a-z]+:|#", address):
            return match[0]
        file, hash_, anchor = address.partition("#")
        found = normalised(source.parent / file)
        staged = staged_name(found)
        if staged is None:
            return f"{label[1:-1]} (`{found}`)"
        return f"{label}({relative(staged, target.parent)}{hash_}{anchor})"

    parts = FENCE.split(HIDDEN.sub("", text))
    return "".join(part if part.startswith("```") else plain_brackets(LINK.sub(link, part)) for part in parts)


def plain_brackets(text: str) -> str:
    """Shapes such as [k][n] are text: mkdocstrings would take them for references."""
    return "".join(part if part.startswith("`") else part.replace("][", "]\\[") for part in CODE_SPAN.split(text))


def normalised(path: PurePosixPath) -> PurePosixPath:
    """The path without ".."."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return PurePosixPath(*parts)


def relative(path: PurePosixPath, folder: PurePosixPath) -> str:
    """The path as a link from a page in the folder."""
    common = 0
    for one, other in zip(path.parts, folder.parts, strict=False):
        if one != other:
            break
        common += 1
    return "/".join([".."] * (len(folder.parts) - common) + list(path.parts[common:]))


def api_page(module: str, members: list[str] | None) -> str:
    """A page of the API reference, for mkdocstrings."""
    head = f"# {module}\n\n"
    if members is None:
        return head + f"::: {module}\n    options:\n      show_root_heading: false\n      show_if_no_docstring: false\n"
    return head + "\n".join(f"::: {module}.{member}" for member in members) + "\n"


def stage() -> None:
    """Writes build/docs/src anew."""
    shutil.rmtree(STAGED, ignore_errors=True)
    sources = [ROOT / name for name in ROOT_PAGES]
    sources += [path for path in sorted((ROOT / "docs").rglob("*")) if path.suffix in SUFFIXES]
    for path in sources:
        source = PurePosixPath(path.relative_to(ROOT).as_posix())
        name = staged_name(source)
        assert name is not None
        target = STAGED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(stage_page(source, path.read_text()))
        else:
            shutil.copyfile(path, target)
    for name, (module, members) in API.items():
        page = STAGED / "api" / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(api_page(module, members))


def main() -> int:
    """Stages the pages and builds the site. The exit code is mkdocs'."""
    stage()
    if "--stage" in sys.argv[1:]:
        return 0
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code == 0:
        print(f"built {ROOT / 'build' / 'docs' / 'site' / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
