"""Load models for commands, and report models that llama.cpp cannot load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.model.gguf_header import read_header

__all__ = ["load_errors", "loaded", "vocabulary"]


@contextlib.contextmanager
def load_errors(path: str | Path) -> Iterator[None]:
    """Convert llama-cpp-python's ``ValueError`` inside the block, where a model is loaded.

    Raises:
        ConfigError: llama.cpp cannot load the model.
    """
    try:
        yield
    except ValueError as error:
        with contextlib.suppress(StoreError):  # there is no file, for a model from a hub
            read_header(Path(path))  # a damaged header is a better reason than llama.cpp's
        raise ConfigError(f"cannot load model {path}: {error}") from error


@contextlib.contextmanager
def loaded(path: Path, *, is_vocab_only: bool = False) -> Iterator[Any]:
    """Load a model without a context, or only its vocabulary.

    Raises:
        ConfigError: llama.cpp cannot load the model.
    """
    from llama_cpp import llama_cpp
    from llama_cpp._logger import set_verbose

    from llmaas_patches.internals import load_model

    set_verbose(False)  # ggml logs every graph
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = is_vocab_only
    with load_errors(path):
        model = load_model(path, params)
    with contextlib.closing(model):
        yield model


@contextlib.contextmanager
def vocabulary(path: Path) -> Iterator[Any]:
    """Load a ``Llama`` that has only the vocabulary and the metadata of a model.

    Raises:
        ConfigError: llama.cpp cannot load the model.
    """
    from llama_cpp import Llama
    from llama_cpp._utils import suppress_stdout_stderr

    # llama.cpp warns that a vocabulary has no context length
    with load_errors(path), suppress_stdout_stderr(disable=False):
        vocab = Llama(str(path), vocab_only=True, verbose=False)
    with contextlib.closing(vocab):
        yield vocab
