"""Model libraries that are damaged, foreign, or no models at all."""

from __future__ import annotations

import pathlib
import random
import struct
import subprocess
from collections.abc import Callable, Iterator

import pytest
from compiler import compile_library, model_library
from craft import Package, RealPackage, dynamic_value, elf_fields, elf_sections, patched
from probe import Prober

import untorch
from untorch import _core
from untorch.runtime.unsupported import BUILT_WITHOUT_CUDA


def error_of(path: pathlib.Path, package: Package) -> str:
    """The text of the error at opening the method."""
    path.write_bytes(package.bytes())
    with untorch.load(path) as program, pytest.raises((untorch.InvalidFileError, untorch.UnsupportedError)) as caught:
        program.forward.open()
    return str(caught.value)


def with_field(package: Package, name: str, value: int) -> Package:
    """The package whose library has one field overwritten."""
    at, width = next((at, width) for field, at, width in elf_fields(package.library) if field == name)
    return Package(patched(package.library, at, width, value), package.manifest)


def values(old: int, width: int) -> Iterator[int]:
    """Values that a damaged field may have."""
    top = (1 << 8 * width) - 1
    yield from {0, 1, 2, 7, top, top - 7, top >> 1, old + 1, old - 1, old + 8, old - 8, old ^ 0x10, old * 2, old // 2}
    if width == 8:
        yield from {old + 0x1000, old - 0x1000, old ^ 0x2000, old ^ 0x8000, 1 << 32, 1 << 47, 1 << 62, 1 << 63}


@pytest.mark.slow
def test_every_header_field_may_be_damaged(package: Package, prober: Prober) -> None:
    def cases() -> Iterator[tuple[str, bytes]]:
        for name, at, width in elf_fields(package.library):
            old = int.from_bytes(package.library[at : at + width], "little")
            for value in values(old, width):
                image = patched(package.library, at, width, value)
                if image != package.library:
                    yield f"{name} = {value & ((1 << 8 * width) - 1):#x}", Package(image, package.manifest).bytes()

    # Fields that nothing looks at may have any value. What must not happen is a crash.
    assert prober.refused(cases(), allow_ok=True) == []


def test_every_prefix_of_a_library(package: Package, prober: Prober) -> None:
    n = len(package.library)
    lengths = [*range(0, 1200, 7), *range(1200, n - 64, 97), *range(n - 64, n, 3)]
    cases = ((f"{k} bytes", Package(package.library[:k], package.manifest).bytes()) for k in lengths)
    assert prober.refused(cases) == []


@pytest.mark.slow
def test_flipped_bytes_of_the_tables(package: Package, prober: Prober) -> None:
    """Hash table, symbols, names, versions and relocations: everything that the dynamic linker reads."""
    rng = random.Random(22)
    image = package.library
    start = dynamic_value(image, 0x6FFFFEF5)
    end = dynamic_value(image, 0x17) + dynamic_value(image, 2)
    cases = []
    for _ in range(1500):
        at, value = rng.randrange(start, end), rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 255))
        flipped = patched(image, at, 1, image[at] ^ value)
        cases.append((f"byte {at:#x} ^ {value:#x}", Package(flipped, package.manifest).bytes()))
    wrong = prober.refused(cases, allow_ok=True)
    # A pointer that was moved to another place of the right kind is malice, not damage: its checksum is right. Such a
    # library does something else than it should; only the dynamic linker itself must not be led astray.
    linker = [w for w in wrong if not w.split(": ", 1)[1].startswith(("crash", "ModelError", "unexpected"))]
    assert linker == []
    crashes = [w for w in wrong if ": crash" in w]
    assert len(crashes) <= len(cases) // 200, crashes


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("e_machine", 183, "was compiled for aarch64, this machine is x86_64"),
        ("e_machine", 243, "was compiled for riscv, this machine is x86_64"),
        ("e_machine", 999, "was compiled for machine 999, this machine is x86_64"),
        ("e_type", 2, "it is not a 64-bit little-endian shared object"),
        ("ei_class", 1, "it is not a 64-bit little-endian shared object"),
        ("ei_data", 2, "it is not a 64-bit little-endian shared object"),
        ("e_phnum", 0, "its program headers are damaged"),
        ("e_phnum", 60000, "its program headers are damaged"),
        ("e_phentsize", 8, "its program headers are damaged"),
        ("e_phoff", (1 << 64) - 56, "its program headers are damaged"),
        ("e_version", 2, "its ELF header is damaged"),
        ("phdr[0].filesz", 1 << 40, "a segment reaches past the end of the file"),
        ("phdr[0].align", 3, "a segment is not aligned"),
        ("phdr[1].vaddr", 0, "its segments overlap or are out of order"),
    ],
)
@pytest.mark.skipif("x86_64" not in untorch._core.cpu_architecture(), reason="names x86_64")
def test_headers_are_checked(field: str, value: int, text: str, package: Package, tmp_path: pathlib.Path) -> None:
    assert text in error_of(tmp_path / "model.pt2", with_field(package, field, value))


