"""The thread pool behind OpenMP: constructs, failures in them, limits on threads, forks. Each in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable

import craft
import pytest
from conftest import HERE, model_library

FAILURES = {
    2: "number 17 is out of range (fail_at, openmp.cpp:",
    3: "number 17 is out of range (fail_at, openmp.cpp:",
    4: "number 17 is out of range (fail_at, openmp.cpp:",
    5: "number 17 is out of range (fail_at, openmp.cpp:",
    6: "number 17 is out of range (fail_at, openmp.cpp:",
    7: "a parallel loop threw: no memory for number 17",
    8: "number 17 is out of range (fail_at, openmp.cpp:",
}
DIVISIONS = (9, 10, 11)
HEADER = """
import json, os, sys, threading, time, warnings
import numpy.testing
import numpy as np
import untorch

program = untorch.load(sys.argv[1], **json.loads(sys.argv[2]))

def x(what):
    return np.asarray([what, 0, 0, 0], np.float32)

def run(what):
    try:
        got = program.forward(x(what))
    except untorch.UntorchError as error:
        return f"{type(error).__name__}: {error}"
    np.testing.assert_array_equal(got, 2 * x(what) + [1, 2, 3, 4])
    return "right"
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """y = 2 * x + w, after exercise(x[0]) of openmp.cpp."""
    folder = tmp_path_factory.mktemp("openmp")
    library = model_library(folder, "-DEXERCISE", str(HERE / "openmp.cpp"), "-fopenmp", "-lstdc++")
    target = folder / "model.pt2"
    target.write_bytes(craft.Package(library, craft.manifest(platform.machine())).bytes())
    return target


def python(
    script: str, path: pathlib.Path, options: dict[str, int] | None = None, *arguments: str, **environment: str
) -> list[str]:
    """Lines that the script prints."""
    result = subprocess.run(
        [sys.executable, "-c", HEADER + script, str(path), json.dumps(options or {}), *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ, **environment),
    )  # fmt: skip
    assert result.returncode == 0, f"{result.returncode}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    return result.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2", "4", "11"])
def test_every_construct_is_right(threads: str, path: pathlib.Path) -> None:
    script = """
for i in range(50):
    print(run(1))
answers = []
callers = [threading.Thread(target=lambda: answers.extend([run(1) for i in range(20)])) for i in range(6)]
[caller.start() for caller in callers]
[caller.join() for caller in callers]
print(*answers, sep="\\n")
assert "libgomp" not in open("/proc/self/maps").read()
"""
    lines = python(script, path, OMP_NUM_THREADS=threads)
    assert lines == ["right"] * 170


def test_a_library_that_clang_compiled(tmp_path: pathlib.Path) -> None:
    clang = shutil.which("clang++")
    if clang is None:
        pytest.skip("needs clang")
    flags = [
        "-std=gnu++20",
        "-O1",
        "-fPIC",
        "-fopenmp",
        "-c",
        str(HERE / "openmp.cpp"),
        "-o",
        str(tmp_path / "openmp.o"),
    ]
    subprocess.run([clang, *flags], check=True)
    library = model_library(tmp_path, "-DEXERCISE", str(tmp_path / "openmp.o"), "-lstdc++")
    path = tmp_path / "model.pt2"
    path.write_bytes(craft.Package(library, craft.manifest(platform.machine())).bytes())
    script = "for what in [1, 2, 3, 4, 5, 6, 7, 8] * 3: print(run(what))"
    for threads in ("1", "4"):
        lines = python(script, path, OMP_NUM_THREADS=threads)
        for what, line in zip([1, 2, 3, 4, 5, 6, 7, 8] * 3, lines, strict=True):
            assert line == "right" if what == 1 else FAILURES[what] in line, (what, line)


