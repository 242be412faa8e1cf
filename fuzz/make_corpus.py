"""Makes fuzz/corpus of real packages, cut down to a few KB each: ``make_corpus.py PACKAGE.pt2...``.

The packages of ``tests/unit/models.py`` (own, cache, forms, stock_tree, stock_linear, stock_dynamic) make what is in
the repository; their libraries are replaced by small ones that are compiled here.
"""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
WEIGHT_BYTES, WEIGHTS = 128, 8  # as targets/manifest.cpp has them
LIBRARY, NODES = "data/aotinductor/m/model.so", "data/aotinductor/m/model.json"
CONTENTS = {
    "archive_format": b"pt2",
    LIBRARY: b"library",
    NODES: b'{"nodes": []}',
    **{f"data/weights/weight_{i}": b"w" * WEIGHT_BYTES for i in range(WEIGHTS)},
}

CODE = r"""
extern "C" {
int aoti_torch_get_numel(void*, long*);
int cudaGetDevice(int*);
int cuModuleLoad(void**, const char*);
__attribute__((visibility("hidden"))) void* __dso_handle = nullptr;
#define API __attribute__((visibility("default"))) int
static thread_local int calls = 3;
static int (*const table[])(int*) = {cudaGetDevice};
__attribute__((constructor)) static void on_open() { ++calls; }
__attribute__((destructor)) static void on_close() { --calls; }
API AOTInductorModelContainerCreateWithDevice(void** handle) { return *handle = &calls, 0; }
API AOTInductorModelContainerDelete(void*) { return 0; }
API AOTInductorModelContainerRun(void* x) { long n = 0; return aoti_torch_get_numel(x, &n) + table[0](&calls); }
API AOTInductorModelContainerGetNumInputs(void*, unsigned long* n) { return *n = 1, 0; }
API AOTInductorModelContainerGetNumOutputs(void* m, unsigned long* n) { return *n = 1, cuModuleLoad(&m, "x"); }
API AOTInductorModelContainerGetCallSpec(void*, const char** in, const char** out) { return *in = *out = "[1]", 0; }
}
#ifdef OPENMP
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
extern "C" __attribute__((visibility("default"))) void parallel(void (*part)(void*)) { GOMP_parallel(part, 0, 0, 0); }
#endif
struct Error { ~Error(); };
Error::~Error() { ++calls; }
template <class T> inline T& shared() { static T value; return value; }
extern "C" __attribute__((visibility("default"))) void* unique() { return &shared<Error>(); }
"""


