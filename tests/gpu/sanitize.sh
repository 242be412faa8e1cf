#!/bin/sh
# The kernels' tests under compute-sanitizer: bad memory accesses in all of them, races in those that share memory.
# usage: tests/gpu/sanitize.sh     PYTHON: an interpreter with torch and CUDA (default: python3)
#        MEMCHECK, RACECHECK, RACECHECK_W4A16: what to run instead of the defaults; empty: nothing
#        RACECHECK_LIBRARY: a libuntorch.so that was built with -DUNTORCH_RACECHECK=ON, for the last of them
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
python=$(command -v "${PYTHON:-python3}")
tool=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
test -x "$tool" || { echo "compute-sanitizer was not found: it comes with the CUDA toolkit" >&2; exit 1; }

native=tests/gpu/native
MEMCHECK=${MEMCHECK-$native}
RACECHECK=${RACECHECK-$native/test_sort.py $native/test_scan.py $native/test_select.py}
RACECHECK_W4A16=${RACECHECK_W4A16-$native/test_int4.py $native/test_nvfp4.py $native/test_nvfp4_moe.py \
  $native/test_int4_moe.py}

# Few examples a property; torch's own allocations one by one, so that a step beyond one is seen.
# Few queues a process, as a GPU has so many: without one left, CUDA says that it is out of memory.
export UNTORCH_SANITIZE=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 CUDA_DEVICE_MAX_CONNECTIONS=8
status=0

# This library's kernels and CUB's in it; PyTorch's make references only, and would take most of the time.
kernels="--kernel-name kernel_substring=untorch --kernel-name kernel_substring=_ZN3cub"

# Failed driver calls are no faults of ours: asking about an address that CUDA does not know is one. A found fault ends
# the kernel's process with 86, whatever the tests say.
check() {
  kind=$1
  shift
  echo "compute-sanitizer --tool $kind: $*"
  "$tool" --tool "$kind" $kernels --error-exitcode 86 --target-processes all --report-api-errors no \
    --print-limit 20 "$python" -m pytest -q -p no:cacheprovider -o filterwarnings=default "$@" || status=$?
}

test -z "$MEMCHECK" || check memcheck $MEMCHECK
test -z "$RACECHECK" || check racecheck $RACECHECK

# Under racecheck cuBLAS's kernels for sm_90 end the process. So W4A16 GEMMs are our own kernels', and in the second run
# w4a16_gemm_sm80.cuh's for every M; left out are the tests where that is not so: of float32, of other layouts than the
# kernels', and those that run others with thresholds of their own. Dequantize kernels use no shared memory.
own="(moe or not dtype2) and not other_kernels and not layouts and not bytes_of and not every_value \
  and not test_int4_linear and not test_nvfp4_linear and not test_scales_of_another and not not_aligned"
if test -n "$RACECHECK_W4A16"; then
  test -z "${RACECHECK_LIBRARY:-}" || export UNTORCH_LIBRARY="$RACECHECK_LIBRARY"
  # Small weights by the sm_90 GEMM, too; where there is none, by w4a16_gemm_sm80.cuh.
  for format in INT4 NVFP4; do
    export UNTORCH_${format}_SM90_M=1000000 UNTORCH_${format}_SM80_M=1000000
  done
  check racecheck $RACECHECK_W4A16 -k "$own"
  for format in INT4 NVFP4; do export UNTORCH_${format}_GEMV_M=0 UNTORCH_${format}_SM90_M=0; done
  check racecheck $RACECHECK_W4A16 -k "$own and not moe"
fi
exit "$status"
