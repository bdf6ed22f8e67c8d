#!/bin/sh
# Run engines on many threads under ThreadSanitizer: native/tests/tsan.sh [rounds] [build folder] [ggml folder]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
rounds=${1:-4} # a round has three contexts: each kind once
build=${2:-$root/build/tsan}
ggml=${3:-$root/build/ggml-tsan}
"$root/native/tests/ggml.sh" tsan "$ggml"
compiler=$(cut -d ' ' -f 2 "$ggml/built")
CC=$compiler cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Debug -DLLMAAS_TESTS=ON \
    -DCMAKE_C_FLAGS="-fsanitize=thread -O1 -g" -DLLMAAS_GGML_LIBRARIES="$ggml/lib" >/dev/null
cmake --build "$build" -j2 --target engine_threads
# Disable address randomization, which may occupy addresses that ThreadSanitizer needs.
fixed=
if setarch -R true 2>/dev/null; then fixed="setarch -R"; fi
TSAN_OPTIONS="halt_on_error=0 exitcode=66 suppressions=$root/native/tests/tsan.supp" \
    exec $fixed "$build/native/tests/engine_threads" "$rounds"
