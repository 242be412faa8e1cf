"""cmake/unity.py: sources that are compiled at once mean what they mean alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def unity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("unity", ROOT / "cmake" / "unity.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["unity"] = module
    spec.loader.exec_module(module)
    return module


LOCAL = """// What only this file knows: other().
#include "kThreads.h"
namespace untorch {
namespace {

constexpr int kFirst = 1, kSecond = 2;
struct Table {
  int rows;
};
template <class T>
const T* view(const Table& table) {
  return table.data<T>("missing");
}
using Key = std::array<int, 3>;
template <class T, int kLanes>
struct alignas(kLanes * sizeof(T)) Vector {
  T at[kLanes];
};

}  // namespace

int exported(int rows) { return helper(rows); }

}  // namespace untorch
"""


def test_names(unity: ModuleType) -> None:
    assert unity.local_names(LOCAL) == {"kFirst", "kSecond", "Table", "view", "Key", "Vector"}
    assert unity.local_names("using namespace lt;\nint exported();\n") == set()


@pytest.mark.parametrize(
    ("other", "together"),
    [
        ("int rows() { return 1; }", True),
        ("int f() { return x.view() + base::view(2); }  // kFirst", True),  # members, and another namespace's
        ("int f() { return view(2); }", False),  # a function of a header's
        ("namespace {\nint view;\n}  // namespace", False),
        ("namespace {\nclass Table {};\n}  // namespace", False),
        ("int f() { return kSecond; }", False),
        ("namespace {\nint helper(int) { return 1; }\n}  // namespace", False),
        ("namespace {\nint other(int) { return 1; }\n}  // namespace", True),  # in a comment
        ("using namespace lt;", False),
    ],
)
def test_groups(unity: ModuleType, other: str, together: bool, tmp_path: Path) -> None:
    sources = [tmp_path / "a.cpp", tmp_path / "b.cpp"]
    for source, text in zip(sources, (LOCAL, other), strict=True):
        source.write_text(text + "\n")
    assert unity.grouped(sources, 2) == ([sources] if together else [[source] for source in sources])
    assert len(unity.grouped(sources, 1)) == 2


KERNEL = """#define NAMES
#include "kernels/none.cuh"
namespace untorch {
namespace {

constexpr int kThreads = 256;
struct Tile {
  static constexpr int kWarps = 8;
};
constexpr int kWarps = Tile::kWarps;
__global__ void __launch_bounds__(kThreads* int{2})
    fill(float* x) {
  *x = kThreads;
}

}  // namespace
}  // namespace untorch
"""


@pytest.mark.parametrize(
    ("other", "together"),
    [
        ("namespace {\nconstexpr int kThreads = 128;\n}  // namespace", True),  # each has its number
        ("void f() { fill<<<1, 1>>>(); }", True),  # a header's
        ("int f() { return kWarps; }", False),  # no macro may change a member
        ("using namespace lt;", False),
    ],
)
def test_cuda_sources(unity: ModuleType, other: str, together: bool, tmp_path: Path) -> None:
    sources = [tmp_path / "a.sm90a.cu", tmp_path / "b.sm90a.cu"]
    for source, text in zip(sources, (KERNEL, f"#include <limits>\n{other}\n"), strict=True):
        source.write_text(text)
    assert unity.grouped(sources, 2) == ([sources] if together else [[source] for source in sources])


def test_a_file_of_cuda_sources(
    unity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [tmp_path / "a.sm90a.cu", tmp_path / "b.sm90a.cu", tmp_path / "c.sm90a.cu"]
    sources[0].write_text(KERNEL)
    for source in sources[1:]:
        source.write_text(f'#include "kernels/{source.name[0]}.cuh"\nint {source.name[0]};\n')
    headers = tmp_path / "kernels"
    headers.mkdir()
    monkeypatch.setattr(unity, "_NATIVE", tmp_path)
    for name in "bc":
        (headers / f"{name}.cuh").write_text("namespace {\nconstexpr int kRows = 2;\n}  // namespace\n")
    unity.main(tmp_path / "made", 3, sources)
    made, alone = map(Path, capsys.readouterr().out.split())
    assert alone == sources[2], "two headers have a kRows"
    assert made.name == "unity_0.sm90a.cu"
    names = ("Tile", "fill", "kThreads")
    assert made.read_text().splitlines() == [
        "#define NAMES", '#include "kernels/none.cuh"', '#include "kernels/b.cuh"',
        *(f"#define {name} {name}_0" for name in names), f'#include "{sources[0]}"',
        *(f"#undef {name}" for name in names), f'#include "{sources[1]}"',
    ]  # fmt: skip


def test_files(unity: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [tmp_path / f"{name}.cpp" for name in "abc"]
    for source in sources:
        source.write_text(f"int {source.stem};\n")
    unity.main(tmp_path / "made", 2, sources)
    first, alone = map(Path, capsys.readouterr().out.split())
    assert first.read_text() == f'#include "{sources[0]}"\n#include "{sources[1]}"\n'
    assert alone == sources[2]
    changed = first.stat().st_mtime_ns
    unity.main(tmp_path / "made", 2, sources)
    assert first.stat().st_mtime_ns == changed


def test_anonymous_namespaces_are_found(unity: ModuleType) -> None:
    """Their ends are marked as clang-format marks them."""
    paths = [path for pattern in ("*.cpp", "*.cu", "*.cu.in", "*.cuh") for path in (ROOT / "native").rglob(pattern)]
    for path in sorted(paths):
        lines = path.read_text().splitlines()
        assert lines.count("namespace {") == lines.count("}  // namespace"), path
