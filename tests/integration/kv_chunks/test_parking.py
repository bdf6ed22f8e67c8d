"""Contexts that come back from spare cells: the same cells, so the same logits.

Equal bits need the same cells in the same places, and batches split alike. New tokens of a
context that came back lie behind the cells of other contexts, so sums are taken in another order.
Tests compare this rounding with vanilla's own, between its two ways to compute attention or
between two batch splits.
"""

from __future__ import annotations

import itertools

import llama_cpp
import numpy as np
import pytest
from families import write_family
from interrupting import Interruption
from parks import Parks
from switching import ENDINGS, OTHER, PROMPT, SYSTEM, ask

from llmaas_hooks import hookimpl
from llmaas_patches import engine as engine_module

Q8_0 = llama_cpp.GGML_TYPE_Q8_0
SETTINGS = {
    "f16": {},
    "flash attention": {"flash_attn": True},
    "q8_0": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
    "small batches": {"n_batch": 32},
}
OTHERWISE = {"n_batch": 7}
N_THEN = 8
RNG = np.random.default_rng(11)


@pytest.fixture(params=SETTINGS)
def settings(request):
    return SETTINGS[request.param]


@pytest.fixture
def parks(patched):
    def start(**kwargs):
        plugin = Parks(**kwargs)
        patched(parks=plugin)
        return plugin

    return start


