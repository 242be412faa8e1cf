"""export/portable: a program that is linked with it asks for no name newer than manylinux_2_28, and does the same."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORTABLE = ROOT / "src" / "untorch" / "export" / "portable"
sys.path.insert(0, str(ROOT / "scripts"))

from wheels import misplaced, said, too_new  # noqa: E402

PROGRAM = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <charconv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { std::fprintf(stderr, "%d: %s\n", __LINE__, #what); return 1; } } while (false)

namespace {
int counted = 0;
struct Counted : std::runtime_error {
  Counted() : std::runtime_error("counted") { ++counted; }
  Counted(const Counted& other) : std::runtime_error(other) { ++counted; }
  ~Counted() override { --counted; }
};
struct FromChars { double value = 7.0; std::ptrdiff_t used = 0; std::errc error{}; };
FromChars parse(const std::string& text) {
  FromChars out;
  const auto found = std::from_chars(text.data(), text.data() + text.size(), out.value);
  out.used = found.ptr - text.data(), out.error = found.ec;
  return out;
}
}  // namespace

int main(int, char** argv) {
  volatile double x = 1.5;
  CHECK(std::fabs(std::exp(x) - 4.4816890703380645) < 1e-15);
  CHECK(std::fabs(std::log(x) - 0.4054651081081644) < 1e-15);
  CHECK(std::pow(x, 3.0) == 3.375);
  CHECK(std::exp2(2.0 * x) == 8.0 && std::fabs(std::log2(x) - 0.5849625007211562) < 1e-15);
  CHECK(std::fmod(x, 0.4) - 0.3 < 1e-15 && std::fmod(static_cast<float>(x), 1.0F) == 0.5F);

  CHECK(parse("0.1").value == 0.1 && parse("-2.5e-3").value == -2.5e-3 && parse("5e-324").value == 5e-324);
  CHECK(parse("12,").used == 2 && parse("12,").value == 12.0 && parse("1e").used == 1);
  CHECK(parse("1e999").error == std::errc::result_out_of_range && parse("1e999").value == 7.0);
  for (const char* text : {"", "+1", " 1", "x", "-"}) {
    CHECK(parse(text).error == std::errc::invalid_argument && parse(text).used == 0 && parse(text).value == 7.0);
  }

  std::ostringstream stream;
  stream << "a" << 1;
  CHECK(stream.str() == "a1" && std::move(stream).str() == "a1");
  std::stringstream both;
  int number = 0;
  both << 12 << " b";
  CHECK(both >> number && number == 12 && both.str() == "12 b");

  std::exception_ptr kept;
  try {
    throw Counted();
  } catch (...) {
    kept = std::current_exception();
  }
  {
    const std::exception_ptr copy = kept;
    try {
      std::rethrow_exception(copy);
    } catch (const Counted& error) {
      CHECK(std::strcmp(error.what(), "counted") == 0);
    }
  }
  CHECK(counted == 1);
  kept = nullptr;
  CHECK(counted == 0);
  volatile long count = -1;
  try {
    delete[] new int[static_cast<std::size_t>(count)];
    CHECK(false);
  } catch (const std::bad_array_new_length&) {
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::shared_mutex shared;
  bool ready = false, done = false;
  std::thread thread([&] {
    pthread_setname_np(pthread_self(), "portable");
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ready; });
    const std::shared_lock read(shared);
    done = true;
    changed.notify_all();
  });
  {
    const std::unique_lock write(shared);
    CHECK(!shared.try_lock_shared() && !shared.try_lock());
  }
  {
    std::unique_lock lock(mutex);
    ready = true;
    changed.notify_all();
    CHECK(changed.wait_for(lock, std::chrono::seconds(30), [&] { return done; }));
    const auto begin = std::chrono::steady_clock::now();
    CHECK(!changed.wait_for(lock, std::chrono::milliseconds(30), [] { return false; }));
    CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(30));
    CHECK(!changed.wait_until(lock, begin - std::chrono::seconds(9), [] { return false; }));
  }
  thread.join();
  CHECK(mutex.try_lock());
  mutex.unlock();
  std::once_flag once;
  int calls = 0;
  for (int i = 0; i < 2; ++i) std::call_once(once, [&] { ++calls; });
  CHECK(calls == 1);
  pthread_key_t key;
  CHECK(pthread_key_create(&key, nullptr) == 0 && pthread_setspecific(key, &key) == 0);
  CHECK(pthread_getspecific(key) == &key);
  sigset_t set, old;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  CHECK(pthread_sigmask(SIG_BLOCK, &set, &old) == 0 && sigismember(&old, SIGUSR1) == 0);

  struct stat info;
  CHECK(stat(argv[0], &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 1000);
  const auto size = info.st_size;
  CHECK(stat("/nowhere/at all", &info) != 0 && errno == ENOENT);
  const int file = open(argv[0], O_RDONLY);
  CHECK(fstat(file, &info) == 0 && info.st_size == size);
  close(file);

  void* const library = dlopen("libm.so.6", RTLD_NOW);
  CHECK(library != nullptr && dlsym(library, "cos") != nullptr);
  Dl_info where;
  CHECK(dladdr(dlsym(library, "cos"), &where) != 0 && std::strstr(where.dli_fname, "libm") != nullptr);
  char folder[4096];
  CHECK(dlinfo(library, RTLD_DI_ORIGIN, folder) == 0 && folder[0] == '/');
  CHECK(dlclose(library) == 0);
  CHECK(dlopen("libnowhere.so", RTLD_NOW) == nullptr && std::strstr(dlerror(), "libnowhere.so") != nullptr);
  std::puts("as before");
}
"""


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("objdump") is None, reason="needs g++ and binutils"
)


