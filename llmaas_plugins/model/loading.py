"""Load models for commands, and report models that llama.cpp cannot load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
def loaded(
    path: Path,
    *,
    is_vocab_only: bool = False,
    progress: Callable[[float], object] = lambda _share: None,
) -> Iterator[Any]:
    """Load a model without a context, or only its vocabulary.

    Args:
        path: The model.
        is_vocab_only: Whether to load only its vocabulary.
        progress: Called with the share that is loaded. The share falls back if llama.cpp loads the
            model a second time.

    Raises:
        ConfigError: llama.cpp cannot load the model.
    """
    from llama_cpp import llama_cpp
    from llama_cpp._logger import set_verbose

    from llmaas_patches.internals import load_model

    set_verbose(False)  # ggml logs every graph
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = is_vocab_only
    params.progress_callback = _callback(progress)
    with load_errors(path):
        model = load_model(path, params)
    with contextlib.closing(model):
        yield model


def _callback(progress: Callable[[float], object]) -> Any:
    """Return llama.cpp's form of a function that is told of progress."""
    from llama_cpp import llama_cpp

    def told(share: float, _data: int | None) -> bool:
        progress(share)
        return True

    return llama_cpp.llama_progress_callback(told)


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
