"""Labels of cells in sequence 0, beside requests that have sequences of their own."""

from __future__ import annotations

from llama_cpp import llama_cpp
from paired import PROMPTS, Pair

from llmaas_hooks import hookimpl


class Labeling(Pair):
    """Pair on an engine with one more sequence, which is a plugin's."""

    @hookimpl
    def llmaas_context_create(self, create):
        super().llmaas_context_create(create)
        create.params.n_seq_max += 1


def test_the_label_of_cells_in_sequence_0_is_not_that_of_a_seat(patched, make):
    """A request that has a sequence of its own changes no cells of sequence 0."""
    pair = Labeling()
    patched(pair=pair)
    pair.llama = make(n_ubatch=1)
    a, label, n_a = pair.both(3), 1, len(PROMPTS["a"])
    engine, seats = pair.seats["a"].engine, pair.seats
    memory = llama_cpp.llama_get_memory(engine.ctx)
    with engine.lent():
        llama_cpp.llama_memory_seq_cp(memory, 0, label, 0, n_a)
    engine.parked.add(label)
    engine.parked.current, engine.parked.n_current = label, n_a
    seats["a"].leave()
    seats["b"].enter()
    assert llama_cpp.llama_memory_seq_rm(memory, -1, 30, -1)  # b's cells
    assert llama_cpp._lib.llama_memory_seq_pos_max(memory, label) == n_a - 1
    assert (engine.parked.n_current, engine.n_explained) == (n_a, 30)
    pair.b.close()
    seats["a"].enter()
    a.close()
