"""Contexts in an app: shared, deleted, kept over restarts, and left alone."""

from __future__ import annotations

import math

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from talks import CHAT, FOREIGN, MAIL, MODEL, SYSTEM, ask, report, store_of

from llmaas_hooks import PluginError, serving_context
from llmaas_plugins import activate
from llmaas_plugins._native import Codec, chunk_peek
from llmaas_plugins.kv_chunks import context_records
from llmaas_plugins.kv_chunks.store.chunk_ids import CHUNK_TOKENS
from llmaas_plugins.kv_chunks.store.disk_store import DiskStore


def n_chunks(n_tokens):
    return math.ceil(n_tokens / CHUNK_TOKENS)


# -- sharing and deleting -----------------------------------------------------------------------


def test_shared_prefix_is_stored_once(make, suite):
    active = suite()
    llama = make()
    ask(llama, CHAT, 1, "chat")
    alone = report(active)
    ask(llama, MAIL, 1, "mail")
    both = report(active)
    n_shared = len(SYSTEM) // CHUNK_TOKENS
    assert alone["chunks"] == n_chunks(len(CHAT))
    assert both["chunks"] == n_chunks(len(CHAT)) + n_chunks(len(MAIL)) - n_shared
    assert both["contexts"] == 2
    chunks = list(store_of(active).tree)
    assert both["disk_bytes"] == both["ram_bytes"] == sum(-(-c.size // 4096) for c in chunks) * 4096
    llama.close()


def n_working(suite, llama, prompt):
    """Return the tokens in the working set while a prompt is answered."""
    generator = llama.generate(prompt, temp=0.0)
    next(generator)
    (chunks,) = store_of(suite)._residency._working.values()
    generator.close()
    return sum(chunk.n_tokens for chunk in chunks)


def test_the_chunks_of_the_running_context_leave_ram_last(make, suite):
    """Whether the prompt begins with few of the context's tokens, with most, or is new."""
    active = suite()
    llama = make()
    assert n_working(active, llama, CHAT) == 0
    for n in (0, 3, 40):
        assert n_working(active, llama, [*CHAT, *FOREIGN[:n]]) >= len(CHAT)
    assert n_working(active, llama, MAIL) == len(SYSTEM)
    llama.reset()
    assert n_working(active, llama, [2, *FOREIGN[:4]]) == 0
    llama.close()


def test_deleted_context_frees_its_own_part_only(make, suite):
    active = suite()
    llama = make()
    expected = ask(llama, MAIL, context_id="mail")
    ask(llama, CHAT, context_id="chat")
    before = report(active)
    assert active.evict("unknown") == 0
    freed = active.evict("chat")
    after = report(active)
    assert freed > 0
    assert after["contexts"] == 1
    assert after["chunks"] == before["chunks"] - n_chunks(len(CHAT) + 5) + len(SYSTEM) // 16
    assert after["disk_bytes"] == after["ram_bytes"] < before["disk_bytes"]
    assert active.evict("chat") == 0
    ask(llama, FOREIGN, 1)
    assert ask(llama, MAIL, context_id="mail") == expected
    assert report(active)["restored_tokens"] == len(MAIL)
    llama.close()


def test_deleted_context_does_not_come_back(make, suite):
    active = suite()
    llama = make()
    ask(llama, CHAT, context_id="chat")
    active.evict("chat")
    llama.close()
    active = suite()
    llama = make()
    ask(llama, CHAT)
    found = report(active)
    assert (found["restores"], found["contexts"]) == (0, 0)
    llama.close()


def test_a_request_that_is_open_in_a_deleted_context_stores_nothing(make, suite):
    active = suite()
    llama = make()
    with serving_context("chat"):
        generator = llama.generate(CHAT, temp=0.0)
    next(generator)
    active.evict("chat")
    generator.close()
    found = report(active)
    assert (found["contexts"], found["chunks"]) == (0, 0)
    llama.close()


def test_contexts_survive_the_process(make, suite):
    expected = {}
    suite()
    llama = make()
    for name, prompt in (("chat", CHAT), ("mail", MAIL)):
        expected[name] = ask(llama, prompt, context_id=name)
    llama.close()
    active = suite()
    llama = make()
    assert ask(llama, CHAT, context_id="chat") == expected["chat"]
    assert ask(llama, MAIL, context_id="mail") == expected["mail"]
    found = report(active)
    assert found["contexts"] == 2
    assert found["restores"] == 2
    assert found["reused_tokens"] == len(CHAT) + len(MAIL)
    assert active.evict("mail") > 0
    llama.close()


def test_only_the_first_request_waits_until_a_model_is_identified(make, suite, monkeypatch):
    waits, loads = [], []

    def unknown(_llama, load, *, wait_s, **_):
        waits.append(wait_s)
        loads.append(load)

    with suite() as active:
        llama = make()
        with monkeypatch.context() as patch:
            patch.setattr(context_records, "cell_identity", unknown)
            for _ in range(2):
                ask(llama, CHAT)
            active.settle()
        assert waits == [2.0, 0.0, 0.0, 0.0]  # restore, save, restore, save
        context_records.cell_identity(llama, loads[0], rotation_off=False)  # reads the file
        ask(llama, CHAT)
        assert report(active)["saves"] == 1


def test_short_prompts_are_not_worth_a_chunk(make, suite):
    active = suite()
    llama = make()
    ask(llama, FOREIGN[:10], 2)
    assert report(active)["chunks"] == 0
    llama.close()


def test_continued_answer_is_part_of_the_context(make, suite):
    active = suite()
    llama = make()
    answer = ask(llama, CHAT, 20)
    ask(llama, FOREIGN, 1)
    expected = ask(llama, [*CHAT, *answer], 5)
    assert report(active)["restored_tokens"] == len(CHAT) + 19
    ask(llama, FOREIGN, 1)
    assert ask(llama, [*CHAT, *answer], 5) == expected
    llama.close()


def test_deleting_without_a_single_context_is_fine(suite):
    assert suite().evict("nobody") == 0


# -- what is left alone -------------------------------------------------------------------------


def test_embedding_contexts_stay_vanilla(make, suite, caplog):
    text = "A boat sailed out of the harbor and never came back to it, however long they waited."
    expected = make(embedding=True).embed(text)
    active = suite()
    llama = make(embedding=True)
    n_seq_max = llama_cpp.llama_n_seq_max(llama.ctx)
    assert llama.embed(text) == expected
    assert active.status()["plugins"]["kv_chunks"]["left_alone"] == [f"{MODEL}: embedding context"]
    assert f"kv_chunks does not serve a context: {MODEL}: embedding context" in caplog.text
    llama.close()
    active.deactivate()
    assert llama_cpp.llama_n_seq_max(make(embedding=True).ctx) == n_seq_max


def test_contexts_with_sequences_of_their_own_stay_vanilla(make, suite):
    active = suite()
    llama = make()
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = 256, 3
    ctx = llama_cpp.llama_init_from_model(llama.model, params)
    assert llama_cpp.llama_n_seq_max(ctx) == 3
    llama_cpp.llama_free(ctx)
    left_alone = active.status()["plugins"]["kv_chunks"]["left_alone"]
    assert left_alone == [f"{MODEL}: the app itself uses 3 sequences"]
    llama.close()


@pytest.mark.slow
def test_logits_of_prompt_tokens_stay_vanilla(make, suite):
    def log_probabilities(llama):
        ask(llama, CHAT, 2)
        ask(llama, FOREIGN, 2)
        prompt = llama.detokenize(CHAT[1:]).decode(errors="replace")
        answer = llama(prompt, max_tokens=2, temperature=0, logprobs=1, echo=True)
        return answer["choices"][0]["logprobs"]["token_logprobs"]

    expected = log_probabilities(make(logits_all=True))
    active = suite()
    llama = make(logits_all=True)
    assert log_probabilities(llama) == expected
    assert active.status()["plugins"]["kv_chunks"]["left_alone"] == []
    llama.close()


def test_speculative_decoding_goes_on_as_vanilla(make, suite):
    def answers(llama):
        return [ask(llama, prompt, 12) for prompt in (CHAT, FOREIGN, CHAT)]

    draft = LlamaPromptLookupDecoding(num_pred_tokens=4)
    expected = answers(make(draft_model=draft))
    active = suite()
    llama = make(draft_model=draft)
    assert answers(llama) == expected
    assert active.status()["plugins"]["kv_chunks"]["restored_tokens"] > 0
    llama.close()


def test_contexts_made_before_activation_stay_vanilla(make, suite):
    llama = make()
    expected = [ask(llama, prompt) for prompt in (CHAT, FOREIGN, CHAT)]
    active = suite()
    assert [ask(llama, prompt) for prompt in (FOREIGN, CHAT)] == expected[1:]
    found = active.status()["plugins"]["kv_chunks"]
    assert found["left_alone"] == [f"{MODEL}: its context was made before the activation"]
    assert found["restores"] == found["saves"] == 0


def test_contexts_outlive_the_suite(make, suite):
    active = suite()
    llama = make()
    expected = ask(llama, CHAT)
    active.deactivate()
    ask(llama, FOREIGN)
    assert ask(llama, CHAT) == expected


def test_store_in_use_by_another_process(make, tmp_path, suite):
    expected = ask(make(), CHAT)
    other = DiskStore(tmp_path / "kv", 1 << 20)
    active = suite()
    with pytest.raises(PluginError, match=r"is in use by this process already\. Stop it, or set "):
        make()
    other.close()
    llama = make()  # the server may be stopped while the app runs
    assert ask(llama, CHAT) == expected
    assert report(active)["chunks"] > 0
    llama.close()


@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_store_that_cannot_be_opened(make, tmp_path, caplog, on_error):
    expected = ask(make(), CHAT)
    (tmp_path / "kv").write_text("a file in the way")
    table = {"store": str(tmp_path / "kv")}
    with activate({"on_error": on_error, "plugins": {"kv_chunks": table}}) as suite:
        if on_error == "raise":
            with pytest.raises(PluginError, match=r"Set plugins\.kv_chunks\.store to a directory"):
                make()
            return
        llama = make()
        assert [ask(llama, prompt) for prompt in (CHAT, FOREIGN, CHAT)][2] == expected
        assert "Set plugins.kv_chunks.store to a directory you may write to" in caplog.text
        assert len(suite.status()["plugins"]["kv_chunks"]["left_alone"]) == 1
        llama.close()


# -- values no 8 bits can hold ------------------------------------------------------------------


def state(llama):
    n_bytes = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
    blob = (llama_cpp.ctypes.c_uint8 * n_bytes)()
    assert llama_cpp.llama_state_seq_get_data(llama.ctx, blob, n_bytes, 0) == n_bytes
    return np.frombuffer(blob, np.uint8)


def test_cells_that_are_not_finite_keep_every_bit(make, suite):
    active = suite(codec="int8")
    llama = make()
    generator = llama.generate(CHAT, temp=0.0)
    next(generator)
    cells = state(llama).copy()
    n_cells, cell = len(CHAT), 2 * CHUNK_TOKENS + 3
    first_k = 24 + 12 * n_cells + 12  # where the rows of the first layer's K begin
    row = cells[first_k + 256 * cell : first_k + 256 * (cell + 1)].view("<f2")
    row[5:8] = np.inf, -np.inf, np.nan
    put = llama_cpp.llama_state_seq_set_data.__wrapped__  # bypasses the suite
    pointer = cells.ctypes.data_as(llama_cpp.ctypes.POINTER(llama_cpp.ctypes.c_uint8))
    assert put(llama.ctx, pointer, cells.nbytes, 0) == cells.nbytes
    generator.close()
    store = store_of(active)
    path, _ = store.match(next(iter(store.tree)).id.parent, np.array(CHAT, np.int32))
    codecs = [chunk_peek(store._residency.ram.view(chunk.ram, chunk.size)).codec for chunk in path]
    assert codecs == [Codec.INT8, Codec.INT8, Codec.RAW, *[Codec.INT8] * 4]
    ask(llama, FOREIGN, 1)
    ask(llama, CHAT, 1)
    assert report(active)["restored_tokens"] == len(CHAT)
    found = state(llama)
    row_bytes = slice(first_k + 256 * 2 * CHUNK_TOKENS, first_k + 256 * 3 * CHUNK_TOKENS)
    assert np.array_equal(found[row_bytes], cells[row_bytes])
    assert not np.array_equal(found[first_k : row_bytes.start], cells[first_k : row_bytes.start])
    llama.close()
