"""An app on a bare context with spare cells, in which ``ParkedContexts`` parks others."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field

import llama_cpp
import numpy as np

from llmaas_eval.models import SHAPE_TINY
from llmaas_hooks import ParkedSequences, common_prefix
from llmaas_plugins.kv_chunks.parking.parked_contexts import ParkedContexts
from llmaas_plugins.kv_chunks.parking.sequences import PARKED_SEQUENCES

N_CTX, N_SPARE, N_TOGETHER = 256, 256, 64


def tokens(*pieces):
    return np.concatenate([np.zeros(0, dtype=np.int32), *pieces]).astype(np.int32)


@dataclass(eq=False)
class Engine:
    """The parts of an engine that ``ParkedContexts`` uses."""

    ctx: int
    n_spare: int = N_SPARE
    parked: ParkedSequences = field(default_factory=ParkedSequences)


class App:
    """An app that evaluates prompts as ``Llama`` does, on a context with spare cells."""

    def __init__(self, model, n_spare=N_SPARE):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = N_CTX + n_spare, N_TOGETHER
        params.n_seq_max, params.kv_unified = PARKED_SEQUENCES.stop, True
        params.n_threads = params.n_threads_batch = 1
        self.ctx = llama_cpp.llama_init_from_model(model, params)
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(N_TOGETHER, 0, 1)
        self.engine = Engine(self.ctx, n_spare)
        self.parking = ParkedContexts(self.engine)
        self.tokens, self.root = tokens(), b""

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.ctx)

    def ask(self, prompt, root=b""):
        """Evaluate a prompt; return how many tokens were brought back, or None."""
        left, self.root = self.root, root
        taken = self.parking.switch(prompt, self.tokens, root=root, resident_root=left)
        if taken is None and left != root:  # left by another app's prompt
            self.tokens = tokens()
        if taken is not None:
            self.tokens = prompt[: taken.n_tokens]
            assert self.positions(0) == list(range(taken.n_tokens))
        self.evaluate(prompt)
        return None if taken is None else taken.n_tokens

    def evaluate(self, prompt):
        n_kept = min(common_prefix(self.tokens, prompt), len(prompt) - 1)
        self.remove(n_kept)
        for start in range(n_kept, len(prompt), N_TOGETHER):
            self.decode(prompt[start : start + N_TOGETHER], start)
        self.tokens = prompt

    def remove(self, start):
        """Remove cells of sequence 0, as the host does."""
        parked = self.engine.parked
        if parked.current in parked and start < parked.n_current:
            assert llama_cpp.llama_memory_seq_rm(self.memory, parked.current, start, -1)
        assert llama_cpp.llama_memory_seq_rm(self.memory, 0, start, -1)

    def decode(self, piece, start):
        self.batch.n_tokens = len(piece)
        for i, token in enumerate(piece):
            self.batch.token[i], self.batch.pos[i] = int(token), start + i
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
            self.batch.logits[i] = False
        self.batch.logits[len(piece) - 1] = True
        assert llama_cpp.llama_decode(self.ctx, self.batch) == 0

    def cells(self):
        """Return position and sequences of each used cell."""
        blob = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(self.ctx))()
        assert llama_cpp.llama_state_get_data(self.ctx, blob, len(blob)) == len(blob)
        blob = bytes(blob)
        at = 4 + struct.unpack_from("<I", blob)[0]  # after the architecture's name
        n_streams, n_cells = struct.unpack_from("<II", blob, at)
        assert n_streams == 1
        at, found = at + 8, []
        for _ in range(n_cells):
            position, n = struct.unpack_from("<iI", blob, at)
            found.append((position, set(struct.unpack_from(f"<{n}i", blob, at + 8))))
            at += 8 + 4 * n
        return found

    def positions(self, sequence):
        return sorted(position for position, labels in self.cells() if sequence in labels)

    def check(self):
        """Assert both rules of ``ParkedContexts``, and the content of sequences."""
        cells = self.cells()
        current = self.engine.parked.current
        n_parked = sum(bool(labels - {0, current}) for _, labels in cells)
        kept = self.positions(current)
        assert kept == list(range(len(kept)))
        assert not any(current in labels and 0 not in labels for _, labels in cells)
        assert n_parked == self.parking.n_cells <= self.engine.n_spare
        assert self.positions(0) == list(range(len(self.tokens)))
        contexts = self.parking._contexts
        assert {parked.sequence for parked in contexts} == self.engine.parked.others()
        assert len(contexts) < len(PARKED_SEQUENCES)
        for parked in contexts:
            assert self.positions(parked.sequence) == list(range(len(parked.tokens)))

    def keys(self, sequence=0):
        """Return a sequence's keys by position; they depend on token and position alone."""
        blob = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(self.ctx, sequence))()
        llama_cpp.llama_state_seq_get_data(self.ctx, blob, len(blob), sequence)
        blob = bytes(blob)
        (n_cells,) = struct.unpack_from("<I", blob, 12)
        cells = np.frombuffer(blob, "<i4", 3 * n_cells, 16).reshape(n_cells, 3)
        start = 16 + 12 * n_cells + 8 + 12  # V's order, layers; the keys' type and row
        n = SHAPE_TINY.n_head_kv * SHAPE_TINY.head_dim
        keys = np.frombuffer(blob, "<f2", n_cells * n, start).reshape(n_cells, n)
        return keys[np.argsort(cells[:, 0])]
