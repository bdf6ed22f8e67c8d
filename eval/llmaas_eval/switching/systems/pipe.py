"""Buffers between an engine and a file, and threads that fill or empty them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llmaas_plugins.kv_chunks.store.huge_pages import map_huge_pages

__all__ = ["N_BUFFERS", "Pipe", "open_direct", "read_at", "write_at"]

N_BUFFERS = 4

_P = TypeVar("_P")


class Pipe:
    """``N_BUFFERS`` buffers and as many threads. Only the caller's thread uses the engine."""

    def __init__(self, buffer_bytes: int) -> None:
        """Allocate the buffers; ``buffer_bytes`` must be a multiple of the page size."""
        self._whole = map_huge_pages(N_BUFFERS * buffer_bytes)
        self._buffers = self._whole.reshape(N_BUFFERS, buffer_bytes)
        self._pool = ThreadPoolExecutor(N_BUFFERS)

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """One of the buffers, for use while no transfer runs."""
        return self._buffers[0]

    def load(
        self,
        pieces: Sequence[_P],
        fill: Callable[[_P, NDArray[np.uint8]], None],
        take: Callable[[_P, NDArray[np.uint8]], None],
        *,
        in_this_thread: bool = False,
    ) -> None:
        """Let threads ``fill`` buffers with pieces, and ``take`` the pieces here, in order.

        With ``in_this_thread`` the caller's thread does both, where handing over costs more than it
        saves.
        """
        if in_this_thread:
            for piece in pieces:
                fill(piece, self.buffer)
                take(piece, self.buffer)
            return
        jobs = deque(
            self._pool.submit(fill, piece, buffer)
            for piece, buffer in zip(pieces, self._buffers, strict=False)
        )
        for i, piece in enumerate(pieces):
            buffer = self._buffers[i % N_BUFFERS]
            jobs.popleft().result()
            take(piece, buffer)
            if i + N_BUFFERS < len(pieces):
                jobs.append(self._pool.submit(fill, pieces[i + N_BUFFERS], buffer))

    def store(
        self,
        pieces: Sequence[_P],
        give: Callable[[_P, NDArray[np.uint8]], None],
        empty: Callable[[_P, NDArray[np.uint8]], None],
    ) -> None:
        """Give pieces to buffers here, let threads ``empty`` them, and wait for all threads."""
        jobs: deque[Future[None]] = deque()
        for i, piece in enumerate(pieces):
            if len(jobs) == N_BUFFERS:
                jobs.popleft().result()
            buffer = self._buffers[i % N_BUFFERS]
            give(piece, buffer)
            jobs.append(self._pool.submit(empty, piece, buffer))
        for job in jobs:
            job.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def open_direct(path: Path, n_bytes: int) -> int:
    """Open a new file of ``n_bytes``, past the page cache if possible; return its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # some file systems, such as tmpfs, lack O_DIRECT
        file = os.open(path, flags, 0o600)
    os.ftruncate(file, n_bytes)
    return file


def read_at(file: int, offset: int, out: NDArray[np.uint8]) -> None:
    """Fill ``out``, whole pages, from the file at ``offset``."""
    n_bytes = os.preadv(file, [out.data], offset)
    if n_bytes != out.nbytes:
        raise OSError(f"read {n_bytes} bytes at {offset}, expected {out.nbytes}")


def write_at(file: int, offset: int, values: NDArray[np.uint8]) -> None:
    """Write all of ``values``, whole pages, to the file at ``offset``."""
    n_bytes = os.pwritev(file, [values.data], offset)
    if n_bytes != values.nbytes:
        raise OSError(f"wrote {n_bytes} bytes at {offset}, expected {values.nbytes}")
