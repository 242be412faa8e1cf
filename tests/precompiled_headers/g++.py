#!/usr/bin/env python3
"""g++ for the tests: precompiles the headers of the code that AOTInductor generates.

Headers take most of the time of a small model. Inductor's own precompiled headers are keyed by the command line, which
names export's temporary folder. Here the key is what decides the headers' meaning: the compiler, the flags that are not
paths of this call, and the include directives that open the file. The object files are the same, byte by byte.

UNTORCH_TEST_CXX: the real compiler. UNTORCH_TEST_HEADERS: the folder of the precompiled headers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys

LIMIT = 12  # of 150 MB each


def includes(source: str) -> list[str]:
    """The include directives before the first line of code."""
    found = []
    with open(source) as file:
        for line in file:
            if line.startswith("#include <"):
                found.append(line)
            elif line.strip() and not line.startswith("//"):
                break
    return found


def shared_flags(arguments: list[str], source: str) -> list[str]:
    """The arguments without the source, the object file, and the names of the source's folder."""
    skipped = {source, "-c"}
    if "-o" in arguments:
        skipped |= {"-o", arguments[arguments.index("-o") + 1]}
    own = f"-ffile-prefix-map={os.path.dirname(source)}/="
    return [argument for argument in arguments if argument not in skipped and argument != own]


def precompiled(compiler: str, arguments: list[str], source: str, folder: str) -> str | None:
    """The header to include first. None for flags that are seen for the first time, as one file does not pay."""
    directives, flags = includes(source), shared_flags(arguments, source)
    if not directives:
        return None
    # g++ does not look whether the headers changed meanwhile.
    folders = [flag[2:] for flag in flags if flag.startswith("-I") and os.path.exists(flag[2:])]
    places = [os.path.realpath(compiler), *folders]
    times = [str(os.stat(place).st_mtime_ns) for place in places]
    key = hashlib.sha256("\0".join([*places, *times, *flags, *directives]).encode()).hexdigest()[:16]
    header = os.path.join(folder, f"{key}.h")
    output = f"{header}.gch"
    if os.path.exists(output):
        return header
    os.makedirs(folder, exist_ok=True)
    if not os.path.exists(header):
        with open(f"{header}.{os.getpid()}", "w") as file:
            file.writelines(directives)
        os.replace(file.name, header)
        return None
    if sum(name.endswith(".gch") for name in os.listdir(folder)) >= LIMIT:
        return None
    with open(f"{header}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        part = f"{output}.part"
        command = [compiler, *flags, "-w", "-x", "c++-header", header, "-o", part]
        if not os.path.exists(output):
            if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode:
                return None
            os.replace(part, output)
    return header


def main() -> None:
    """Runs the real compiler in this process's place."""
    compiler, arguments = os.environ["UNTORCH_TEST_CXX"], sys.argv[1:]
    sources = [item for item in arguments if item.endswith((".wrapper.cpp", ".kernel.cpp"))]
    if len(sources) == 1 and "-c" in arguments and "-include" not in arguments:
        header = precompiled(compiler, arguments, sources[0], os.environ["UNTORCH_TEST_HEADERS"])
        if header is not None:
            arguments = ["-include", header, *arguments]
    os.execv(compiler, [compiler, *arguments])


if __name__ == "__main__":
    main()
