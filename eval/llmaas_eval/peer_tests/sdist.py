"""The tests and the vocabularies of the installed llama-cpp-python, extracted from its sdist."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

from llmaas_hooks import ConfigError

__all__ = ["download", "extract", "extract_vocabulary"]

_VOCABULARY = "vendor/llama.cpp/models/ggml-vocab-{}.gguf"
# Only these paths are extracted, so no archive member can be written outside the folder.
_WANTED = rf"tests/test_\w+\.py|{re.escape(_VOCABULARY.format('llama-spm'))}"
_MAX_BYTES = 16 << 20


def download(version: str, folder: Path) -> Path:
    """Download the sdist with pip from its configured indexes; pip checks the hashes.

    pip also builds the sdist's metadata, with the build tools installed in this environment.

    Args:
        version: Version of llama-cpp-python.
        folder: Folder for the file.

    Raises:
        ConfigError: pip could not download the sdist.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    source = ["--no-deps", "--no-build-isolation", "--no-binary=llama-cpp-python"]
    done = subprocess.run(  # noqa: S603  the arguments are our own
        [*pip, *source, "--dest", folder, f"llama-cpp-python=={version}"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = sorted(folder.glob("llama_cpp_python-*.tar.gz"))
    if done.returncode or not found:
        raise ConfigError(
            f"pip could not download the sdist of llama-cpp-python {version}: "
            f"{done.stderr.strip()[-500:]} Give the file with --sdist."
        )
    return found[0]


def extract(sdist: Path, version: str, folder: Path) -> list[Path]:
    """Extract the tests, and the vocabulary file that they read, to ``folder``.

    Args:
        sdist: File ``llama_cpp_python-<version>.tar.gz``.
        version: Installed version.
        folder: Folder that becomes the tests' working directory.

    Returns:
        The test files.

    Raises:
        ConfigError: The archive cannot be read, or is not the sdist of that version.
    """
    found = _extracted(sdist, version, _WANTED, folder)
    tests = [path for path in found if path.suffix == ".py"]
    if not tests:
        raise ConfigError(
            f"{sdist} has no {_top(version)}/tests/test_*.py; give the sdist of the installed "
            "version."
        )
    return tests


def extract_vocabulary(sdist: Path, version: str, name: str, folder: Path) -> Path:
    """Extract one of llama.cpp's vocabularies to ``folder``.

    Args:
        sdist: File ``llama_cpp_python-<version>.tar.gz``.
        version: Installed version.
        name: Name of the vocabulary, such as ``llama-bpe``.
        folder: Folder in which the vocabulary's own folder is made.

    Returns:
        The vocabulary's file.

    Raises:
        ConfigError: The archive cannot be read, or has no such vocabulary.
    """
    path = _VOCABULARY.format(name)
    found = _extracted(sdist, version, re.escape(path), folder)
    if not found:
        raise ConfigError(
            f"{sdist} has no {_top(version)}/{path}; give the sdist of the installed version."
        )
    return found[0]


def _extracted(sdist: Path, version: str, wanted: str, folder: Path) -> list[Path]:
    """Extract the regular files whose paths match ``wanted`` completely.

    Raises:
        ConfigError: The archive cannot be read.
    """
    pattern = re.compile(rf"{re.escape(_top(version))}/(?P<path>{wanted})")
    try:
        with tarfile.open(sdist) as archive:
            members = [(m, pattern.fullmatch(m.name)) for m in archive if m.isreg()]
            return [_write(archive, m, folder / match["path"]) for m, match in members if match]
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ConfigError(f"{sdist} is not a readable sdist: {error}") from error


def _top(version: str) -> str:
    return f"llama_cpp_python-{version}"


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> Path:
    content = archive.extractfile(member)
    if content is None or member.size > _MAX_BYTES:
        raise tarfile.ReadError(f"{member.name} has {member.size} bytes, which is too many")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.read())
    return path