@pytest.mark.unsanitized
@pytest.mark.slow
def test_the_pool_under_thread_sanitizer(tmp_path: pathlib.Path) -> None:
    compiler, objcopy = shutil.which("g++"), shutil.which("objcopy")
    if compiler is None or objcopy is None:
        pytest.skip("needs g++ and objcopy")
    native = HERE.parents[1] / "native"
    flags = [compiler, "-std=gnu++20", "-O1", "-g", "-fsanitize=thread", f"-I{native}"]
    model = tmp_path / "openmp.o"
    subprocess.run([*flags, "-fopenmp", "-c", str(HERE / "openmp.cpp"), "-o", str(model)], check=True)
    names = subprocess.run(["nm", "-u", str(model)], check=True, capture_output=True, text=True).stdout.split()
    renamed = [
        f"--redefine-sym={name}={new}{name.removeprefix(old)}"
        for old, new in (("GOMP_", "UTMP_"), ("omp_", "utp_"))
        for name in names
        if name.startswith(old)
    ]
    subprocess.run([objcopy, *renamed, str(model)], check=True)
    sources = [*(native / "threads").glob("*.cpp"), native / "base/error.cpp", HERE / "threads_stress.cpp"]
    binary = tmp_path / "stress"
    subprocess.run([*flags, *map(str, sources), str(model), "-o", str(binary)], check=True)
    for spin in ("0", "100"):
        environment = dict(os.environ, OMP_NUM_THREADS="3", UNTORCH_SPIN_US=spin, TSAN_OPTIONS="halt_on_error=1")
        environment.pop("LD_PRELOAD", None)  # of another sanitizer
        result = subprocess.run(
            [str(binary)], capture_output=True, text=True, env=environment, timeout=300, check=False
        )
        assert (result.returncode, result.stdout) == (0, "right\n"), result.stdout + result.stderr[-4000:]


@pytest.mark.parametrize("threads", ["1", "4"])
def test_a_failure_in_a_parallel_region_is_the_calls(threads: str, path: pathlib.Path) -> None:
    script = """
for what in [2, 3, 4, 5, 6, 7, 8] * 10:
    print(run(what))
    assert run(1) == "right"
for _ in range(2000):  # two regions of a team fail at once: neither goes on
    assert run(6).startswith("ModelError")
"""
    lines = python(script, path, OMP_NUM_THREADS=threads)
    assert len(lines) == 70
    for what, line in zip(list(FAILURES) * 10, lines, strict=True):
        assert line.startswith("ModelError: method 'forward' failed while running: " + FAILURES[what]), (what, line)


def test_an_integer_division_by_zero_is_the_calls(path: pathlib.Path) -> None:
    script = """
import faulthandler
for what in (9, 10, 11, 12):
    print(run(what))
    assert run(1) == "right"
"""
    lines = python(script, path, OMP_NUM_THREADS="4")
    if platform.machine() == "x86_64":
        assert lines[:3] == ["ModelError: method 'forward' failed while running: integer division by zero"] * 3
    assert lines[3] == "right"


def test_a_signal_handler_of_the_application_gets_what_is_not_a_models(path: pathlib.Path) -> None:
    script = """
import ctypes, faulthandler, signal
run(9)
print("before", flush=True)
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGFPE)
    time.sleep(10)
print(os.waitpid(pid, 0)[1] == signal.SIGFPE)
"""
    assert python(script, path) == ["before", "True"]


@pytest.mark.parametrize(
    ("variable", "options", "want"),
    [
        ("3", {}, "threads: 3 of 3"),
        ("3,2", {}, "threads: 3 of 3"),
        ("2", {"num_threads": 5}, "threads: 5 of 5"),
        ("none", {}, f"threads: {len(os.sched_getaffinity(0))} of {len(os.sched_getaffinity(0))}"),
        ("-4", {}, f"threads: {len(os.sched_getaffinity(0))} of {len(os.sched_getaffinity(0))}"),
    ],
)
def test_the_number_of_threads(variable: str, options: dict[str, int], want: str, path: pathlib.Path) -> None:
    assert want in python("print(run(13))", path, options, OMP_NUM_THREADS=variable)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "options", "spins"),
    [
        ("0", {"spin_us": 1_000_000}, True),
        ("1000000", {"spin_us": 0}, False),
        ("1000000", {}, True),
        ("0", {}, False),
    ],
)
def test_the_time_that_an_idle_thread_spins(
    variable: str, options: dict[str, int], spins: bool, path: pathlib.Path
) -> None:
    script = """
run(1)
begin = time.process_time()
time.sleep(0.5)
print(time.process_time() - begin)
"""
    used = float(python(script, path, options, OMP_NUM_THREADS="2", UNTORCH_SPIN_US=variable)[0])
    assert used > 0.1 if spins else used < 0.05