def test_what_is_no_library_at_all(package: Package, tmp_path: pathlib.Path) -> None:
    for image in (b"", b"\x7fELF", b"#!/bin/sh\n" * 100):
        assert "is no usable shared library: it has no ELF header" in error_of(
            tmp_path / "model.pt2", Package(image, package.manifest)
        )


def test_a_string_table_without_an_end(package: Package, tmp_path: pathlib.Path) -> None:
    image = package.library
    at = dynamic_value(image, 5) + dynamic_value(image, 10) - 1
    text = error_of(tmp_path / "model.pt2", Package(patched(image, at, 1, 65), package.manifest))
    assert "string table has no end" in text or "has no end" in text


def test_a_symbol_count_that_is_too_big(package: Package, tmp_path: pathlib.Path) -> None:
    at = dynamic_value(package.library, 0x6FFFFEF5) + 4
    text = error_of(tmp_path / "model.pt2", Package(patched(package.library, at, 4, 0xFFFFFFFF), package.manifest))
    assert "it claims more symbols than the file can hold" in text


def test_initialisers_must_point_to_code(package: Package, tmp_path: pathlib.Path) -> None:
    image = bytearray(package.library)
    table, size, array = dynamic_value(image, 7), dynamic_value(image, 8), dynamic_value(image, 0x19)
    for at in range(table, table + size, 24):
        offset, info, _ = struct.unpack_from("<QQQ", image, at)
        if offset == array:
            struct.pack_into("<QQQ", image, at, offset, info, 0x10)
    text = error_of(tmp_path / "model.pt2", Package(bytes(image), package.manifest))
    assert "an initialiser lies outside of its code" in text


def test_a_library_that_is_no_model_is_not_run(package: Package, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "other.c"
    marker = tmp_path / "ran"
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void on_open(void) {{ fclose(fopen("{marker}", "w")); }}\n'
        "int answer(void) { return 42; }\n"
    )
    image = compile_library(source, tmp_path / "other.so")
    text = error_of(tmp_path / "model.pt2", Package(image, package.manifest))
    assert "is no model library: it lacks the AOTInductor function AOTInductorModelContainerCreateWithDevice" in text
    assert not marker.exists()


