"""The tests of the installed llama-cpp-python, out of its sdist."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

from llmaas_hooks import ConfigError

__all__ = ["download", "extract"]

# Nothing else leaves the archive, so no member can lead out of the folder.
_WANTED = re.compile(
    r"(?P<top>[\w.-]+)/"
    r"(?P<path>tests/test_\w+\.py|vendor/llama\.cpp/models/ggml-vocab-llama-spm\.gguf)"
)
_MAX_BYTES = 16 << 20


def download(version: str, folder: Path) -> Path:
    """Let pip fetch the sdist from the indexes it is set up for; it checks their hashes.

    pip also asks the sdist for its metadata, with the build tools that are installed here.

    Args:
        version: Of llama-cpp-python.
        folder: Where to put the file.

    Raises:
        ConfigError: pip could not.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    source = ["--no-deps", "--no-build-isolation", "--no-binary=llama-cpp-python"]
    done = subprocess.run(  # noqa: S603  our own arguments
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
    """Write the tests, and the vocabulary they read, below ``folder``.

    Args:
        sdist: ``llama_cpp_python-<version>.tar.gz``.
        version: The one that is installed.
        folder: Becomes the tests' working directory.

    Returns:
        The test files.

    Raises:
        ConfigError: The archive cannot be read, or is another one.
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
            f"{sdist} has no {top}/tests/test_*.py; the sdist of the installed version is needed."
        )
    return tests


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> Path:
    content = archive.extractfile(member)
    if content is None or member.size > _MAX_BYTES:
        raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.read())
    return path