def test_a_library_that_wants_more_of_openmp_is_refused(tmp_path: pathlib.Path) -> None:
    flags = ("-DEXERCISE", "-DTASKS", str(HERE / "openmp.cpp"), "-fopenmp", "-lstdc++")
    package = craft.Package(model_library(tmp_path, *flags), craft.manifest(platform.machine()))
    (tmp_path / "model.pt2").write_bytes(package.bytes())
    line = python("print(run(0))", tmp_path / "model.pt2")[0]
    assert line.startswith("UnsupportedError: ")
    assert "needs 2 functions that this build of untorch does not have: GOMP_task" in line


@pytest.mark.parametrize("limit", [pytest.param("RLIMIT_AS", marks=pytest.mark.unsanitized), "RLIMIT_NPROC"])
def test_threads_that_cannot_be_made(limit: str, path: pathlib.Path) -> None:
    if limit == "RLIMIT_NPROC" and os.geteuid() == 0:
        limit_script = "os.setuid(65534)\nresource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
    elif limit == "RLIMIT_NPROC":
        limit_script = "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
    else:
        limit_script = """
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (24 << 20),) * 2)
"""
    script = f"""
import resource
program.forward(x(0))
{limit_script}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for i in range(20):
        print(run(1))
        print(run(2)[:10])
print([f"{{w.category.__name__}}: {{w.message}}"[:52] for w in seen])
"""
    lines = python(script, path, OMP_NUM_THREADS="64")
    assert lines[:-1] == ["right", "ModelError"] * 20
    assert lines[-1] == "['RuntimeWarning: the system refused to start a thread']"


@pytest.mark.slow
@pytest.mark.unsanitized
def test_a_forked_child_has_threads_of_its_own(path: pathlib.Path) -> None:
    script = """
def child():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if [run(1), run(2)[:10], run(1)] == ["right", "ModelError", "right"] else 1)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(pid, 9)
    return "hangs"

assert run(1) == "right"
print(child())
over = threading.Event()
def call():
    while not over.is_set():
        assert run(1) == "right"
callers = [threading.Thread(target=call) for i in range(3)]
[caller.start() for caller in callers]
print({child() for i in range(40)})
over.set()
[caller.join() for caller in callers]
print(run(1))
"""
    assert python(script, path, OMP_NUM_THREADS="3") == ["0", "{0}", "right"]


@pytest.mark.slow
@pytest.mark.unsanitized
def test_a_fork_beside_calls_and_loads_of_a_compiled_model(compiled_values: Callable[[str, str], pathlib.Path]) -> None:
    script = """
import sys
sys.path.insert(0, sys.argv[3])
from test_values import arguments
values = list(arguments(40_000).values())
method = program[program.methods[0]]
want = method(*values)["bag"]
over = threading.Event()
def call():
    while not over.is_set():
        method(*values)
def load():
    while not over.is_set():
        with untorch.load(sys.argv[1]) as other:
            other[other.methods[0]](*values)
threads = [threading.Thread(target=target) for target in (call, call, load)]
[thread.start() for thread in threads]
for i in range(12):
    time.sleep(0.02 * (i % 3))
    pid = os.fork()
    if pid == 0:
        right = np.array_equal(method(*values)["bag"], want)
        with untorch.load(sys.argv[1]) as other:
            right = right and np.array_equal(other[other.methods[0]](*values)["bag"], want)
        os._exit(0 if right else 1)
    end = time.monotonic() + 20
    while time.monotonic() < end and (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        time.sleep(0.005)
    print(done[1] if done != (0, 0) else "hangs")
    if done == (0, 0):
        os.kill(pid, 9)
over.set()
[thread.join() for thread in threads]
"""
    path = compiled_values("own", "dynamic")
    assert python(script, path, None, str(HERE), OMP_NUM_THREADS="3") == ["0"] * 12