def test_all_missing_functions_are_named(package: Package, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "needs.c"
    source.write_text(
        "int aoti_torch_cpu_future(void); double Sleef_future8(double); void free(void*);\n"
        "int run(void) { free(0); return aoti_torch_cpu_future() + (int)Sleef_future8(1); }\n"
    )
    image = compile_library(source, tmp_path / "needs.so")
    text = error_of(tmp_path / "model.pt2", Package(image, package.manifest))
    assert "needs 2 functions that this build of untorch does not have: " in text
    assert "aoti_torch_cpu_future" in text
    assert "Sleef_future8" in text
    assert text.endswith("; change the model, or update untorch")


@pytest.mark.of_each_build
def test_a_build_without_cuda_says_so(package: Package, tmp_path: pathlib.Path) -> None:
    """What a library needs for CUDA is no gap of untorch where nvcc was missing."""
    source = tmp_path / "needs.c"
    source.write_text("int aoti_torch_cuda_future(void);\nint run(void) { return aoti_torch_cuda_future(); }\n")
    text = error_of(tmp_path / "model.pt2", Package(compile_library(source, tmp_path / "needs.so"), package.manifest))
    assert "needs 1 function that this build of untorch does not have: aoti_torch_cuda_future; " in text
    if _core.has_symbol("aoti_torch_cuda_mm_out"):
        assert text.endswith("; change the model, or update untorch")
    else:
        assert text.endswith(f"; {BUILT_WITHOUT_CUDA}")


def test_a_library_that_is_missing_elsewhere_is_named(package: Package, tmp_path: pathlib.Path) -> None:
    image = package.library.replace(b"libuntorch.so\0", b"libnowhere.so\0")
    text = error_of(tmp_path / "model.pt2", Package(image, package.manifest))
    assert "libnowhere.so: cannot open shared object file" in text


def test_an_executable_stack_is_not_granted(package: Package, prober: Prober) -> None:
    fields = {name: (at, width) for name, at, width in elf_fields(package.library)}
    for i in range(64):
        if f"phdr[{i}].type" not in fields:
            break
        at = fields[f"phdr[{i}].type"][0]
        if struct.unpack_from("<I", package.library, at)[0] == 0x6474E551:
            image = patched(package.library, at + 4, 4, 7)
            assert prober.open(Package(image, package.manifest).bytes()).startswith("ok:")
            return
    pytest.skip("the compiler makes no stack header")


# All tables of a real library but those that only move code or data around: the addends of relocations, exception
# handlers, and programs that restore registers.
REAL_TABLES = (
    ".gnu.hash", ".dynsym", ".dynstr", ".gnu.version", ".gnu.version_r", ".rela.plt", ".dynamic", ".eh_frame_hdr",
)  # fmt: skip


def test_header_fields_of_a_real_library(real_package: RealPackage, prober: Prober) -> None:
    rng = random.Random(23)
    image = real_package.library
    cases = []
    for name, at, width in elf_fields(image):
        old = int.from_bytes(image[at : at + width], "little")
        for value in rng.sample(sorted(set(values(old, width))), 3):
            mutant = patched(image, at, width, value)
            cases.append((f"{name} = {value:#x}", real_package.with_library(mutant).bytes()))
    assert prober.refused(cases, allow_ok=True) == []


@pytest.mark.slow
def test_flipped_bytes_of_a_real_librarys_tables(real_package: RealPackage, prober: Prober) -> None:
    rng = random.Random(24)
    image, sections = real_package.library, elf_sections(real_package.library)
    cases = []
    for table in REAL_TABLES:
        start, size = sections[table]
        for _ in range(60):
            at, value = start + rng.randrange(size), rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 255))
            mutant = patched(image, at, 1, image[at] ^ value)
            cases.append((f"{table} + {at - start:#x} ^ {value:#x}", real_package.with_library(mutant).bytes()))
    assert prober.refused(cases, allow_ok=True) == []


