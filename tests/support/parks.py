"""A plugin that parks contexts and keeps nothing else."""

from __future__ import annotations

import weakref

import llama_cpp

from llmaas_hooks import KVRestored, hookimpl
from llmaas_plugins.kv_chunks.eligibility import spare_cells
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES


class Parks:
    """Plugin that gives every context spare cells and parks leftover cells in them.

    Attributes:
        engine: Engine of the last request.
        parking: Parked contexts of the last request.
    """

    def __init__(self, n_spare=256):
        self.n_spare = n_spare
        self.engine = self.parking = None
        self._parkings = weakref.WeakKeyDictionary()

    @hookimpl
    def llmaas_context_create(self, create):
        params = create.params
        n_ctx = params.n_ctx or llama_cpp.llama_model_n_ctx_train(create.model)
        params.n_ctx = n_ctx + spare_cells(create, self.n_spare)
        params.n_seq_max, params.kv_unified = PARKED_SEQUENCES.stop, True

    @hookimpl
    def llmaas_kv_restore(self, request):
        self.engine = engine = request.engine
        self.parking = self._parkings.get(engine) or ParkedContexts(engine)
        self._parkings[engine] = self.parking
        resident = engine.resident_tokens()[: engine.n_explained]
        taken = self.parking.switch(request.tokens, resident)
        return None if taken is None else KVRestored(taken.n_tokens, taken.n_tokens)
