#!/bin/sh
# Run the backend's C tests on the ggml of each supported release: native/tests/releases.sh [build folder]
#
# The tests are compiled once, with the headers of the installed release, like the library. Needs the network once per
# release, for its source.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$root/build/releases}
versions=$(python -c 'from llmaas_patches.compat import TESTED_VERSIONS; print(*TESTED_VERSIONS)')
cmake -S "$root" -B "$build/tests" -DCMAKE_BUILD_TYPE=Debug -DLLMAAS_TESTS=ON -DCMAKE_SKIP_BUILD_RPATH=ON >/dev/null
cmake --build "$build/tests" -j2
for version in $versions; do
    "$root/native/tests/ggml.sh" plain "$build/$version/ggml" "$version"
    echo "releases.sh: the C tests on the ggml of llama-cpp-python $version" >&2
    LD_LIBRARY_PATH="$build/$version/ggml/lib" ctest --test-dir "$build/tests" --output-on-failure -L backend
done
