"""Processes that train together: one alone, or those that ``torchrun`` started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

__all__ = ["Workers", "workers"]

_PATIENCE = timedelta(hours=12)
"""Longest time to wait for the first worker, which alone judges a level and writes files."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Group of processes that train one model.

    Attributes:
        rank: Index of this process.
        n: Number of processes.
    """

    rank: int = 0
    n: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that reads and writes files, and prints."""
        return self.rank == 0

    def share(self, *tensors: Tensor) -> None:
        """Overwrite the tensors with the first worker's; they have equal shapes everywhere."""
        if self.n > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, 0)

    def shared(self, windows: NDArray[np.int32] | None) -> NDArray[np.int32]:
        """Return the first worker's windows; the other workers may give None."""
        if self.n == 1 and windows is not None:
            return windows
        shape = torch.tensor((0, 0) if windows is None else windows.shape)
        self.share(shape)
        found = torch.zeros(tuple(shape.tolist()), dtype=torch.int32)
        if windows is not None:
            found.copy_(torch.from_numpy(windows))
        self.share(found)
        return found.numpy()

    def together(self, module: nn.Module) -> Any:
        """Return the module; with several workers, its gradients are their mean."""
        return module if self.n == 1 else nn.parallel.DistributedDataParallel(module)


@contextlib.contextmanager
def workers() -> Iterator[Workers]:
    """Join the processes that ``torchrun`` started, for the block; without it, work alone."""
    n = int(os.environ.get("WORLD_SIZE", "1"))
    if n == 1:
        yield Workers()
        return
    distributed.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Workers(distributed.get_rank(), n)
    finally:
        distributed.destroy_process_group()
