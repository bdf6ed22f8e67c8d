"""``python -m llmaas_eval.canary``: compare the newest llama.cpp build with the installed one."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmaas_eval.canary.compare import changes, problems
from llmaas_hooks import ConfigError
from llmaas_patches.compat import NEWEST_VERSION, number
from llmaas_patches.table import PATCHES
from llmaas_plugins.reference_model import reference_model_path

_PACKAGE, _LIBRARY = "xllamacpp", "xllamacpp/xllamacpp.abi3.so"
_INSTALLED = ("libggml-base.so", "libggml-cpu.so", "libggml.so", "libllama.so")
_PROBE = "llmaas_eval.canary.probe"
_TIMEOUT_S = 120


def main(argv: Sequence[str] | None = None) -> int:
    """Print what changed and return 0.

    The status is 0 even if the newest build does not work, as a future build must not block work
    on the supported ones.
    """
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.canary", description=__doc__)
    parser.add_argument("--wheel", type=Path, help=f"{_PACKAGE} wheel to use; default pip's newest")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="llmaas-canary-") as folder:
        try:
            wheel = args.wheel or _download(Path(folder))
            newest = _library(wheel, Path(folder))
        except ConfigError as error:
            _say(f"skipped: {error}")
            return 0
        _report(wheel.name, newest)
    for version in _untried_releases():
        _say(f"WARNING: llama-cpp-python {version} is released but untested")
    return 0


def _report(name: str, newest: Path) -> None:
    installed = _probe([_folder_of("llama_cpp") / "lib" / library for library in _INSTALLED])
    facts = _probe([newest])
    version = importlib.metadata.version("llama-cpp-python")
    _say(f"{name} compared with the installed llama-cpp-python {version}:")
    for line in changes(installed, facts):
        _say(f"  {line}")
    found = list(problems(facts, _missing_bindings(newest)))
    for line in found:
        _say(f"WARNING: {line}")
    if not found:
        _say("the engine works on this build: a model's logits are the same with and without it")


def _download(folder: Path) -> Path:
    """Download the newest wheel with pip.

    Raises:
        ConfigError: pip could not download it.
    """
    to = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = _pip("download", *to, _PACKAGE)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["no wheel for this machine"])[-1]
        raise ConfigError(f"pip could not download {_PACKAGE}: {said}")
    return wheels[0]


def _untried_releases() -> list[str]:
    """List releases newer than the newest supported version, as far as pip knows."""
    said = _pip("index", "versions", "llama-cpp-python").stdout
    listed = re.search(r"Available versions: (.*)", said)
    numbers = [number(version) for version in listed[1].split(", ")] if listed else []
    return [".".join(map(str, found)) for found in numbers if found > number(NEWEST_VERSION)]


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603


def _folder_of(module: str) -> Path:
    """Find a module's folder without importing it.

    Raises:
        ConfigError: The module is not installed.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigError(f"{module} is not installed; run `make setup`")
    return Path(spec.origin).parent


def _library(wheel: Path, folder: Path) -> Path:
    """Extract the library from a wheel.

    Raises:
        ConfigError: The wheel cannot be read, or has no library at the expected path.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(_LIBRARY, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel} has no {_LIBRARY}: {error}") from error


def _probe(libraries: Sequence[Path]) -> dict[str, Any]:
    """Run the probe in another process; return the facts that it printed before its end."""
    hook = _folder_of("llmaas_patches.native._ffi")
    arguments = [str(path) for path in (hook, reference_model_path(), *libraries)]
    done = subprocess.run(  # noqa: S603  the arguments are our own
        ["timeout", str(_TIMEOUT_S), sys.executable, "-m", _PROBE, *arguments],  # noqa: S607
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    last = (done.stderr.strip().splitlines() or [""])[-1]
    facts: dict[str, Any] = {"said": f"exit {done.returncode}, {last}"}
    for line in lines:
        facts |= json.loads(line)
    return facts


def _missing_bindings(library: Path) -> list[str]:
    names = [patch.target.partition(":")[2] for patch in PATCHES]
    exported = ctypes.CDLL(str(library))
    return [name for name in names if name.startswith("llama_") and not hasattr(exported, name)]


def _say(text: str) -> None:
    sys.stdout.write(f"canary: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