def test_a_table_that_finds_nothing_is_refused(real_package: RealPackage, prober: Prober) -> None:
    """Functions that are in the symbol table and not in the hash table were null pointers."""
    image = real_package.library
    start, _ = elf_sections(image)[".gnu.hash"]
    words = struct.unpack_from("<I", image, start + 8)[0]
    empty = image[: start + 16] + bytes(8 * words) + image[start + 16 + 8 * words :]
    assert "its hash table is damaged" in prober.open(real_package.with_library(empty).bytes())


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_hash_tables_are_checked_whole(style: str, tmp_path: pathlib.Path, package: Package, prober: Prober) -> None:
    image = model_library(tmp_path, f"-Wl,--hash-style={style}")
    assert prober.open(Package(image, package.manifest).bytes()).startswith("ok:")
    for name in (".hash", ".gnu.hash"):
        start, size = elf_sections(image).get(name, (0, 0))
        for at in range(start, start + size, 4):
            mutant = patched(image, at, 4, int.from_bytes(image[at : at + 4], "little") ^ 0x10)
            answer = prober.open(Package(mutant, package.manifest).bytes())
            # More bits in the filter make the dynamic linker look in vain, no more.
            assert answer.startswith(("InvalidFileError:", "ok:")), (name, at - start)


def relocation(image: bytes, section: str, index: int) -> int:
    """Where an entry is in the file."""
    return elf_sections(image)[section][0] + 24 * index


def unwind_entry(image: bytes) -> int:
    """Where the sorted table of functions starts in the file."""
    return elf_sections(image)[".eh_frame_hdr"][0] + 12


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda i: patched(i, relocation(i, ".rela.plt", 1), 8, int.from_bytes(i[relocation(i, ".rela.plt", 0) :][:8],
                           "little")), "two relocations are of the same place"),
        (lambda i: patched(i, relocation(i, ".rela.plt", 0) + 16, 8, 8), "its relocations are damaged"),
        (lambda i: patched(i, relocation(i, ".rela.plt", 0) + 8, 8, 0), "its relocations are damaged"),
        (lambda i: patched(i, relocation(i, ".rela.plt", 1) + 12, 4, int.from_bytes(i[relocation(i, ".rela.plt", 0)
                           + 12 :][:4], "little")), "its relocations are damaged"),
        (lambda i: patched(i, relocation(i, ".rela.dyn", 5) + 16, 8, 1 << 30), "a relocation points outside"),
        (lambda i: patched(i, unwind_entry(i), 4, 4), "its unwind tables are damaged"),
        (lambda i: patched(i, unwind_entry(i) + 4, 4, 4), "its unwind tables are damaged"),
        (lambda i: patched(i, elf_sections(i)[".eh_frame"][0] + 8, 1, 9), "its unwind tables are damaged"),
        (lambda i: patched(i, elf_sections(i)[".dynsym"][0] + 24 * 200 + 8, 8, int.from_bytes(i[elf_sections(i)[
                           ".dynsym"][0] + 24 * 201 + 8 :][:8], "little")), "contradict each other"),
        (lambda i: patched(i, elf_sections(i)[".gnu.version"][0] + 2 * 200, 2, 2), "its symbol versions are damaged"),
        (lambda i: i.replace(b"libstdc++.so.6\0", b"libuntorch.so\0\0"),
         "a symbol version is of libuntorch.so, which has none"),
        (lambda i: i.replace(b"libstdc++.so.6\0", b"libtorch.so\0\0\0\0"),
         "a symbol version is of libtorch.so, which has none"),
    ],
)  # fmt: skip
def test_tables_of_a_real_library_are_checked(
    change: Callable[[bytes], bytes], text: str, real_package: RealPackage, prober: Prober
) -> None:
    mutant = change(real_package.library)
    assert mutant != real_package.library
    answer = prober.open(real_package.with_library(mutant).bytes())
    assert answer.startswith("InvalidFileError:")
    assert text in answer


@pytest.mark.parametrize("flags", [["-fuse-ld=gold"], ["-s"], ["-Wl,-z,now"], ["-Wl,-z,lazy"], ["-g"]], ids=str)
def test_libraries_of_other_linkers_are_opened(
    flags: list[str], tmp_path: pathlib.Path, package: Package, prober: Prober
) -> None:
    try:
        image = model_library(tmp_path, *flags)
    except subprocess.CalledProcessError:
        pytest.skip("needs that linker")
    assert prober.open(Package(image, package.manifest).bytes()).startswith("ok:")
