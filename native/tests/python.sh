#!/bin/sh
# Run Python tests with both native libraries under ASan and UBSan: native/tests/python.sh TEST…
# Python itself allocates with malloc here, so that the sanitizers also see accesses to freed numpy buffers.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$root/build/sanitized
python=$(command -v python3)
compiler=${CC:-gcc}
asan=$("$compiler" -print-file-name=libasan.so)
ubsan=$("$compiler" -print-file-name=libubsan.so)
if [ ! -e "$asan" ] || [ ! -e "$ubsan" ]; then
    echo "$compiler has no shared sanitizer libraries; set CC to a GCC that has them" >&2
    exit 2
fi
# The libraries go into a separate environment, which finds everything else in the one that runs this script.
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -m venv --without-pip "$build/venv"
site=$("$build/venv/bin/python" -c "$purelib")
{ "$python" -c "$purelib"; echo "$root/eval"; } >"$site/packages.pth"
CC=$compiler "$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --upgrade \
    --target "$site" -C cmake.define.LLMAAS_SANITIZE=ON -C cmake.build-type=Debug -C build-dir="$build/cmake" "$root"
cd "$root"
export GGML_NO_BACKTRACE=1 OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1
# ASan keeps freed memory for a while; by default 256 MiB, which tests of memory budgets would take for the process's own.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:quarantine_size_mb=64 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONMALLOC=malloc PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
LD_PRELOAD="$asan $ubsan" exec "$build/venv/bin/python" -m pytest -p no:cacheprovider "$@"
