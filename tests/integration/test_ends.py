"""Ends leave an engine as vanilla does: of a request that is left early, and of an activation."""

from __future__ import annotations

import contextlib

import pytest
from datastores import ENGINE, built
from llama_cpp import Llama, llama_cpp

from llmaas_plugins import activate

START = "David feeds Bruno at seven, before the boat leaves and the sun comes up over the harbor. "
PROMPT = START * 3 + "David feeds Bruno at seven, before the boat"
OTHER = "Some other text about mail and calendars, which is long enough for it. " * 3


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, which repeats itself, so that drafts are accepted."""
    return packaged_model


def opened(model, **settings):
    return contextlib.closing(Llama(str(model), **(ENGINE | settings)))


def going_on(llama, n):
    """Leave a reply after ``n`` tokens; return what the engine holds, and how the app goes on."""
    llama.reset()
    replies = llama.generate(llama.tokenize(PROMPT.encode()), temp=0.0)
    said = [token for _, token in zip(range(n), replies, strict=False)]
    replies.close()
    held = llama.n_tokens, llama.save_state().n_tokens, llama._input_ids.tolist()
    more = [said[-1], *llama.tokenize(b" and then the", add_bos=False)]
    rest = llama.generate(more, temp=0.0, reset=False)
    return said, held, [token for _, token in zip(range(6), rest, strict=False)]


def test_tokens_that_were_only_proposed_are_dropped(reference_model, tmp_path):
    lengths = range(1, 24, 2)
    with opened(reference_model) as llama:
        expected = [going_on(llama, n) for n in lengths]
    store = built(reference_model, tmp_path / "knn")
    table = {"store": str(store), "drafts": True, "mix": False}
    config = {"on_error": "raise", "plugins": {"knn_lm": table}}
    with activate(config) as suite, opened(reference_model) as llama:
        assert [going_on(llama, n) for n in lengths] == expected
        assert suite.status()["plugins"]["knn_lm"]["accepted"] > 0


def test_no_parked_cells_are_left_when_the_suite_ends(light_model, tmp_path):
    table = {"store": str(tmp_path), "codec": "lossless", "parked_tokens": 512}
    suite = activate({"on_error": "raise", "plugins": {"kv_chunks": table}})
    with opened(light_model) as llama:
        for text in (PROMPT, OTHER, PROMPT, OTHER):
            llama.create_completion(text, max_tokens=4, temperature=0.0)
        suite.settle()
        parks = suite.status()["plugins"]["kv_chunks"]["parks"]
        suite.deactivate()
        memory = llama_cpp.llama_get_memory(llama.ctx)
        n_sequences = llama_cpp.llama_n_seq_max(llama.ctx)
        ends = [llama_cpp.llama_memory_seq_pos_max(memory, i) for i in range(n_sequences)]
    assert parks
    assert n_sequences > 1
    assert ends[0] > 0
    assert set(ends[1:]) == {-1}