def blob(llama):
    """Return the cells of sequence 0, as the engine exports them."""
    size = llama_cpp.llama_state_seq_get_size(llama.ctx, 0)
    found = (llama_cpp.ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(llama.ctx, found, size, 0) == size
    return bytes(found)


def follow(llama, prompt, tokens):
    """Return the logits of a given continuation, which rounding cannot change."""
    rows = []
    for i in range(len(tokens)):
        _, row = ask(llama, [*prompt, *tokens[: i + 1]], 1)
        rows.append(row[0])
    return np.array(rows)


def test_the_cells_that_come_back_are_those_that_left(make, parks, settings):
    plugin = parks()
    llama = make(**settings)
    answer, _ = ask(llama, PROMPT, 4)
    left = blob(llama)
    ask(llama, OTHER, 6)
    restored = [*PROMPT, *answer[:-1]]
    generator = llama.generate([*restored, *ENDINGS[0]], temp=0.0)
    next(generator)
    llama._ctx.kv_cache_seq_rm(0, len(restored), -1)
    assert blob(llama) == left  # every bit of every key and value
    generator.close()
    assert plugin.parking.stats()["taken_tokens"] == len(restored)


def test_logits_are_vanillas_to_the_bit_while_the_places_are(make, parks, settings):
    """The parked context is last in the cells, and the context after it leaves no trace."""
    vanilla = make(**settings)
    answer, _ = ask(vanilla, PROMPT, 4)
    grown = [*PROMPT, *answer[:-1], *ENDINGS[0]]
    expected = ask(vanilla, grown, N_THEN)[1]
    plugin = parks()
    llama = make(**settings)
    ask(llama, PROMPT, 4)
    ask(llama, OTHER, 4)
    # back, while the other context keeps nothing: its cells are free again
    resident, plugin.parking._park = plugin.parking._park, lambda *_: None
    found = ask(llama, grown, N_THEN)[1]
    plugin.parking._park = resident
    assert plugin.parking.stats()["takes"] == 1
    assert np.array_equal(found, expected)


def test_logits_beside_parked_cells_are_as_near_as_vanillas_own(make, parks, settings):
    answer = ask(make(**settings), PROMPT, 4)[0]
    grown = [*PROMPT, *answer[:-1]]
    vanilla = make(**settings)
    ask(vanilla, PROMPT, 4)
    expected = follow(vanilla, grown, ENDINGS[0])
    is_f16 = "type_k" not in settings
    other = make(
        **settings | ({"flash_attn": "flash_attn" not in settings} if is_f16 else OTHERWISE)
    )
    ask(other, PROMPT, 4)
    spread = np.abs(follow(other, grown, ENDINGS[0]) - expected).max()
    plugin = parks()
    llama = make(**settings)
    ask(llama, PROMPT, 4)
    ask(llama, OTHER, 4)
    found = follow(llama, grown, ENDINGS[0])
    assert plugin.parking.stats()["takes"] == 1
    assert plugin.parking.n_cells > 0
    assert np.abs(found - expected).max() <= 2 * spread


def test_contexts_that_begin_alike_share_what_is_alike(make, parks):
    plugin = parks()
    llama = make()
    ask(llama, PROMPT, 1)
    ask(llama, OTHER, 1)
    assert plugin.parking.n_cells == len(PROMPT)
    ask(llama, [1, 500, 501], 1)
    assert plugin.parking.n_cells == len(PROMPT) + len(OTHER) - len(SYSTEM)
    ask(llama, PROMPT, 1)
    assert plugin.parking.stats()["takes"] == 1


def test_a_full_context_finds_room_whatever_is_parked(make, parks):
    """Conversations fill all of ``n_ctx`` in turn, in ever more fragmented cells."""
    plugin = parks()
    llama = make()
    talks = [[*SYSTEM, *RNG.integers(300, 4000, 100).tolist()] for _ in range(3)]
    for turn in range(12):
        talk = talks[(0, 1, 0, 2)[turn % 4]]
        talk += RNG.integers(300, 4000, 28 if len(talk) < 226 else 0).tolist()
        answer, _ = ask(llama, talk, 256 - len(talk) if turn > 8 else 3)
        talk += answer[:-1]
        assert plugin.parking.n_cells <= 256
    assert plugin.parking.stats()["takes"] >= 1


def test_cells_that_nobody_explains_are_not_parked(make, parks):
    """Images or the app's own batches fill cells that Llama's books do not describe."""
    plugin = parks()
    llama = make()
    ask(llama, PROMPT, 1)
    llama._ctx.kv_cache_seq_rm(0, 40, -1)
    ask(llama, [1, 500, 501], 1)
    assert plugin.parking.n_cells == 40
    ask(llama, OTHER, 1)
    llama._ctx.kv_cache_seq_rm(0, 50, -1)
    token = (llama_cpp.llama_token * 1)(7)  # the batch holds its address only
    batch = llama_cpp.llama_batch_get_one(token, 1)
    for _ in range(len(OTHER) - 50):  # the prompt's cells
        assert llama_cpp.llama_decode(llama.ctx, batch) == 0
    ask(llama, [2, 500, 501], 1)
    assert plugin.parking.n_cells == 0


class CutOff(Parks):
    """Plugin whose next restore ends in Ctrl-C after the switch, its clean-up in another one.

    Attributes:
        interruption: Interruption of the clean-up; None lets restores end normally.
    """

    interruption = None

    @hookimpl
    def llmaas_kv_restore(self, request):
        restored = super().llmaas_kv_restore(request)
        if self.interruption is None:
            return restored
        self.interruption.__enter__()
        raise KeyboardInterrupt


def test_a_restore_that_is_cut_off_leaves_no_cells(make, patched):
    """The next request drops them if Ctrl-C comes again before the clean-up has ended."""
    prompts = [PROMPT, OTHER, [*PROMPT, *ENDINGS[0]]]
    vanilla = make()
    expected = [ask(vanilla, prompt, 3)[0] for prompt in prompts]
    plugin = CutOff()
    patched(parks=plugin)
    llama = make()
    memory = llama_cpp.llama_get_memory(llama.ctx)
    for n in itertools.count(1):
        for prompt, answer in zip(prompts, expected, strict=True):
            assert ask(llama, prompt, 3)[0] == answer
        assert plugin.engine.parked
        plugin.interruption = Interruption(n, engine_module)
        with pytest.raises(KeyboardInterrupt):
            ask(llama, OTHER, 1)
        plugin.interruption.__exit__(None, None, None)
        if not plugin.interruption.came:
            break
        plugin.interruption = None
    assert n > 10
    assert not plugin.engine.parked
    ends = [llama_cpp.llama_memory_seq_pos_max(memory, i) for i in range(plugin.engine.n_seq_max)]
    assert set(ends) == {-1}


@pytest.mark.parametrize("name", ["gemma3", "phi3"])
def test_models_with_two_kinds_of_cells(name, make, parks, tmp_path):
    """A sliding window has no room for parked contexts; everything else works as usual."""
    from switching import Conversation

    conversation = Conversation(write_family(name, tmp_path / "model.gguf"))
    answer, expected = conversation.vanilla()
    plugin = parks()
    with conversation.open() as llama:
        assert conversation.first(llama) == answer
        found = conversation.second(llama, answer)
        has_window = llama_cpp.llama_model_n_swa(llama.model) > 0
        assert (plugin.engine.n_spare == 0) == has_window
        assert plugin.parking.stats()["takes"] == (0 if has_window else 1)
    assert np.abs(found - expected[0]).max() < 0.1 * expected[0].std()