def names() -> list[str]:
    return (PORTABLE / "manylinux_2_28.txt").read_text().split()


def stand_ins(folder: Path) -> list[str]:
    """libdl.so.2 and libpthread.so.0 as the linker is given them."""
    made = []
    for name in ("libdl.so.2", "libpthread.so.0"):
        path = folder / name
        options = ["-shared", "-fPIC", "-nostdlib", f"-DUNTORCH_{name.replace('.', '_')}", f"-Wl,-soname,{name}"]
        script = f"-Wl,--version-script={PORTABLE / 'libraries.map'}"
        subprocess.run(["gcc", *options, script, str(PORTABLE / "libraries.c"), "-o", str(path)], check=True)
        made.append(str(path))
    return made


@needs_compiler
def test_a_program(tmp_path: Path) -> None:
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-O2", "-fvisibility=hidden", "-pthread"]
    libraries = [*stand_ins(tmp_path), "-l:libm.so.6"]
    wraps = [f"-Wl,--wrap={name}" for name in names()]
    sources = [str(source), str(PORTABLE / "manylinux_2_28.cpp")]
    subprocess.run([*command, "-o", str(program), *sources, *wraps, "-Wl,--no-as-needed", *libraries], check=True)
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "as before\n", "")
    symbols = subprocess.run(["objdump", "-T", str(program)], check=True, capture_output=True, text=True).stdout
    found = too_new(symbols)
    assert found.pop("GLIBC_2.34", None) in (None, ["__libc_start_main"])  # of programs alone
    assert found == {}
    assert misplaced(said("readelf", "-W", "--dyn-syms", program), said("readelf", "-W", "-V", program)) == []
    needed = subprocess.run(["objdump", "-p", str(program)], check=True, capture_output=True, text=True).stdout
    assert all(name in needed for name in ("libdl.so.2", "libpthread.so.0", "libm.so.6"))


@needs_compiler
def test_every_name_has_a_function(tmp_path: Path) -> None:
    made = tmp_path / "portable.o"
    subprocess.run(["g++", "-std=c++20", "-c", str(PORTABLE / "manylinux_2_28.cpp"), "-o", str(made)], check=True)
    symbols = subprocess.run(["nm", "--defined-only", str(made)], check=True, capture_output=True, text=True).stdout
    found = {line.split()[-1] for line in symbols.splitlines()}
    assert {name for name in found if name.startswith("__wrap_")} == {f"__wrap_{name}" for name in names()}


def test_functions_that_moved_are_in_the_stand_ins() -> None:
    in_libc_so_6 = {"pthread_cond_clockwait"}  # its wrapper calls pthread_cond_timedwait, which was there, too
    moved = {name for name in names() if name.startswith(("dl", "pthread_"))} - in_libc_so_6
    source = (PORTABLE / "libraries.c").read_text()
    assert sorted(re.findall(r"^FUNCTION\((\w+),", source, re.MULTILINE)) == sorted(moved)
