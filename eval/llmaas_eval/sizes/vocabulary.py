"""Vocabularies of real models, which the sdist of llama-cpp-python carries."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

from llmaas_eval.peer_tests.sdist import download, extract_vocabulary

__all__ = ["vocabulary_file"]


def vocabulary_file(name: str, folder: Path, sdist: Path | None = None) -> Path:
    """Return a vocabulary's file in ``folder``; extract it unless it is there.

    Args:
        name: Name of the vocabulary, such as ``llama-bpe``.
        folder: Folder that keeps vocabularies.
        sdist: llama-cpp-python's sdist; None downloads it.

    Raises:
        ConfigError: The sdist cannot be downloaded or read, or has no such vocabulary.
    """
    path = folder / f"ggml-vocab-{name}.gguf"
    if path.exists():
        return path
    version = importlib.metadata.version("llama-cpp-python")
    if sdist is None:
        sys.stderr.write("downloading llama-cpp-python's sdist, which takes a minute ...\n")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = sdist or download(version, Path(scratch))
        return extract_vocabulary(source, version, name, Path(scratch)).replace(path)
