"""Drafts on an engine without the suite: every row of small batches is kept by hand."""

from __future__ import annotations

from llmaas_plugins.knn_lm.drafts import attachment


def attach(llama, draft):
    """Attach ``draft`` as the plugin does, to an engine that no patch serves."""

    def keep_rows(wants):
        set_batch = llama._batch.set_batch

        def with_rows(batch, n_past, logits_all):
            set_batch(batch, n_past, logits_all or wants(len(batch)))

        llama._batch.set_batch = with_rows

    attachment.attach(llama, draft, keep_rows)
