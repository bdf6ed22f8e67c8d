"""Let more tokens of ``Llama``'s batches give logits, without the app noticing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llama_cpp import llama_cpp

from llmaas_patches.cell_tracker import address
from llmaas_patches.engine_state import OUTPUTS
from llmaas_patches.host import Host

__all__ = ["wrap_get_logits", "wrap_set_batch"]


def wrap_set_batch(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LlamaBatch.set_batch``: mark more tokens than the last if a plugin asked for it."""
    with_more = host.with_more_outputs

    @functools.wraps(original)
    def set_batch(self: Any, batch: Sequence[int], n_past: int, logits_all: bool) -> None:
        outputs = getattr(self, OUTPUTS, None)
        if outputs is None:
            original(self, batch, n_past, logits_all)
            return
        if outputs.wants is not None:
            logits_all = logits_all or outputs.wants(len(batch))
        original(self, batch, n_past, logits_all)
        has_more = logits_all and not outputs.app_reads_all
        if outputs.first is not None and not outputs.app_reads_all:
            for i in range(max(0, outputs.first - n_past), len(batch) - 1):
                self.batch.logits[i] = has_more = True
        (with_more.add if has_more else with_more.discard)(outputs.ctx)

    return set_batch


def wrap_get_logits(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``llama_get_logits``: return the last token's logits even if plugins asked for more."""
    with_more = host.with_more_outputs

    @functools.wraps(original)
    def llama_get_logits(ctx: Any) -> Any:
        if address(ctx) in with_more:
            return llama_cpp.llama_get_logits_ith(ctx, -1)
        return original(ctx)

    return llama_get_logits
