#!/bin/sh
# Run tests on another supported release of llama-cpp-python: tests/release.sh VERSION [pytest arguments]
#
# The release gets an environment of its own in build/, whose other packages are those of the Python on PATH: llmaas_plugins
# too, with the native libraries that were built with the newest release. The first run compiles llama-cpp-python (about
# five minutes on two cores) and needs the network. Without arguments: the whole suite.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
version=$1
shift
venv=$root/build/releases/$version/venv

say() { echo "release.sh: $*" >&2; }

here=$(python -c 'import sys; print(sys.prefix)')
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ "$(cat "$venv/made" 2>/dev/null)" != "$here" ]; then
    say "pip compiles llama-cpp-python $version into $venv; minutes ..."
    rm -rf "$venv"
    python -m venv --without-pip "$venv"
    flags=$(sed -n 's/^llama-cpp-python[^ ]* //p' "$root/requirements-dev.txt")
    # shellcheck disable=SC2086  # several options
    python -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps \
        "llama-cpp-python==$version" $flags
    echo "import site; site.addsitedir('$packages')" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
    for script in "$here"/bin/*; do # theirs begin with their Python
        if head -c 64 "$script" | grep -q "^#!$here/bin/python"; then
            sed "1s|.*|#!$venv/bin/python|" "$script" >"$venv/bin/${script##*/}"
            chmod +x "$venv/bin/${script##*/}"
        fi
    done
    echo "$here" >"$venv/made"
fi
found=$("$venv/bin/python" -c 'import llama_cpp; print(llama_cpp.__version__)')
[ "$found" = "$version" ] || { say "error: $venv has llama-cpp-python $found, expected $version; remove it and run again."; exit 1; }
say "tests on llama-cpp-python $version"
cd "$root"
export GGML_NO_BACKTRACE=1 OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1
if [ $# -gt 0 ]; then
    exec "$venv/bin/pytest" -p no:cacheprovider "$@"
fi
"$venv/bin/pytest" -p no:cacheprovider --ignore=tests/load -n auto --dist worksteal
exec "$venv/bin/pytest" -p no:cacheprovider tests/load
