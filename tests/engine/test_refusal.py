"""An unknown ggml: the suite logs one line, and the app runs vanilla llama.cpp."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, preloads a library")

FFI = "llmaas_patches.native._ffi"
SUPPORT = Path(__file__).parents[1] / "support"

SHIM = """
#include <dlfcn.h>
#include <stddef.h>

struct reg { int version; void * rest[5]; };

#if defined VERSION
struct reg * ggml_backend_cpu_reg(void) {
    static struct reg copy;
    void * library = dlopen("libggml-cpu.so.0", RTLD_LAZY | RTLD_NOLOAD);
    struct reg * (*original)(void);
    *(void **) &original = dlsym(library, "ggml_backend_cpu_reg");
    copy = *original();
    copy.version = 4;
    return &copy;
}
#elif defined OPERATION
const char * ggml_op_name(int op) { return op ? "ELSE" : "NONE"; }
#elif defined TENSOR
size_t ggml_tensor_overhead(void) { return 1000; }
#elif defined LAYOUT
const char * ggml_backend_reg_name(void * reg) { return reg ? "ELSE" : ""; }
#endif
"""

DIFFERENCES = {
    "VERSION": "its backend interface has version 4, expected 2 or 3",
    "OPERATION": "it has no operation ADD",
    "TENSOR": r"a tensor takes 1000 bytes, expected about \d+",
    "LAYOUT": "the registry's interface has another layout",
}

APP = """
import importlib.machinery, json, logging, sys
from claiming import Claimer
from switching import OTHER, PROMPT, ask
from llama_cpp import Llama
from llmaas_hooks import IncompatibleError, WeightClaim
from llmaas_plugins import activate

path, store, library, *modes = sys.argv[1:]
if library:  # that folder's, not the one that is installed
    import llmaas_patches.native
    llmaas_patches.native.__path__.insert(0, library)
    sys.meta_path.insert(0, importlib.machinery.PathFinder)

lines = []
class Lines(logging.Handler):
    def emit(self, record):
        if record.name.startswith("llmaas"):
            lines.append((record.levelname, record.getMessage()))
logging.getLogger().addHandler(Lines())

def answers():
    llama = Llama(path, n_ctx=256, n_threads=1, n_threads_batch=1, seed=1, verbose=False)
    found = [ask(llama, prompt, 4)[0] for prompt in (PROMPT, OTHER, PROMPT)]
    llama.close()
    return found

def lived(on_error):
    native = Claimer(WeightClaim(".*ffn_down.*", columns=(32,)))
    config = {"plugins": {"kv_chunks": {"store": store}}, "on_error": on_error}
    said = {}
    lines.clear()
    try:
        with activate(config, {"native": native}) as suite:
            said["answers"] = answers()
            suite.settle()
            said["restored"] = suite.status()["plugins"]["kv_chunks"]["restored_tokens"]
    except IncompatibleError as error:
        said["raised"] = str(error)
    return said | {"contexts": len(native.contexts), "lines": [*lines]}

vanilla = answers()
print(json.dumps([{"vanilla": vanilla} | lived(on_error) for on_error in modes]))
"""


@pytest.fixture
def run(reference_model, tmp_path):
    """Return a function that runs the app in modes of ``on_error`` and parses its output."""

    def start(*modes, preload="", library=""):
        environ = os.environ | {"LD_PRELOAD": str(preload), "PYTHONPATH": str(SUPPORT)}
        arguments = map(str, (reference_model, tmp_path / "kv", library, *modes))
        done = subprocess.run(
            [sys.executable, "-c", APP, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return start


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """Return a function that compiles a library that alters one property of ggml."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler: install gcc or clang")
    folder = tmp_path_factory.mktemp("shim")
    source = folder / "shim.c"
    source.write_text(SHIM)

    def build(which):
        out = folder / f"lib{which.lower()}.so"
        flags = ["-std=c11", "-shared", "-fPIC", f"-D{which}"]
        subprocess.run([compiler, *flags, source, "-o", out, "-ldl"], check=True)
        return out

    return build


@pytest.fixture
def incomplete(tmp_path):
    """Return a folder with a copy of our library that needs a function missing from every ggml."""
    installed = Path(find_spec(FFI).origin)
    folder = tmp_path / "native"
    folder.mkdir()
    shutil.copy(installed, folder)
    library = (installed.parent / "libllmaas_ggml.so").read_bytes()
    assert library.count(b"\0ggml_backend_unload\0") == 1
    other = library.replace(b"\0ggml_backend_unload\0", b"\0ggml_backend_unloax\0")
    (folder / "libllmaas_ggml.so").write_bytes(other)
    return folder


def is_vanilla(said):
    assert said["answers"] == said["vanilla"]
    assert said["restored"] > 0  # kv_chunks does not need the engine
    assert said["contexts"] == 0
    return True


def is_one_error(said, pattern):
    ((level, line),) = said["lines"]
    assert level == "ERROR"
    assert re.search(f"cannot be hooked: {pattern}", line)
    assert "\n" not in line
    return True


def is_raised(said, pattern):
    assert re.search(pattern, said["raised"])
    assert "\n" not in said["raised"]
    assert said["contexts"] == 0
    return True


def test_the_ggml_we_know_is_not_refused(run):
    (said,) = run("raise")
    assert said["contexts"] == 1
    assert said["lines"] == []


@pytest.mark.slow
@pytest.mark.parametrize("which", DIFFERENCES)
def test_another_ggml_is_raised_or_one_line_and_vanilla(run, shim, which):
    raised, logged = run("raise", "log", preload=shim(which))
    assert is_raised(raised, f"cannot be hooked: {DIFFERENCES[which]}")
    assert is_one_error(logged, DIFFERENCES[which])
    assert is_vanilla(logged)


@pytest.mark.slow
def test_a_missing_function_is_named(run, incomplete):
    raised, logged = run("raise", "log", library=incomplete)
    assert is_raised(raised, "ggml_backend_unloax")
    assert is_one_error(logged, r".*libllmaas_ggml\.so.*ggml_backend_unloax")
    assert is_vanilla(logged)


# -- which ggml -------------------------------------------------------------------------------

MAPPED = """
import llmaas_patches.native, llama_cpp
llmaas_patches.native.load_library()
with open("/proc/self/maps") as maps:
    for path in sorted({line.split()[-1] for line in maps if "/" in line}):
        print(path)
"""


def test_the_ggml_in_use_is_llama_cpps_and_the_only_one():
    said = subprocess.run(
        [sys.executable, "-c", MAPPED], capture_output=True, text=True, check=True
    ).stdout.split()
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    for name in ("libggml.so", "libggml-base.so", "libggml-cpu.so"):
        mapped = [Path(path) for path in said if Path(path).name.startswith(f"{name}.")]
        assert [path.parent for path in mapped] == [folder], name
    assert len([path for path in said if path.endswith("/libllmaas_ggml.so")]) == 1


def test_the_library_names_ggml_and_no_place_for_it():
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf: install binutils")
    library = Path(find_spec(FFI).origin).parent / "libllmaas_ggml.so"
    said = subprocess.run(
        ["readelf", "--dynamic", library], capture_output=True, text=True, check=True
    ).stdout
    assert "RPATH" not in said
    assert "RUNPATH" not in said
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", said))
    assert {"libggml.so.0", "libggml-base.so.0", "libggml-cpu.so.0"} <= needed
