"""The tests of the installed llama-cpp-python, extracted from its sdist."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

from llmaas_hooks import ConfigError

__all__ = ["download", "extract"]

# Only these paths are extracted, so no archive member can be written outside the folder.
_WANTED = re.compile(
    r"(?P<top>[\w.-]+)/"
    r"(?P<path>tests/test_\w+\.py|vendor/llama\.cpp/models/ggml-vocab-llama-spm\.gguf)"
)
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
    top = f"llama_cpp_python-{version}"
    try:
        with tarfile.open(sdist) as archive:
            members = [(m, _WANTED.fullmatch(m.name)) for m in archive if m.isreg()]
            found = [
                _write(archive, member, folder / match["path"])
                for member, match in members
                if match and match["top"] == top
            ]
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ConfigError(f"{sdist} is not a readable sdist: {error}") from error
    tests = [path for path in found if path.suffix == ".py"]
    if not tests:
        raise ConfigError(
            f"{sdist} has no {top}/tests/test_*.py; give the sdist of the installed version."
        )
    return tests


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> Path:
    content = archive.extractfile(member)
    if content is None or member.size > _MAX_BYTES:
        raise tarfile.ReadError(f"{member.name} has {member.size} bytes, which is too many")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.read())
    return path
