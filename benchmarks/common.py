"""Shared by all benchmarks: machine, statistics, tables, result files, and contestants behind pipes."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "build" / "bench"  # packages, inputs and references; results of --quick runs

_VERSIONS = ("untorch", "numpy", "torch", "onnxruntime", "openvino", "nncf", "transformers")
_SETTLE_SECONDS = 0.05  # OpenMP and TBB threads spin for some milliseconds after a call before they block


def arguments(description: str | None, cpu_time: bool = False) -> argparse.Namespace:
    """The options that every benchmark has: --quick and --output; with ``cpu_time`` also --cpu-time."""
    parser = argparse.ArgumentParser(description=description)
    if cpu_time:
        parser.add_argument(
            "--cpu-time", action="store_true", help="CPU time of one thread, for a machine that others use"
        )
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    options = parser.parse_args()
    if options.output is None:
        options.output = WORK / "results" if options.quick else RESULTS
    return options


def describe_machine() -> dict[str, Any]:
    """CPU, cores, memory, kernel, versions, date and the load before the benchmark."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "source tree" if name == "untorch" else "not installed"
    memory = int(_field("/proc/meminfo", "MemTotal").split()[0]) * 1024
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpu_family_model": f"{_field('/proc/cpuinfo', 'cpu family')}/{_field('/proc/cpuinfo', 'model')}",
        "cores": len(os.sched_getaffinity(0)),
        "avx512": "avx512f" in _field("/proc/cpuinfo", "flags").split(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "versions": versions,
        "load_average_before": list(os.getloadavg()),
    }


def _field(path: str, name: str) -> str:
    for line in pathlib.Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def machine_line(machine: Mapping[str, Any]) -> str:
    """One sentence on the machine, for the line below a table."""
    avx512 = " with AVX-512" if machine["avx512"] else ""
    cores = f"{machine['cores']} core{'s' if machine['cores'] != 1 else ''}"
    return f"{machine['cpu']}{avx512}, {cores}, Linux {machine['kernel'].split('-')[0]}, {machine['date'][:10]}"


@dataclass(frozen=True)
class Table:
    """Cells as they are printed and as they stand in the documentation."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def text(self) -> str:
        """For a terminal."""
        widths = [max(len(row[i]) for row in (self.columns, *self.rows)) for i in range(len(self.columns))]
        lines = []
        for row in (self.columns, ["-" * width for width in widths], *self.rows):
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, *([self.note] if self.note else [])])


@dataclass
class Report:
    """A benchmark's result: raw values, and the tables made of them. ``write`` prints and stores it."""

    name: str
    quick: bool
    machine: dict[str, Any] = field(default_factory=describe_machine)
    values: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    clock: CpuClock = field(default_factory=lambda: CpuClock())
    script: str = ""  # its place in the repository, if that is not benchmarks/<name>.py

    def write(self, folder: pathlib.Path) -> pathlib.Path:
        """Prints the tables and writes ``<folder>/<name>.json``."""
        self.machine["cpu_share_of_others"] = round(self.clock.share_of_others(), 4)
        document = {
            "benchmark": self.name,
            "script": self.script or f"benchmarks/{self.name}.py",
            "quick": self.quick,
            "machine": self.machine,
            "values": self.values,
            "tables": {
                name: {"columns": list(t.columns), "rows": [list(row) for row in t.rows], "note": t.note}
                for name, t in self.tables.items()
            },
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        for name, table in self.tables.items():
            print(f"\n{name}\n{table.text()}")
        print(f"\n{machine_line(self.machine)}")
        load = self.machine["load_average_before"][0]
        share = self.machine["cpu_share_of_others"]
        if share > 0.03:
            print(f"warning: other processes used {share:.0%} of the CPU (load before: {load:.1f}): do not quote this")
        print(f"written: {path}")
        return path


class CpuClock:
    """How much of the machine's CPU time went to processes that are not ours, since it was made.

    Children count once they have been waited for, so read it after the contestants are closed.
    """

    def __init__(self) -> None:
        self._all, self._busy = self._machine()
        self._own = self._mine()

    def share_of_others(self) -> float:
        """0 on a quiet machine."""
        total, busy = self._machine()
        elapsed = max(total - self._all, 1e-9)
        return max(0.0, (busy - self._busy) - (self._mine() - self._own)) / elapsed

    @staticmethod
    def _machine() -> tuple[float, float]:
        ticks = [int(v) for v in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        seconds = [value / os.sysconf("SC_CLK_TCK") for value in ticks]
        return sum(seconds), sum(seconds) - seconds[3] - seconds[4]

    @staticmethod
    def _mine() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system


def ensure_models(*names: str) -> None:
    """Builds what is missing or outdated below build/bench, in a process of its own: this one stays without torch."""
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "models.py"), *names], check=True)


