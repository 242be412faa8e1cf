"""Builds the fuzz targets and runs all of them: ``fuzz/run.py --minutes 10`` (wall time for all together).

Two run at a time. A line for each says how many inputs, how fast, and what was found; the exit status is 1 if anything
was. ``--only NAME`` runs one; ``--runs N`` runs each for N inputs instead; ``--plain`` takes our driver where libFuzzer
is there, too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "fuzz"
# The kinds of packages.py, under names of their own: one of them is "manifest", as a native target is.
PYTHON_KINDS = {f"py-{kind}": kind for kind in ("raw", "checksums", "manifest", "signature", "operators")}
AT_A_TIME = 2
MAX_BYTES = 65536

# Leaks are findings; a failed allocation is an error of untorch's, no finding. Freed memory is kept for a while so that
# its use is seen, but not so much that it counts against the limit.
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=1:handle_abort=1:allocator_may_return_null=1:quarantine_size_mb=16",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


@dataclass
class Result:
    """What became of one target."""

    name: str
    engine: str
    inputs: int
    seconds: float
    failed: bool
    output: str

    def __str__(self) -> str:
        rate = self.inputs / self.seconds if self.seconds else 0.0
        found = "FAILED" if self.failed else "no crash"
        return f"{self.name:<14} {self.engine:<10} {self.inputs:>10,} inputs {rate:>9,.0f}/s  {found}"


def clang_with_libfuzzer() -> str | None:
    """The clang++ that makes libFuzzer executables, if there is one."""
    for name in (os.environ.get("CXX", "c++"), "clang++", *(f"clang++-{version}" for version in range(30, 13, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        source = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
        command = [path, "-fsanitize=fuzzer,address,undefined", "-x", "c++", "-", "-o", os.devnull]
        if subprocess.run(command, input=source.encode(), capture_output=True, check=False).returncode == 0:
            return path
    return None


def build(plain: bool) -> tuple[pathlib.Path, str]:
    """Build all native targets; where they are, and which engine runs them."""
    clang = None if plain else clang_with_libfuzzer()
    folder = BUILD / ("libfuzzer" if clang else "plain")
    environment = dict(os.environ)
    # cmake and ninja may have come with the interpreter's environment.
    environment["PATH"] = f"{pathlib.Path(sys.executable).parent}:{environment['PATH']}"
    if clang:
        environment["CXX"] = clang
    cmake = shutil.which("cmake", path=environment["PATH"])
    assert cmake is not None, "needs cmake"
    configure = [cmake, "-S", str(HERE), "-B", str(folder), "-G", "Ninja"]
    subprocess.run(configure, env=environment, check=True, stdout=subprocess.DEVNULL)
    made = subprocess.run([cmake, "--build", str(folder)], env=environment, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        sys.exit(f"the fuzz targets do not build:\n{made.stdout[-4000:]}{made.stderr[-4000:]}")
    return folder, "libFuzzer" if clang else "driver"


def seeds(name: str) -> list[str]:
    """Corpus and regressions of a target; folders that exist."""
    return [str(path) for path in (HERE / "corpus" / name, HERE / "regressions" / name) if path.is_dir()]


def run_native(name: str, folder: pathlib.Path, engine: str, seconds: float, runs: int, seed: int) -> Result:
    """One native target."""
    artifacts = BUILD / "artifacts" / name
    artifacts.mkdir(parents=True, exist_ok=True)
    dictionary = HERE / "dictionaries" / f"{name}.dict"
    if engine == "libFuzzer":
        grown = BUILD / "corpus" / name  # what an earlier run found is the start of the next one
        grown.mkdir(parents=True, exist_ok=True)
        command = [
            str(folder / name), str(grown), *seeds(name), f"-artifact_prefix={artifacts}/", f"-max_len={MAX_BYTES}",
            f"-seed={seed}", "-print_final_stats=1", "-timeout=60", "-rss_limit_mb=1024", "-malloc_limit_mb=256",
            *([f"-dict={dictionary}"] if dictionary.exists() else []),
            f"-runs={runs}" if runs else f"-max_total_time={max(1, round(seconds))}",
        ]  # fmt: skip
        pattern = r"stat::number_of_executed_units: *(\d+)"
    else:
        command = [
            str(folder / name), *seeds(name), "--artifacts", str(artifacts), "--max-bytes", str(MAX_BYTES),
            "--seed", str(seed), *(["--dictionary", str(dictionary)] if dictionary.exists() else []),
            *(["--runs", str(runs)] if runs else ["--seconds", str(seconds)]),
        ]  # fmt: skip
        pattern = r"^inputs (\d+)"
    return run_command(name, engine, command, pattern, {**os.environ, **SANITIZERS})


def run_python(kind: str, packages: list[str], seconds: float, runs: int, seed: int) -> Result:
    """One kind of packages.py."""
    artifacts = BUILD / "artifacts" / "packages"
    artifacts.mkdir(parents=True, exist_ok=True)
    old = sorted(str(path) for path in (HERE / "regressions" / "packages").glob(f"{kind}-*"))
    command = [
        sys.executable, str(HERE / "packages.py"), kind, *old, "--artifacts", str(artifacts), "--seed", str(seed),
        *(argument for package in packages for argument in ("--package", package)),
        *(["--runs", str(runs)] if runs else ["--seconds", str(seconds)]),
    ]  # fmt: skip
    return run_command(f"py-{kind}", "forks", command, r"^inputs (\d+)", dict(os.environ))


def run_command(name: str, engine: str, command: list[str], pattern: str, environment: dict[str, str]) -> Result:
    """A target's process."""
    start = time.monotonic()
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        check=False,
    )  # fmt: skip
    seconds = time.monotonic() - start
    inputs = re.findall(pattern, process.stdout, re.MULTILINE)
    failed = process.returncode != 0 or not inputs
    return Result(name, engine, int(inputs[-1]) if inputs else 0, seconds, failed, process.stdout)


