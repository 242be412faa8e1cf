"""Fuzzes the run half of the Python package: whole files through ``inspect`` and ``load``, and lists of operators.

    python fuzz/packages.py KIND [--seconds T] [--runs N] [--seed S] [--artifacts FOLDER] [--package FILE]... [FILE]...

KIND says what is mutated:

    raw         any byte of a package
    checksums   any byte but those of libraries; checksums and digests are put right
    manifest    values of the manifest, as JSON; checksums are put right
    signature   the call specification that the library of a package gives
    operators   the list of operators for the proxy executor, as text and as JSON

``inspect`` and ``load`` must agree on every file: what ``load`` refuses, ``inspect`` refuses; what ``inspect`` refuses,
``load`` refuses or does not open; and they see the same methods. Only untorch's errors come out. No mutant ends the
process, takes more than a second of CPU time, or 256 MB. Mutants are opened in forked children of a process that has
untorch imported, many in each child; the parent only counts. FILEs are opened first, alone if nothing else is asked.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import pathlib
import platform
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tests" / "attacks"))

import craft  # noqa: E402

KINDS = ("raw", "checksums", "manifest", "signature", "operators")
BATCH = 100
CPU_SECONDS, MAX_BYTES, HANG_SECONDS = 1.0, 256 << 20, 120.0
SPECIFICATION = 2048  # bytes that the library of `signature` has for each of its two specifications

NUMBERS = (0, 1, 2, 7, 8, 16, 63, 127, 128, 255, 256, 4095, 32767, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
           1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 16, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 64, -(1 << 63), 1e308, 0.5, "", "x", "cpu",
    "cuda", "cuda:7", "float32", "bool", "../x", "data/weights/weight_0", "\x1b[2J", "\u202e", "\ud800", "é" * 300,
    [], {}, [0], [4, 4], [[[]]], {"symbol": "s0"}, {"expr": "s0*2", "rpn": ["s0", 2, "*"]}, "x" * 5000,
)  # fmt: skip
WORDS = (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08", b"\x7fELF",
         b"\x01\x00\x10\x00", b"FB", b"\x00\x08", b"\x08\x00", b"extra/untorch.json", b"../", b"\xff\xfe")  # fmt: skip


# -- mutants ----------------------------------------------------------------------------------------------------------


def library_extents(data: bytes) -> list[tuple[int, int]]:
    """Where the bytes of libraries lie in a sound archive."""
    return [(entry[1], entry[1] + entry[2]) for entry in entries_of(data) if entry[0].endswith(".so")]


def entries_of(data: bytes) -> list[tuple[str, int, int, int, int]]:
    """Name, offset of the bytes, size, offset of the directory's header, offset of the local one; as far as they go."""
    found: list[tuple[str, int, int, int, int]] = []
    end = data.rfind(craft.END)
    if end < 0 or end + 22 > len(data):
        return found
    (at,) = struct.unpack_from("<I", data, end + 16)
    while at + 46 <= end and data[at : at + 4] == craft.CENTRAL:
        size, name, extra, comment = struct.unpack_from("<IHHH", data, at + 24)
        (local,) = struct.unpack_from("<I", data, at + 42)
        if local + 30 <= end:
            start = local + 30 + sum(struct.unpack_from("<HH", data, local + 26))
            if start + size <= end:
                found.append((data[at + 46 : at + 46 + name].decode("latin-1"), start, size, at, local))
        at += 46 + name + extra + comment
    return found


