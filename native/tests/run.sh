#!/bin/sh
# Build the C tests under ASan and UBSan and run them: native/tests/run.sh [build folder]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$root/build/sanitize}
cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Debug -DLLMAAS_TESTS=ON -DLLMAAS_SANITIZE=ON >/dev/null
cmake --build "$build" -j2
# Waiting threads sleep: spinning ones take the processors from those that they wait for.
OMP_WAIT_POLICY=passive exec ctest -j2 --test-dir "$build" --output-on-failure
