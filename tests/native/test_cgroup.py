"""The quota of a cgroup, of both versions, read from a folder that looks like /sys/fs/cgroup; what it decides."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
MAIN = """
#include <cstdio>
#include "threads/cgroup.h"
int main(int, char** arguments) {
  std::printf("%d", untorch::threads::quota_cpus(arguments[1], arguments[2], 16));
}
"""


def compiled(folder: Path, source: str) -> Path:
    """``folder``/main.cpp with a source of native/threads."""
    made = folder / "main"
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    sources = [str(folder / "main.cpp"), str(NATIVE / "threads" / source)]
    subprocess.run([*compiler, "-std=c++20", f"-I{NATIVE}", *sources, "-o", str(made)], check=True)
    return made


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cgroup")
    (folder / "main.cpp").write_text(MAIN)
    return compiled(folder, "cgroup.cpp")


V1 = "12:memory:/box\n4:cpu,cpuacct:/box/inner\n"


@pytest.mark.parametrize(
    ("files", "membership", "cpus"),
    [
        ({}, None, 16),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 16),
        ({"cpu.max": "400000 100000\n"}, "0::/\n", 4),
        ({"cpu.max": "250000 100000\n"}, "0::/\n", 3),
        ({"cpu.max": "5000 100000\n"}, None, 1),
        ({"cpu.max": "6400000 100000\n"}, None, 16),
        ({"cpu.max": "0 0\n"}, None, 16),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, "0::/a/b\n", 3),
        ({"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "300000 100000\n"}, "0::/a/b\n", 2),
        ({"cpu.max": "500000 100000\n"}, "0::/docker/0123\n", 5),
        ({"cpu.max": "500000 100000\n"}, "0::/../..\n", 5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, V1, 16),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, V1, 2),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, 2),
        (
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "700000\n", "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n"},
            V1, 7,
        ),
        ({"cpuset/cpu.cfs_quota_us": "100000\n", "cpuset/cpu.cfs_period_us": "100000\n"}, "3:cpuset:/\n", 16),
        ({"cpu.max": "nonsense"}, "0:\n\n:::\n", 16),
    ],
)  # fmt: skip
def test_quotas(files: dict[str, str], membership: str | None, cpus: int, binary: Path, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    for name, text in files.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "membership"
    if membership is not None:
        own.write_text(membership)
    result = subprocess.run([str(binary), str(mount), str(own)], capture_output=True, text=True, check=True)
    assert int(result.stdout) == cpus


def test_the_default_number_of_threads_is_the_quota(tmp_path: Path) -> None:
    """settings.cpp, with a quota that is told to it."""
    (tmp_path / "main.cpp").write_text(
        """
        #include <cstdio>
        #include "threads/cgroup.h"
        #include "threads/settings.h"
        int untorch::threads::quota_cpus(const char* mount, const char* membership, int cpus) noexcept {
          std::printf("%s %s %d\\n", mount, membership, cpus >= 1);
          return 3;
        }
        int main() {
          const untorch::threads::Settings& made = untorch::threads::settings();
          std::printf("%d %d\\n", made.cpus, made.num_threads);
        }
        """
    )
    binary = compiled(tmp_path, "settings.cpp")
    for given, threads in ((None, 3), ("5", 5)):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_") and k != "LD_PRELOAD"}
        if given is not None:
            environment["OMP_NUM_THREADS"] = given
        result = subprocess.run([str(binary)], capture_output=True, text=True, check=True, env=environment)
        assert result.stdout == f"/sys/fs/cgroup /proc/self/cgroup 1\n3 {threads}\n"
