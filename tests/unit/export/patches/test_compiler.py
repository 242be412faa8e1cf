"""Objects that are compiled at a time, and the stand-in for <regex>."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import cpp_builder, cpu_vec_isa

from untorch.export import patches
from untorch.export.patches import compiler
from untorch.export.patches.registry import replaced

pytestmark = pytest.mark.filterwarnings("ignore")


class NotLinked(Exception):
    """The first command that is no compile of generated code."""


def commands(context: Any, patience: float) -> list[tuple[str, str]]:
    """What Inductor asked of the compiler, as ("start" or "end", kind); kernels end before the host's code.

    The host's code waits up to ``patience`` seconds for kernels to begin.
    """
    seen: list[tuple[str, str]] = []
    kernel_is_there = threading.Event()

    def run(command: str, cwd: str) -> None:
        kind = next((kind for kind in ("wrapper", "kernel") if f".{kind}.cpp " in command), "other")
        seen.append(("start", kind))
        if kind == "other":
            raise NotLinked
        if kind == "kernel":
            kernel_is_there.set()
        else:
            kernel_is_there.wait(patience)
        seen.append(("end", kind))

    cpu_vec_isa.valid_vec_isa_list()  # compiles, where no one asked before
    x = torch.randn(3)
    program = torch.export.export(torch.nn.ReLU(), (x,))
    options = {"aot_inductor.package": True, "aot_inductor.precompile_headers": False}
    with replaced(cpp_builder, "_run_compile_cmd", run), context, contextlib.suppress(Exception), torch.no_grad():
        torch._inductor.aot_compile(program.module(), (x,), options=options)
    return seen


@pytest.mark.slow
def test_torch_compiles_one_object_after_the_other() -> None:
    seen = commands(contextlib.nullcontext(), 1)
    assert seen[:4] == [("start", "wrapper"), ("end", "wrapper"), ("start", "kernel"), ("end", "kernel")]


def test_objects_are_compiled_at_a_time_and_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_CACHE", "")
    seen = commands(patches.objects_at_a_time(), 60)
    assert sorted(seen[:4]) == [("end", "kernel"), ("end", "wrapper"), ("start", "kernel"), ("start", "wrapper")]
    assert seen.index(("start", "kernel")) < seen.index(("end", "wrapper"))
    assert seen[4] == ("start", "other")


def run_commands(lines: list[str], folder: str, error: Exception | None = None) -> None:
    """What Inductor does, up to an error of its own."""
    with patches.objects_at_a_time():
        for line in lines:
            cpp_builder._run_compile_cmd(line, folder)
        if error is not None:
            raise error


@pytest.mark.parametrize("kind", ["wrapper", "kernel"])
def test_the_compilers_error_is_raised(tmp_path: Path, kind: str) -> None:
    source = tmp_path / f"model.{kind}.cpp"
    source.write_text("#include <cstddef>\nint size = nothing;\n")
    command = f"g++ {source} -c -o {tmp_path}/out.o"
    for others in ([], ["true"]):
        with pytest.raises(Exception, match="nothing.*was not declared"):
            run_commands([command, *others], str(tmp_path / "build"))


def test_an_error_of_inductors_is_kept(tmp_path: Path) -> None:
    """The compile that still runs fails as well."""
    with pytest.raises(NotLinked):
        run_commands([f"g++ {tmp_path}/none.kernel.cpp -c -o out.o"], str(tmp_path / "build"), NotLinked())


def test_other_compilers_have_no_precompiled_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_HEADERS", str(tmp_path / "headers"))
    monkeypatch.setattr(cpp_builder, "is_gcc", lambda: False)
    (tmp_path / "model.kernel.cpp").write_text("#include <cstddef>\nint size;\n")
    for _ in range(2):
        run_commands([f"g++ {tmp_path}/model.kernel.cpp -c -o {tmp_path}/out.o"], str(tmp_path / "build"))
    assert (tmp_path / "out.o").exists() and not (tmp_path / "headers").exists()


def test_torchs_header_uses_regex_for_the_name_of_a_device() -> None:
    folder = compiler.plain_regex()
    assert folder is not None and (folder / "regex").is_file()


@pytest.mark.parametrize(
    "text",
    [
        "",
        '#include <regex>\nstd::regex re("[a-z]+");\nstd::smatch sm;\nstd::regex_match(device_str, sm, re);',
        '#include <regex>\nstd::regex re("(cpu|cuda)(:([0-9]+))?");\nstd::smatch sm;\n'
        "std::regex_match(device_str, sm, re);\nstd::regex_replace(device_str, re, x);",
    ],
)
def test_other_uses_have_the_standards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    header = tmp_path / "include/torch/csrc/inductor/aoti_runtime/model_base.h"
    header.parent.mkdir(parents=True)
    header.write_text(text)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert compiler.plain_regex.__wrapped__() is None
    header.unlink()
    assert compiler.plain_regex.__wrapped__() is None


PROGRAM = """
#include <regex>
#include <cstdio>
int main() {
  for (const char* text : {"cpu", "cuda", "cuda:0", "cuda:12", "cuda:", "cuda:x", "cuda:1:2", ":1", "", "cud", "cudas",
                           "xpu:3", "tpu", "cpu|cuda", "cpu ", "cuda:-1", "mps", "(cpu", "cuda:1 "}) {
    const std::string device = text;
    std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");
    std::smatch sm;
    const bool matched = std::regex_match(device, sm, re);
    std::printf("%s %d", text, matched);
    if (matched)
      for (int i = 0; i < 4; ++i) std::printf(" [%s %d]", sm[i].str().c_str(), static_cast<bool>(sm[i].matched));
    std::printf("\\n");
  }
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_stand_in_reads_devices_as_the_standard_does(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(PROGRAM)
    outputs = []
    for name, flags in (("standard", []), ("ours", [f"-I{compiler._HEADERS}", "-Wall", "-Wextra", "-Werror"])):
        command = ["g++", "-std=c++20", *flags, str(tmp_path / "a.cpp"), "-o", str(tmp_path / name)]
        subprocess.run(command, check=True)
        outputs.append(subprocess.run([tmp_path / name], capture_output=True, text=True, check=True).stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].count("\n") == 19
