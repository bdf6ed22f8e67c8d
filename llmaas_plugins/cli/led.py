"""Engines that are led through given answers, so that all of them do the same work.

``llmaas tune`` and ``llmaas demo`` compare such engines, each in a process of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HIGHEST", "LOWEST", "judged", "opened", "serve_methods"]

LOWEST, HIGHEST = np.float32(-1e30), np.float32(1e4)
"""Logits with which an engine says one token."""


def judged(logits: NDArray[np.floating[Any]], token: int) -> tuple[int, float]:
    """Return the most likely token, and the negative log-likelihood of ``token`` in nats."""
    scores = np.array(logits, np.float64)
    most = int(scores.argmax())
    shifted = scores - scores[most]
    return most, float(np.log(np.exp(shifted).sum()) - shifted[token])


@contextlib.contextmanager
def opened(model: Path, config: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Open a model inside the block; yield the ``Llama``, and the suite or None.

    Args:
        model: Path of the GGUF file.
        config: Configuration of the plugins; None for vanilla.
        **options: Further arguments of ``Llama``.

    Raises:
        ConfigError: The model cannot be opened.
    """
    from llama_cpp import Llama

    from llmaas_plugins.activation import activate
    from llmaas_plugins.model.loading import load_errors

    with contextlib.ExitStack() as stack:
        suite = None if config is None else stack.enter_context(activate(config))
        with load_errors(model):
            llama = Llama(str(model), verbose=False, **options)
        yield stack.enter_context(contextlib.closing(llama)), suite


def serve_methods(served: object, pipe: Connection) -> None:
    """Answer requests until the pipe is closed.

    A request is the name of a method of ``served``, with its arguments.
    """
    pipe.send("ready")
    while True:
        method, *arguments = pipe.recv()
        pipe.send(getattr(served, method)(*arguments))
