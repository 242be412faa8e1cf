#!/bin/sh
# Builds with AddressSanitizer and UBSan and runs the tests of the native code under them.
# usage: scripts/sanitize.sh [pytest arguments]     PYTHON: the interpreter (default: python3)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${PYTHON:-python3}")
# cmake and ninja may have come with the interpreter's environment.
PATH=$(dirname "$python"):$PATH
build=$root/build/asan

# The CUDA kernels are no host code, and compiling them takes minutes; without them there are no CUDA shims.
cmake -S "$root" -B "$build" -G Ninja -DUNTORCH_CUDA=OFF -DUNTORCH_SANITIZE=address,undefined -DUNTORCH_PYTHON=ON \
  -DUNTORCH_VERSION=0.1.0 -DPython_EXECUTABLE="$python" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1"
ninja -C "$build"

# A package of its own, so that the instrumented libraries do not replace those of the working tree.
package=$build/package/untorch
rm -rf "$build/package"
mkdir -p "$package"
for item in "$root"/src/untorch/*; do
  case $item in *.so | *__pycache__) continue ;; esac
  ln -s "$item" "$package/"
done
ln -s "$build"/native/libuntorch.so "$build"/native/python/_core.*.so "$package/"

# Python itself never frees some memory, so leaks are not looked for; the tests count live tensors instead. The probe
# limits its address space, which the shadow memory does not fit into.
compiler=${CXX:-c++}
export LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=1:detect_odr_violation=0:allocator_may_return_null=1:verify_asan_link_order=0"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
export UNTORCH_LIBRARY=$build/native/libuntorch.so UNTORCH_PROBE_LIMIT=0 PYTHONPATH=$build/package OMP_NUM_THREADS=2
cd "$root"
if [ $# -eq 0 ]; then
  set -- tests/attacks tests/native -n 2
fi
exec "$python" -m pytest -q -p no:cacheprovider -k "not stays_level and not own_results and not runs_out_of_memory" "$@"