def real_package() -> list[str]:
    """A small package that AOTInductor compiled, where PyTorch is; made once."""
    path = BUILD / "forms.pt2"
    models = ROOT / "tests" / "unit" / "models.py"
    if not path.exists():
        part = path.with_suffix(".part.pt2")
        made = subprocess.run([sys.executable, str(models), "forms", str(part)], capture_output=True, check=False)
        if made.returncode != 0:
            print("no real package, as PyTorch is not here: crafted ones alone", flush=True)
            return []
        part.replace(path)
    return [str(path)]


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    native = sorted(path.stem for path in (HERE / "targets").glob("*.cpp"))
    names = [*native, *PYTHON_KINDS]
    if unknown := [name for name in options.only if name not in names]:
        sys.exit(f"unknown targets: {', '.join(unknown)}; there are: {', '.join(names)}")
    wanted = [name for name in names if name in options.only or not options.only]
    BUILD.mkdir(parents=True, exist_ok=True)
    folder, engine = build(options.plain) if set(wanted) & set(native) else (BUILD, "")
    packages = real_package() if set(wanted) & set(PYTHON_KINDS) else []
    seconds = 60 * options.minutes * min(AT_A_TIME, len(wanted)) / len(wanted)
    failed = []
    print(f"fuzz: seed {options.seed}", flush=True)

    def run(name: str) -> Result:
        if name in native:
            return run_native(name, folder, engine, seconds, options.runs, options.seed)
        return run_python(PYTHON_KINDS[name], packages, seconds, options.runs, options.seed)

    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        for future in concurrent.futures.as_completed([pool.submit(run, name) for name in wanted]):
            result = future.result()
            print(f"fuzz: {result}", flush=True)
            if result.failed:
                failed.append(result)
    for result in failed:
        print(f"\n{result.name}:\n{result.output[-6000:]}")
        paths = re.findall(r"(?:reproducer:|Test unit written to) *(\S+)", result.output)
        print("\n".join(f"reproducer: {path}" for path in paths))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