def mutate_bytes(rng: random.Random, data: bytes, avoid: list[tuple[int, int]], rare: list[tuple[int, int]]) -> bytes:
    """One to eight changes. Nothing in ``avoid`` is changed, and no byte of it moves against the file's start."""
    out = bytearray(data)
    behind = max((end for _, end in avoid), default=0)  # only there bytes may be inserted or removed
    for _ in range(1 << rng.randrange(4)):
        at = rng.randrange(len(out))
        for _ in range(20):
            inside = [pair for pair in (*avoid, *rare) if pair[0] - 8 < at < pair[1]]
            if not inside or (inside[0] in rare and rng.random() < 0.02):
                break
            at = rng.randrange(len(out))
        else:
            continue
        room = min([start - at for start, _ in avoid if start > at] + [len(out) - at, 64])
        change = rng.randrange(7)
        new = b""
        if change == 0:
            new = bytes([out[at] ^ 1 << rng.randrange(8)])
        elif change == 1:
            new = rng.randbytes(1)
        elif change == 2:
            new = (rng.choice(NUMBERS) + rng.randrange(-1, 2) & (1 << 64) - 1).to_bytes(8, "little")
            new = new[: rng.choice((1, 2, 4, 8))]
        elif change == 3:
            new = rng.choice(WORDS)
        elif change == 4:
            width = min(rng.choice((1, 2, 4)), len(out) - at)
            number = int.from_bytes(out[at : at + width], "little") + rng.randrange(-32, 33)
            new = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif change == 5:
            source = rng.randrange(len(out))
            new = bytes(out[source : source + rng.randrange(1, 64)])
        elif at >= behind:
            cut = rng.randrange(1, 40)
            out[at : at + cut] = rng.randbytes(rng.randrange(40)) if rng.random() < 0.5 else b""
            if not out:
                out += b"\0"
            continue
        new = new[:room]
        out[at : at + len(new)] = new
    if rng.random() < 0.02 and not avoid:
        del out[rng.randrange(len(out)) :]
    return bytes(out) or b"\0"


def copied(value: Any) -> Any:
    """An independent copy of a JSON value."""
    return json.loads(json.dumps(value))


def mutate_json(rng: random.Random, document: Any) -> Any:
    """A copy with one to four values replaced, removed, repeated, or exchanged."""
    document = copied(document)
    for _ in range(rng.randrange(1, 5)):
        places: list[tuple[Any, Any]] = []
        stack = [document]
        while stack:
            node = stack.pop()
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                if isinstance(node[key], dict | list):
                    stack.append(node[key])
        if not places:
            break
        node, key = rng.choice(places)
        change = rng.randrange(6)
        if change <= 1:
            node[key] = copied(rng.choice(VALUES))
        elif change == 2 and isinstance(node[key], int):
            node[key] += rng.randrange(-3, 4)
        elif change == 2 and isinstance(node[key], str):
            text = node[key]
            at = rng.randrange(len(text) + 1)
            node[key] = text[:at] + rng.choice(("", "x", "\n", "0", "\x7f", "/", " ")) + text[at + rng.randrange(2) :]
        elif change == 3:
            del node[key]
        elif change == 4:
            other, its = rng.choice(places)
            with contextlib.suppress(LookupError, TypeError):
                node[key] = copied(other[its])
        elif isinstance(node, list):
            node += [copied(node[key]) for _ in range(rng.randrange(1, 20))]
        else:
            node[str(key) + rng.choice("x0 ")] = copied(node[key])
    return document


