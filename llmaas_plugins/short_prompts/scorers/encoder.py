"""Scores by the tiny language model (ElastiLM §3.3): how likely each word is worth keeping."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import FileStamp, LlmaasError, forks, request_scope
from llmaas_plugins.short_prompts.encoder.model_file import EncoderFile, Head
from llmaas_plugins.short_prompts.encoder.outputs import Outputs
from llmaas_plugins.short_prompts.encoder.windows import windows_of
from llmaas_plugins.short_prompts.encoder.word_pieces import Pieces, WordPieces
from llmaas_plugins.short_prompts.scorer import Prompt
from llmaas_plugins.short_prompts.scorers.seconds import MeasuredSeconds

__all__ = ["EncoderScorer", "word_scores"]

_Found = TypeVar("_Found")

_RETAIN = 1
"""Row of the last layer that stands for keeping; the other one is 0."""
_FIRST_SECONDS = 3e-4
"""Seconds a token until a prompt was measured."""


class EncoderScorer(forks.Forked):
    """Scorer that runs a trained encoder, which is loaded when the first prompt comes.

    An encoder that is trained again is loaded again. Any thread may use the scorer; prompts are
    scored one after the other. A forked child uses its own copy, in a thread of its own: OpenMP
    would make the thread that forked wait for helpers that only the parent has. So scores need no
    ``n_threads_batch=1`` there, as the app's own model does (docs/explanation/engine.md, Forks).
    """

    uses_model = False
    comes_first = True  # a prompt that is being scored may wait for the work of others

    def __init__(self, path: Path, n_threads: int = 0) -> None:
        """Take a file of ``llmaas prompts learn``.

        Args:
            path: Path of the file.
            n_threads: Number of threads; 0 takes those with which the model reads prompts.
        """
        self._path, self._n_threads = path, n_threads
        self._lock = forks.lock()
        self._loaded: _Loaded | None = None
        self._thread = ThreadPoolExecutor(1) if forks.is_child() else None
        self._is_closed = False
        self._seconds = MeasuredSeconds(_FIRST_SECONDS)
        forks.watch(self)

    def scores(self, prompt: Prompt, llama: Any) -> NDArray[np.float32]:
        """Return the probability that each word is worth keeping, shape ``(n_words,)``.

        Words of blanks get 0.

        Raises:
            ConfigError: The file is damaged.
            StoreError: The file cannot be read.
            LlmaasError: The scorer is closed, or llama.cpp reports an error.
        """
        with self._lock:
            loaded = self._load()
            n_threads = self._n_threads or int(llama.n_threads_batch)
            started = time.perf_counter()
            found = self._run(lambda: loaded.scores(prompt.words, n_threads))
            self._seconds.add(len(prompt.tokens), time.perf_counter() - started)
        return found

    @property
    def identity(self) -> str:
        """Name of the file, and of its state."""
        stamp = FileStamp.at(self._path)
        return f"{self._path.stem} {0 if stamp is None else stamp.mtime_ns}"

    def seconds(self, n_tokens: int) -> float | None:
        """Return about how long a prompt of so many tokens takes."""
        return self._seconds.at(n_tokens)

    def unload(self) -> None:
        """Free the encoder until the next prompt comes."""
        with self._lock:
            if self._loaded is not None:
                self._run(self._loaded.outputs.close)
                self._loaded = None

    def close(self) -> None:
        """Free the encoder for ever; closing it again does nothing."""
        with self._lock:
            self._is_closed = True
            self.unload()

    def before_fork(self) -> None:
        """Wait for the prompt that is being scored: a child could not finish it."""
        self._lock.acquire()
        if self._thread is not None:
            self._thread.submit(int).result()  # after what Ctrl-C may have left in the thread

    def after_fork(self, *, in_child: bool) -> None:
        """Go on, in the parent and in the child."""
        if in_child:
            self._thread = ThreadPoolExecutor(1)
        self._lock.release()

    # -- inside ---------------------------------------------------------------------------------

    def _load(self) -> _Loaded:
        if self._is_closed:
            raise LlmaasError(f"the encoder {self._path} is closed; activate the suite again.")
        former = self._loaded
        if former is None or former.stamp != FileStamp.at(self._path):
            self._loaded = _Loaded.read(self._path)
            if former is not None:
                self._run(former.outputs.close)
        assert self._loaded is not None
        return self._loaded

    def _run(self, work: Callable[[], _Found]) -> _Found:
        """Do work where it may use OpenMP. Ctrl-C does not end what a child's thread has begun."""
        if self._thread is None:
            return work()
        return self._thread.submit(contextvars.copy_context().run, work).result()


def word_scores(values: NDArray[np.float32], pieces: Pieces) -> NDArray[np.float32]:
    """Return the mean of each word's pieces; 0 for a word that has none.

    Args:
        values: A number for each piece.
        pieces: Pieces of the words.
    """
    counts = np.diff(pieces.starts)
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    totals = sums[pieces.starts[1:]] - sums[pieces.starts[:-1]]
    return (totals / np.maximum(counts, 1)).astype(np.float32)


# -- inside --------------------------------------------------------------------------------------


class _Loaded:
    """Encoder in memory.

    Attributes:
        outputs: The encoder as llama.cpp runs it.
        stamp: State of the file before it was read.
    """

    def __init__(self, path: Path) -> None:
        self.stamp = FileStamp.at(path)
        file = EncoderFile.read(path)
        self._words = WordPieces(file.vocabulary)
        self._direction, self._offset = _difference(file.head)
        self._n_positions = file.n_positions
        self.outputs = Outputs(path, file.n_positions, 1)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Load an encoder; again if its file was replaced between our reading and llama.cpp's."""
        while (found := cls(path)).stamp != FileStamp.at(path):
            found.outputs.close()
        return found

    def scores(self, words: Sequence[str], n_threads: int) -> NDArray[np.float32]:
        self.outputs.use_threads(n_threads)
        pieces = self._words.of(words)
        values = np.empty(len(pieces.ids), np.float32)
        ids = np.empty(self._n_positions, np.int32)
        ids[0] = self._words.begin
        for window in windows_of(len(pieces.ids), self._n_positions - 2):
            request_scope.check()
            n = window.end - window.start
            ids[1 : n + 1] = pieces.ids[window.start : window.end]
            ids[n + 1] = self._words.end
            rows = self.outputs.of(ids[: n + 2])[1 : n + 1]
            own = rows[window.first - window.start : window.last - window.start]
            values[window.first : window.last] = own @ self._direction + self._offset
        return word_scores(1 / (1 + np.exp(-values.clip(-50, 50))), pieces)


def _difference(head: Head) -> tuple[NDArray[np.float32], float]:
    """Return the direction and the offset of the log-odds of keeping.

    Raises:
        LlmaasError: The last layer does not choose between two classes.
    """
    if len(head.bias) != 2:
        raise LlmaasError(
            f"the encoder has {len(head.bias)} outputs, expected 2: drop a word, or keep it. "
            "`llmaas prompts learn` makes such an encoder."
        )
    weight = head.weight[_RETAIN] - head.weight[1 - _RETAIN]
    return weight, float(head.bias[_RETAIN] - head.bias[1 - _RETAIN])
