"""Which tokens of ``Llama``'s batches give logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llmaas_patches.engine import N_OUTPUTS
from llmaas_patches.host import Host

__all__ = ["wrap_set_batch"]


def wrap_set_batch(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    """``LlamaBatch.set_batch``: mark more than the last token if a plugin asked for it."""
    listens = host.hooks.listens("llmaas_request_begin")

    @functools.wraps(original)
    def set_batch(self: Any, batch: Sequence[int], *args: Any, **kwargs: Any) -> None:
        original(self, batch, *args, **kwargs)
        if listens and (n_outputs := getattr(self, N_OUTPUTS, 1)) > 1:
            for i in range(max(0, len(batch) - n_outputs), len(batch)):
                self.batch.logits[i] = True

    return set_batch
