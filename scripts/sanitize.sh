#!/bin/sh
# Builds with sanitizers and runs the tests of the native code under them.
# usage: scripts/sanitize.sh [address | thread] [pytest arguments]     PYTHON: the interpreter (default: python3)
#   address: AddressSanitizer and UBSan, on the attack tests and the tests of the C functions
#   thread:  ThreadSanitizer, on the tests that use threads
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${PYTHON:-python3}")
# cmake and ninja may have come with the interpreter's environment.
PATH=$(dirname "$python"):$PATH
kind=address
case ${1-} in
  address | thread) kind=$1 && shift ;;
esac
has() {
  for flag; do grep -qw "$flag" /proc/cpuinfo || return 1; done
}
# Kernels that this CPU cannot run are not compiled. Sanitizers make AVX-512's a third of the build.
level=baseline
if has avx2 fma bmi2; then level=v3; fi
if has avx2 fma bmi2 avx512f avx512bw avx512cd avx512dq avx512vl; then level=v4; fi
case $kind in
  address)
    build=$root/build/asan sanitizers=address,undefined
    options="-DUNTORCH_UNITY=ON -DUNTORCH_PRECOMPILE=ON -DUNTORCH_HIGHEST_ISA=$level" ;;
  # Kernels of one level, as threads are the same in all.
  thread)
    build=$root/build/tsan sanitizers=thread
    options="-DUNTORCH_UNITY=ON -DUNTORCH_PRECOMPILE=ON -DUNTORCH_HIGHEST_ISA=baseline" ;;
esac

# The CUDA kernels are no host code, and compiling them takes minutes; without them there are no CUDA shims.
# -Og compiles in half of the time of -O1. -O0 would keep calls of CUDA kernels in branches that are never taken.
cmake -S "$root" -B "$build" -G Ninja -DUNTORCH_CUDA=OFF -DUNTORCH_SANITIZE=$sanitizers -DUNTORCH_PYTHON=ON \
  -DPython_EXECUTABLE="$python" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-Og -g1" $options
ninja -C "$build"

# A package of its own, so that the instrumented libraries do not replace those of the working tree.
package=$build/package/untorch
rm -rf "$build/package"
mkdir -p "$package"
for item in "$root"/src/untorch/*; do
  case $item in *.so | *__pycache__) continue ;; esac
  ln -s "$item" "$package/"
done
ln -s "$build"/native/libuntorch*.so "$build"/native/python/_core.*.so "$package/"

# For processes that are not to be instrumented: those that export a model.
export UNTORCH_PLAIN_PYTHONPATH=${PYTHONPATH-}
# The probe limits its address space, which the sanitizers' shadow memory does not fit into: AddressSanitizer has a
# limit of its own for an allocation.
# Each example takes several times as long here, and the tests of C functions draw all without sanitizers.
export UNTORCH_FEWER_EXAMPLES=4
export UNTORCH_LIBRARY=$build/native/libuntorch.so UNTORCH_PROBE_LIMIT=0 PYTHONPATH=$build/package OMP_NUM_THREADS=2
compiler=${CXX:-c++}
# The run-times' own look at thread-local memory, which is for leaks, takes 16 bytes of another allocation for a header of
# glibc 2.19's where a thread's block begins 16 bytes into a page, and then ends the process.
common="abort_on_error=1:intercept_tls_get_addr=0"
if [ $kind = address ]; then
  # Python itself never frees some memory, so leaks are not looked for; the tests count live tensors instead.
  export LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
  # SIGBUS and SIGFPE are left to our handlers, whose tests end processes by them.
  export ASAN_OPTIONS="$common:detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1:max_allocation_size_mb=8192:verify_asan_link_order=0:handle_sigbus=0:handle_sigfpe=0"
  export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
  tests="tests/attacks tests/native"
  left_out=""
else
  # Python, numpy and the compiled models are not instrumented. What they do among themselves is not looked at, so there
  # is nothing to suppress; what they do to our memory through our functions is.
  export LD_PRELOAD="$("$compiler" -print-file-name=libtsan.so)"
  export TSAN_OPTIONS="$common:halt_on_error=1:ignore_noninstrumented_modules=1:second_deadlock_stack=1:history_size=4:die_after_fork=0"
  tests="tests/soak/test_races.py tests/native/test_memory.py tests/attacks/test_lifetime.py tests/attacks/test_threads.py"
  # ThreadSanitizer delays signals until a call that may block.
  left_out="not signal_handler"
fi
# Marked unsanitized, among others: forks beside threads that allocate. The sanitizers' allocators keep in the child
# what another thread had locked, and the child hangs (ThreadSanitizer: llvm-project#96600, in GCC from 15).
cd "$root"
if [ $# -eq 0 ]; then
  # Words of its own.
  set -- $tests -n 2 --dist worksteal
fi
exec "$python" -m pytest -q -p no:cacheprovider -m "not unsanitized" -k "$left_out" "$@"