def digests_of(manifest: Any, entries: dict[str, bytes]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """The manifest's tables of digests: a table, a name in it, and the right digests of that entry's bytes."""
    digests = manifest.get("digests") if isinstance(manifest, dict) else None
    if not isinstance(digests, dict):
        return
    block = digests.get("block_bytes")
    for kind in ("entries", "blocks"):
        table = digests.get(kind)
        for name in list(table) if isinstance(table, dict) else ():
            data = entries.get(name)
            if data is None or not isinstance(table[name], str):
                continue
            step = block if kind == "blocks" and isinstance(block, int) and block >= 4096 else max(len(data), 1)
            parts = [data[at : at + step] for at in range(0, max(len(data), 1), step)]
            yield table, name, "".join(hashlib.sha256(part).hexdigest() for part in parts)


def fix_digests(data: bytes) -> bytes:
    """The archive with the digests of its entries put right in the manifest, where those have the right length."""
    contents = {name.partition("/")[2]: (start, start + size) for name, start, size, *_ in entries_of(data)}
    place = contents.get("extra/untorch.json")
    if place is None:
        return data
    text = data[place[0] : place[1]]
    with contextlib.suppress(ValueError, RecursionError):
        entries = {name: data[start:end] for name, (start, end) in contents.items()}
        for table, name, right in digests_of(json.loads(text), entries):
            if len(table[name]) == len(right):
                text = text.replace(table[name].encode(errors="replace"), right.encode())
    # An equal length keeps everything else in its place.
    return data[: place[0]] + text + data[place[1] :] if len(text) == place[1] - place[0] else data


def fix_checksums(data: bytes) -> bytes:
    """The archive with the CRC-32 of each entry that lies in the file in both of its headers."""
    out = bytearray(data)
    for _, start, size, central, local in entries_of(data):
        crc = zlib.crc32(out[start : start + size])
        struct.pack_into("<I", out, central + 16, crc)
        if struct.unpack_from("<I", out, local + 14)[0] != 0:
            struct.pack_into("<I", out, local + 14, crc)
    return bytes(out)


def with_manifest(data: bytes, text: bytes) -> bytes:
    """The package with another manifest; written anew."""
    entries = []
    for name, start, size, *_ in entries_of(data):
        inner = name.partition("/")[2]
        contents = text if inner == "extra/untorch.json" else data[start : start + size]
        entries.append(craft.Lie(name, contents))
    return craft.zip_bytes(entries)


def manifest_of(data: bytes) -> Any:
    """The parsed manifest; None for a stock package."""
    for name, start, size, *_ in entries_of(data):
        if name.endswith("/extra/untorch.json"):
            return json.loads(data[start : start + size])
    return None


class Corpus:
    """Sound packages, and mutants of them by number."""

    def __init__(self, kind: str, packages: list[bytes], seed: int) -> None:
        self.kind, self.packages, self.seed = kind, packages, seed
        self.libraries = [library_extents(data) for data in packages]
        self.manifests = [manifest_of(data) for data in packages]
        self.contents = [
            {name.partition("/")[2]: data[start : start + size] for name, start, size, *_ in entries_of(data)}
            for data in packages
        ]
        texts = sorted((ROOT / "tests" / "unit" / "data").glob("extern_nodes_*.json"))
        self.operators = [path.read_bytes() for path in texts]

    def mutant(self, number: int) -> bytes:
        """The same bytes for the same seed and number."""
        rng = random.Random(f"{self.kind} {self.seed} {number}")
        if self.kind == "operators":
            text = rng.choice(self.operators)
            if rng.random() < 0.3:
                return mutate_bytes(rng, text, [], [])
            return json.dumps(mutate_json(rng, json.loads(text))).encode()
        which = rng.randrange(len(self.packages))
        data = self.packages[which]
        if self.kind == "raw":
            return mutate_bytes(rng, data, [], self.libraries[which])
        if self.kind == "checksums":
            return fix_checksums(fix_digests(mutate_bytes(rng, data, self.libraries[which], [])))
        if self.kind == "manifest":
            document = mutate_json(rng, self.manifests[which])
            if rng.random() < 0.8:
                for table, name, right in digests_of(document, self.contents[which]):
                    table[name] = right
            text = json.dumps(document).encode()
            if rng.random() < 0.1:
                text = mutate_bytes(rng, text, [], [])
            return with_manifest(data, text)
        return self.signature(rng, data)

    def signature(self, rng: random.Random, data: bytes) -> bytes:
        """A package whose library gives another call specification; the places for the two are marked by their size."""
        out = bytearray(data)
        for mark in (b"[1, {in", b"[1, {out"):
            at = data.find(mark)
            specification = json.loads(rng.choice(SPECIFICATIONS))
            if rng.random() < 0.8:
                specification = mutate_json(rng, specification)
            text = json.dumps(specification).encode()
            if rng.random() < 0.1:
                text = mutate_bytes(rng, text, [], []).replace(b"\0", b" ")
            out[at : at + SPECIFICATION - 1] = text[: SPECIFICATION - 1].ljust(SPECIFICATION - 1)
        return fix_checksums(fix_digests(bytes(out)))


def _node(kind: str | None, context: Any, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": json.dumps(context), "children_spec": list(children)}


_LEAF = {"type": None, "context": None, "children_spec": []}
_NAMED = {"class_name": "a.B", "fields": ["f", "g"]}
_TREES = [
    _LEAF,
    _node("builtins.tuple", None, _LEAF, _node("builtins.list", None, _LEAF)),
    _node("builtins.dict", ["a", "b"], _LEAF, _LEAF),
    _node("collections.OrderedDict", ["a", 1], _LEAF, _LEAF),
    _node("collections.defaultdict", {"dict_context": ["a"], "default_factory": "list"}, _LEAF),
    _node("collections.deque", 3, _LEAF, _LEAF),
    _node("collections.namedtuple", _NAMED, _LEAF, _LEAF),
    _node("my.Class", ["x", "y"], _LEAF, _LEAF),
]
SPECIFICATIONS = [
    json.dumps([1, tree])
    for part in _TREES
    for tree in (part, _node("builtins.tuple", None, _node("builtins.tuple", None, part), _node("builtins.dict", [])))
]


# -- what is looked at ------------------------------------------------------------------------------------------------


def attempt(what: Callable[[], Any]) -> tuple[Any, str | None, str | None]:
    """The result, the refusal, or the finding."""
    import untorch

    try:
        return what(), None, None
    except untorch.OutOfMemoryError as error:
        return None, None, f"{type(error).__name__}: {error}"
    except untorch.UntorchError as error:
        return None, f"{type(error).__name__}: {error}", None
    except Exception as error:
        return None, None, f"{type(error).__name__}: {error}"


def open_package(path: str) -> tuple[list[str], str | None]:
    """The names of a package's methods, and why one of them does not open."""
    import untorch

    with untorch.load(path) as program:
        names = sorted(program)
        for name in names:
            try:
                program[name].open()
            except untorch.OutOfMemoryError:
                raise
            except untorch.UntorchError as error:
                return names, str(error)
    return names, None


def look(kind: str, data: bytes, path: str) -> str | None:
    """What is wrong with how a file is treated; None if nothing is."""
    if kind == "operators":
        from untorch.runtime.proxy import parse_extern_nodes

        return attempt(lambda: parse_extern_nodes(data))[2]
    from untorch.cli.package import describe_package

    with open(path, "wb") as file:
        file.write(data)
    described, refused, finding = attempt(lambda: describe_package(path))
    if finding is not None:
        return f"inspect: {finding}"
    _, _, finding = attempt(lambda: describe_package(path, checksums=True))
    if finding is not None:
        return f"inspect with checksums: {finding}"
    opened, not_loaded, finding = attempt(lambda: open_package(path))
    if finding is not None:
        return f"load: {finding}"
    runs = described is None or all(method["runs_here"] for method in described["methods"])
    if not_loaded is not None and refused is None and (runs or not not_loaded.startswith("UnsupportedError")):
        return f"disagreement: inspect accepts what load refuses: {not_loaded}"
    if refused is not None and opened is not None and opened[1] is None:
        return f"disagreement: load opens what inspect refuses: {refused}"
    if described is not None and opened is not None:
        named = sorted(method["name"] for method in described["methods"])
        if named != opened[0]:
            return f"disagreement: inspect names the methods {named}, load {opened[0]}"
    return None


# -- processes --------------------------------------------------------------------------------------------------------


def resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(corpus: Corpus, first: int, count: int, path: str, place: mmap.mmap, report: int) -> None:
    """Opens mutants; writes the number of the one that it is at, and a line of JSON for each finding."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    if os.environ.get("UNTORCH_PROBE_LIMIT", "1") == "1":
        limit = mapped + 2 * MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resident_peak()
    for number in range(first, first + count):
        place[:8] = struct.pack("<Q", number)
        data = corpus.mutant(number)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        finding = look(corpus.kind, data, path)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if finding is None and resident_peak() - before > MAX_BYTES:
            finding = f"memory: {(resident_peak() - before) >> 20} MB"
            before = resident_peak()
        if finding is not None:
            os.write(report, json.dumps({"number": number, "finding": finding}).encode() + b"\n")


def run_batch(corpus: Corpus, first: int, count: int, path: str, place: mmap.mmap) -> tuple[int, list[tuple[int, str]]]:
    """How many mutants of the batch were opened, and findings by number."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            child(corpus, first, count, path, place, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    text, deadline, hung = b"", time.monotonic() + HANG_SECONDS, False
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            hung = True
            os.kill(pid, signal.SIGKILL)
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        text += part
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    found = [(entry["number"], entry["finding"]) for entry in map(json.loads, text.splitlines())]
    if status == 0:
        return count, found
    (last,) = struct.unpack("<Q", place[:8])
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if hung:
        what = f"hang: {HANG_SECONDS:.0f} s"
    elif number == signal.SIGPROF:
        what = f"hang: more than {CPU_SECONDS:.0f} s of CPU time"
    else:
        what = f"crash: {signal.Signals(number).name}" if number else f"crash: exit status {os.WEXITSTATUS(status)}"
    return last - first + 1, [*found, (last, what)]


# -- packages ---------------------------------------------------------------------------------------------------------


def compile_library(directory: pathlib.Path, name: str, *flags: str) -> bytes:
    """The library of tests/attacks/model.c, bound to libuntorch.so."""
    import untorch._core

    beside = pathlib.Path(untorch._core.__file__)
    folders = [beside.parent, beside.resolve().parent, beside.resolve().parents[1]]
    folder = next(path for path in folders if (path / "libuntorch.so").exists())
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("packages.py needs a C compiler")
    target = directory / name
    source = ROOT / "tests" / "attacks" / "model.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-s", str(source), "-o", str(target), f"-L{folder}", "-luntorch",
         "-Wl,--allow-shlib-undefined", *flags],
        check=True,
    )  # fmt: skip
    return target.read_bytes()