@dataclass(frozen=True)
class Contestant:
    """A runtime with a file: ``runtime`` names a function of runtimes.py, ``options`` are its keyword arguments.

    worker: the script that its process runs. python: the interpreter of that process.
    """

    key: str
    label: str
    runtime: str
    file: str
    options: Mapping[str, Any] = field(default_factory=dict)
    worker: str = "worker.py"
    python: str = sys.executable

    def request(self, threads: int | None) -> str:
        """What the worker and the cold start get as their argument."""
        path = str(WORK / self.file)
        return json.dumps({"runtime": self.runtime, "file": path, "threads": threads, "options": dict(self.options)})


def _case_file(case: str) -> str:
    return str(WORK / f"{case}.npz")


class Worker:
    """A contestant in a process of its own. Between requests it waits in a read of its pipe."""

    def __init__(self, contestant: Contestant, threads: int) -> None:
        self.contestant = contestant
        command = [contestant.python, str(ROOT / "benchmarks" / contestant.worker), contestant.request(threads)]
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self.load_seconds = float(self._answer()["load_seconds"])

    def check(self, case: str) -> float:
        """The largest absolute difference from eager's output for the case."""
        return float(self._ask(do="check", case=_case_file(case))["difference"])

    def time(self, case: str, seconds: float, inner: int = 1, cpu_time: bool = False) -> list[float]:
        """Seconds of each call (of each ``inner`` calls, divided) for about ``seconds``, after a call to warm up.

        cpu_time: the CPU time of the process, which others on the machine disturb less, in the place of the time.
        """
        request = {"case": _case_file(case), "seconds": seconds, "inner": inner, "cpu_time": cpu_time}
        return list(self._ask(do="time", **request)["times"])

    def cpu_seconds(self) -> float:
        """CPU time that all threads of the process have used so far."""
        total = 0
        for path in pathlib.Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            total += int(path.read_text().split()[0])
        return total / 1e9

    def close(self) -> None:
        """Ends the process by closing its pipe, and waits for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.contestant.label}: its process ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Workers:
    """All contestants at one thread count, measured alternately; closed as a context manager."""

    def __init__(self, contestants: Sequence[Contestant], threads: int) -> None:
        self.workers: list[Worker] = []
        self.idle_share = 0.0
        try:
            for contestant in contestants:
                self.workers.append(Worker(contestant, threads))
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for worker in self.workers:
            worker.close()

    def check(self, cases: Sequence[str], tolerance: float) -> dict[str, dict[str, float]]:
        """Differences from eager by contestant and case; a wrong result ends the benchmark."""
        differences: dict[str, dict[str, float]] = {}
        for worker in self.workers:
            key = worker.contestant.key
            differences[key] = {case: worker.check(case) for case in cases}
            for case, difference in differences[key].items():
                if not difference <= tolerance:
                    raise SystemExit(f"{worker.contestant.label}, {case}: differs from eager by {difference:.2e}")
        return differences

    def rounds(
        self, cases: Sequence[str], rounds: int, seconds: float, inner: int = 1, cpu_time: bool = False
    ) -> dict[str, dict[str, list[list[float]]]]:
        """Times by contestant, case and round. Each round visits all cases and contestants, in a rotating order.

        ``idle_share`` becomes the CPU time that idle contestants used while another one was measured, as a share of
        the measured time: it should be almost 0.
        """
        times: dict[str, dict[str, list[list[float]]]] = {
            w.contestant.key: {case: [] for case in cases} for w in self.workers
        }
        idle = measured = 0.0
        for number in range(rounds):
            for case in cases:
                shift = number % len(self.workers)
                for worker in self.workers[shift:] + self.workers[:shift]:
                    time.sleep(_SETTLE_SECONDS)
                    others = [other for other in self.workers if other is not worker]
                    before = sum(other.cpu_seconds() for other in others)
                    start = time.perf_counter()
                    times[worker.contestant.key][case].append(worker.time(case, seconds, inner, cpu_time))
                    measured += time.perf_counter() - start
                    idle += sum(other.cpu_seconds() for other in others) - before
        self.idle_share = idle / measured if measured else 0.0
        return times


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """Another process computes meanwhile, on whichever core it gets."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def summarise(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Median and best of all calls, and the range of the rounds' medians, in seconds."""
    calls = [value for values in rounds for value in values]
    medians = [statistics.median(values) for values in rounds]
    return {
        "median": statistics.median(calls),
        "best": min(calls),
        "lowest_round_median": min(medians),
        "highest_round_median": max(medians),
        "calls": float(len(calls)),
    }