def shrink(data: bytes, keep: dict[str, bytes]) -> bytes:
    """The archive with other contents of its entries, everything else as it was: paddings, descriptors, zip64 fields.

    What ``keep`` does not name is cut to 16 bytes.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
    out, central = bytearray(), bytearray()
    at = archive.start_dir
    for info in infos:
        start = info.header_offset
        name, extra = struct.unpack_from("<HH", data, start + 26)
        contents = start + 30 + name + extra
        key = info.filename.partition("/")[2]
        new = keep.get(key, data[contents : contents + min(info.file_size, 16)])
        crc, offset = zlib.crc32(new), len(out)
        header = bytearray(data[start:contents])
        if struct.unpack_from("<I", header, 18)[0] != 0:
            struct.pack_into("<III", header, 14, crc, len(new), len(new))
        out += header + new
        if info.flag_bits & 8:
            signature = data[contents + info.file_size :][:4] == b"PK\x07\x08"
            out += (b"PK\x07\x08" if signature else b"") + struct.pack("<III", crc, len(new), len(new))
        sizes = struct.unpack_from("<HHH", data, at + 28)
        record = bytearray(data[at : at + 46 + sum(sizes)])
        struct.pack_into("<III", record, 16, crc, len(new), len(new))
        struct.pack_into("<I", record, 42, offset)
        central += record
        at += len(record)
    start = len(out)
    # PyTorch writes the zip64 records always.
    tail = bytearray(data[at:])
    for record in (b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"):
        place = tail.find(record)
        if place < 0:
            continue
        if record == b"PK\x06\x06":
            struct.pack_into("<QQ", tail, place + 40, len(central), start)
        elif record == b"PK\x06\x07":
            struct.pack_into("<Q", tail, place + 8, start + len(central))
        else:
            struct.pack_into("<II", tail, place + 12, len(central), start)
    return bytes(out + central + tail)


def small_manifest(text: bytes) -> tuple[bytes, dict[str, bytes]]:
    """A manifest with at most two methods and WEIGHTS small weights, and what its files are cut to."""
    manifest: dict[str, Any] = json.loads(text)
    manifest["methods"] = dict(list(manifest["methods"].items())[:2])
    kept = {weight["file"]: b"w" * min(weight["nbytes"], WEIGHT_BYTES) for weight in manifest["weights"]}
    for weight in manifest["weights"]:
        weight["nbytes"] = min(weight["nbytes"], WEIGHT_BYTES)
    for method in manifest["methods"].values():
        for key in ("options", "operators"):
            method.pop(key, None)
    return json.dumps(manifest).encode(), kept


def renamed(text: bytes) -> bytes:
    """The manifest with the file names that the target manifest has."""
    manifest = json.loads(text)
    for i, weight in enumerate(manifest["weights"]):
        weight["file"] = f"data/weights/weight_{i % WEIGHTS}"
    for method in manifest["methods"].values():
        for code in (method, *(method.get("variants") or ())):
            code["library"] = LIBRARY
            if code.get("extern_nodes"):
                code["extern_nodes"] = NODES
    if "digests" in manifest:
        manifest["digests"] |= digests(CONTENTS)
    return json.dumps(manifest).encode()


def digests(entries: dict[str, bytes]) -> dict[str, dict[str, str]]:
    """As a manifest has them, without blocks."""
    return {"entries": {name: hashlib.sha256(data).hexdigest() for name, data in entries.items()}, "blocks": {}}


def library(directory: pathlib.Path, *flags: str) -> bytes:
    """The code above as a stripped shared library that needs libtorch_cpu.so."""
    (directory / "code.cpp").write_text(CODE)
    (directory / "empty.cpp").write_text("")
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "needs a C++ compiler"
    common = [compiler, "-shared", "-fPIC", "-Os", "-nostdlib", "-fno-asynchronous-unwind-tables"]
    stub = directory / "libtorch_cpu.so"
    subprocess.run([*common, str(directory / "empty.cpp"), "-o", str(stub), "-Wl,-soname,libtorch_cpu.so"], check=True)
    target = directory / "library.so"
    subprocess.run(
        [
            *common, "-s", str(directory / "code.cpp"), "-o", str(target), "-Wl,--no-as-needed", str(stub), "-lc",
            "-Wl,-z,noseparate-code,-z,max-page-size=4096,-z,norelro,--build-id=none", *flags,
        ],
        check=True,
    )  # fmt: skip
    return target.read_bytes()


def checks_of(source: str) -> bytes:
    """What the loader reads of a stock package's source."""
    checks, _, rest = source[source.index("AOTI_NOINLINE static void check_input_0") :].partition(
        "static bool _check_aoti"
    )
    checks = "\n".join(line for line in checks.splitlines() if "<<" not in line and "throw" not in line)
    run, _, rest = rest[rest.index("void AOTInductorModel::run_impl(") :].partition("inputs.clear();")
    asserts = "\n".join(line for line in rest.splitlines() if '"input")' in line)
    return f"{checks}\n{run}inputs.clear();\n{asserts}\n".encode()


def put(target: str, name: str, data: bytes) -> None:
    """Store a seed."""
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    (CORPUS / target / name).write_bytes(data)


def main() -> None:
    """Write the corpora."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    for path in map(pathlib.Path, sys.argv[1:]):
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename.partition("/")[2]: info.filename for info in archive.infolist()}
            contents = {name: archive.read(full) for name, full in entries.items()}
        texts = {name: text for name, text in contents.items() if name.endswith(".json")}
        keep = {name: text for name, text in texts.items() if len(text) < 1000}
        manifest = texts.get("extra/untorch.json")
        if manifest is not None:
            small, weights = small_manifest(manifest)
            keep |= weights
            if b'"digests"' in small:
                document = json.loads(small)
                cut = {name: keep.get(name, contents[name][:16]) for name in contents if name != "extra/untorch.json"}
                document["digests"] |= digests(cut)
                small = json.dumps(document).encode()
            keep["extra/untorch.json"] = small
            put("manifest", path.stem, renamed(small))
            put("json", path.stem, small)
        put("zip_directory", path.stem, shrink(data, keep))
        for name, source in contents.items():
            if name.endswith(".wrapper.cpp") and manifest is None:
                put("stock_source", path.stem, checks_of(source.decode()))
    for name, text in (
        ("numbers", "[0, -1, 9223372036854775807, -9223372036854775808, 1e308, -0.5, 1.5e-3]"),
        ("strings", '{"a": "\\u00e9\\ud83d\\ude00\\n\\"", "": [true, false, null, {}]}'),
        ("nested", "[" * 60 + "]" * 60),
    ):
        put("json", name, text.encode())
    with tempfile.TemporaryDirectory() as directory:
        for name, flags in (
            ("both_hashes", ("-Wl,--hash-style=both",)),
            ("gnu_hash", ("-Wl,--hash-style=gnu", "-Wl,-z,execstack", "-Wl,-z,nodelete")),
            ("openmp", ("-Wl,--hash-style=gnu", "-DOPENMP", "-lgomp")),
            ("relr", ("-Wl,--hash-style=sysv", "-Wl,-z,pack-relative-relocs")),
        ):
            put("elf", name, library(pathlib.Path(directory), *flags))
    total = sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file())
    print(f"{total} bytes in {CORPUS}")
    if total > 200_000:
        sys.exit("the corpora are too large: keep them under 200 KB")


if __name__ == "__main__":
    main()