def crafted(kind: str, directory: pathlib.Path) -> list[bytes]:
    """Small packages without PyTorch: a true one, or one with room for call specifications."""
    manifest = craft.manifest(platform.machine())
    if kind == "signature":
        library = compile_library(directory, "signature.so", f"-DSPECIFICATION={SPECIFICATION}")
    else:
        library = compile_library(directory, "model.so")
    return [craft.Package(library, manifest).bytes()]


def main() -> None:
    """Run; the last line counts. The exit status is 1 after a finding."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--artifacts", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--package", type=pathlib.Path, action="append", default=[])
    options = parser.parse_args()
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")

    # Before the fork, so that no child does it.
    import numpy  # noqa: F401

    import untorch.cli.package
    import untorch.runtime.proxy  # noqa: F401

    memory = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        directory = pathlib.Path(folder)
        packages = [] if options.kind == "operators" else crafted(options.kind, directory)
        if options.kind in ("raw", "checksums", "manifest"):
            packages += [path.read_bytes() for path in options.package]
        corpus = Corpus(options.kind, packages, options.seed)
        path, place = str(directory / "mutant.pt2"), mmap.mmap(-1, 8)
        if options.kind != "operators":
            for data in packages:
                finding = look(options.kind, data, path) if options.kind != "signature" else None
                if finding is not None or (options.kind != "signature" and open_package(path)[1] is not None):
                    sys.exit(f"a sound package is refused: {finding}")

        failures = 0
        replay = Corpus(options.kind, packages, options.seed)
        replay.mutant = lambda number: options.files[number].read_bytes()  # type: ignore[method-assign]
        for number, file in enumerate(options.files):
            for _, finding in run_batch(replay, number, 1, path, place)[1]:
                failures += 1
                print(f"{options.kind}: {finding}\nreproducer: {file}", flush=True)

        start, count, distinct = time.monotonic(), 0, set()
        while (options.runs and count < options.runs) or time.monotonic() - start < options.seconds:
            done, found = run_batch(corpus, count, BATCH, path, place)
            count += done
            for number, finding in found:
                failures += 1
                data = corpus.mutant(number)
                kept = options.artifacts / f"{options.kind}-{hashlib.sha256(data).hexdigest()[:16]}"
                # The numbers in a text do not make it another finding.
                form = "".join(c for c in finding.replace(path, "") if not c.isdigit())[:80]
                if form not in distinct and len(distinct) < 20:
                    distinct.add(form)
                    kept.write_bytes(data)
                    print(f"{options.kind}, mutant {number}: {finding}\nreproducer: {kept}", flush=True)
        seconds = time.monotonic() - start
        print(f"inputs {count + len(options.files)} seconds {seconds:.1f} findings {failures}", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
