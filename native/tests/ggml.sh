#!/bin/sh
# Build the ggml of a release of llama-cpp-python: native/tests/ggml.sh tsan|plain [folder] [version]
#
# tsan: for ThreadSanitizer. The installed ggml runs its threads with OpenMP, whose barriers ThreadSanitizer cannot see.
# plain: quick to compile, for running the tests on a release that is not installed.
# The source is the sdist of the named version, or of the installed one. The results are folder/lib, with the same SONAMEs,
# and folder/include. A second run does nothing. Programs that link to it need the same compiler, named in folder/built.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
kind=$1
out=${2:-$root/build/ggml-$kind}
mkdir -p "$out"
out=$(cd "$out" && pwd)

say() { echo "ggml.sh: $*" >&2; }
fail() { say "error: $*"; exit 1; }

version=${3:-$(python -c 'from importlib.metadata import version; print(version("llama-cpp-python"))' 2>/dev/null)} ||
    fail "python has no llama-cpp-python, so its version is not known; run 'make setup' and put .venv/bin on PATH."
if [ -z "${CC:-}" ]; then
    if command -v clang++ >/dev/null; then CC=clang CXX=clang++; else CC=gcc CXX=g++; fi
fi
CXX=${CXX:-c++}
case $kind in
    tsan) flags="-O1 -g1" tsan=ON ;;
    plain) flags=-O1 tsan=OFF ;;
    *) fail "expected tsan or plain, found $kind" ;;
esac
built="$version $CC"
if [ "$(cat "$out/built" 2>/dev/null)" = "$built" ]; then
    say "llama-cpp-python $version's, by $CC, is in $out already"
    exit 0
fi

top=llama_cpp_python-$version
sdist=$out/$top.tar.gz
rm -rf "$out/built" "$out/ggml" "$out/build" "$out/lib" "$out/include"
if [ ! -f "$sdist" ]; then
    say "pip downloads the sdist of llama-cpp-python $version ..."
    python -c '
import sys
from pathlib import Path
from llmaas_eval.peer_tests.sdist import download
download(sys.argv[1], Path(sys.argv[2]))' "$version" "$out" >"$out/pip.log" 2>&1 ||
        fail "pip could not download the sdist of llama-cpp-python $version (its words: $out/pip.log); connect to" \
            "the package index, or put $top.tar.gz into $out."
    rm "$out/pip.log"
fi
tar -xzf "$sdist" -C "$out" --strip-components=3 "$top/vendor/llama.cpp/ggml" 2>/dev/null ||
    fail "$sdist is not a readable sdist of llama-cpp-python $version; remove it and run again."
touch "$out/ggml/ggml.pc.in" # a standalone build needs it, but the sdist lacks it

say "$CC builds it in $out, half a minute on two cores ..."
{
    CC=$CC CXX=$CXX cmake -S "$out/ggml" -B "$out/build" \
        -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" \
        -DCMAKE_INSTALL_PREFIX="$out" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_INSTALL_RPATH="\$ORIGIN" \
        -DGGML_SANITIZE_THREAD=$tsan -DGGML_OPENMP=OFF -DGGML_LLAMAFILE=ON \
        -DGGML_ALL_WARNINGS=OFF -DGGML_CCACHE=OFF -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF &&
        cmake --build "$out/build" -j2 &&
        cmake --install "$out/build"
} >"$out/build.log" 2>&1 || fail "ggml did not build; the last lines of $out/build.log say why."
for name in ggml ggml-base ggml-cpu; do
    [ -f "$out/lib/lib$name.so.0" ] || fail "the build made no $out/lib/lib$name.so.0; see $out/build.log."
done
rm -rf "$out/ggml" "$out/build" "$sdist"
echo "$built" >"$out/built"
say "done: $out/lib and $out/include"
