"""An app's view of a context in which others are parked: the view that vanilla would give."""

from __future__ import annotations

import ctypes
import functools
import struct

import llama_cpp
import numpy as np
import pytest
from parks import Parks
from switching import ENDINGS, OTHER, PROMPT, ask

RNG = np.random.default_rng(4)
FOREIGN = [1, *np.random.default_rng(3).integers(300, 4000, 60).tolist()]
REAL = (llama_cpp.llama_n_ctx, llama_cpp.llama_n_seq_max, llama_cpp.llama_state_get_size)
"""The original bindings; their names are patched while plugins are on."""
SIZES = {
    name: getattr(llama_cpp, name)
    for name in ("llama_n_ctx", "llama_n_ctx_seq", "llama_n_batch", "llama_n_ubatch")
}


@pytest.fixture
def parks(patched):
    plugin = Parks()
    patched(parks=plugin)
    return plugin


@pytest.fixture
def llama(parks, make):
    """Return an engine with one context parked behind the one in use."""
    llama = make()
    ask(llama, PROMPT, 4)
    ask(llama, FOREIGN, 4)
    assert parks.parking.n_cells == len(PROMPT) + 3
    return llama


@pytest.fixture
def plain(make):
    """Return the same engine without a plugin, made before one is on."""
    llama = make()
    ask(llama, FOREIGN, 4)
    return llama


def state(llama):
    blob = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(llama.ctx))()
    assert llama_cpp.llama_state_get_data(llama.ctx, blob, len(blob)) == len(blob)
    return bytes(blob)


def sequence(llama, number=0):
    blob = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(llama.ctx, number))()
    n = llama_cpp.llama_state_seq_get_data(llama.ctx, blob, len(blob), number)
    assert n == len(blob)
    return bytes(blob)


def positions(blob):
    """Return the positions in a sequence's blob, in the order of the cells."""
    (n_cells,) = struct.unpack_from("<I", blob, 12)
    return np.frombuffer(blob, "<i4", 3 * n_cells, 16)[::3].tolist()


def memory(llama):
    return llama_cpp.llama_get_memory(llama.ctx)


# -- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [256, 333, 0])
@pytest.mark.parametrize("n_batch", [64, 512, 4096])
def test_the_apps_own_sizes_are_what_it_reads(make, patched, asked, n_batch):
    def sizes(llama):
        own = [getattr(llama_cpp, name)(llama.ctx) for name in (*SIZES, "llama_n_seq_max")]
        return [*own, llama.n_ctx(), llama.n_batch, len(llama.input_ids), llama.scores.shape]

    expected = sizes(make(n_ctx=asked, n_batch=n_batch))
    patched(parks=Parks())
    llama = make(n_ctx=asked, n_batch=n_batch)
    assert sizes(llama) == expected
    assert llama.context_params.n_ctx == (asked or llama._model.n_ctx_train())
    n_ctx, n_seq_max, _ = (size(llama.ctx) for size in REAL)
    assert (n_ctx, n_seq_max) == (expected[0] + 256, 8)


def test_low_level_contexts_too(make, parks):
    llama = make()
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch = 0, 1 << 20
    ctx = llama_cpp.llama_init_from_model(llama.model, params)
    n_train = llama._model.n_ctx_train()
    assert llama_cpp.llama_n_ctx(ctypes.c_void_p(ctx)) == n_train
    assert llama_cpp.llama_n_batch(ctx) == n_train
    assert REAL[0](ctx) == n_train + 256
    llama_cpp.llama_free(ctx)


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_context_is_called_too_long_only_if_the_app_asked_for_that(make, parks, capfd, is_longer):
    n_train = make()._model.n_ctx_train()
    capfd.readouterr()
    llama = make(n_ctx=n_train + 256 * is_longer, verbose=False)
    assert REAL[0](llama.ctx) > n_train
    assert ("possible training context overflow" in capfd.readouterr().err) == is_longer
    make(verbose=True)
    assert "n_ctx_seq" in capfd.readouterr().err  # other messages are logged as before


def test_a_context_that_a_check_refuses_has_no_spare_cells(make, patched):
    from llmaas_hooks import hookimpl

    class Refuses(Parks):
        @hookimpl
        def llmaas_context_create(self, create):
            super().llmaas_context_create(create)
            create.checks.append(lambda ctx: False)

    patched(parks=Refuses())
    llama = make()
    assert [size(llama.ctx) for size in REAL[:2]] == [256, 1]
    assert llama_cpp.llama_n_ctx(llama.ctx) == 256


def test_a_full_context_is_full(make, patched):
    """``Llama`` fails at its own end, not at that of the spare cells, and can continue."""
    tokens = np.random.default_rng(9).integers(300, 4000, 300).tolist()

    def fill(llama):
        ask(llama, PROMPT, 2)
        ask(llama, FOREIGN, 2)
        llama.reset()
        with pytest.raises(RuntimeError) as error:
            llama.eval(tokens)
        found = str(error.value), llama.n_tokens, llama.input_ids[: llama.n_tokens].tolist()
        return found, ask(llama, FOREIGN, 4)[0]

    expected = fill(make(n_batch=50))
    patched(parks=Parks())
    assert fill(make(n_batch=50)) == expected
    assert expected[0][:2] == ("llama_decode returned 1", 250)


# -- cells --------------------------------------------------------------------------------------


def test_a_state_has_the_apps_cells_alone(plain, llama, parks):
    assert len(state(llama)) == len(state(plain))
    assert positions(sequence(llama)) == positions(sequence(plain))
    assert parks.engine.parked == set()
    assert parks.parking.n_cells == 0


def test_a_state_is_vanillas_to_the_byte(make, patched):
    def states(llama):
        ask(llama, PROMPT, 4)
        return state(llama), sequence(llama)

    expected = states(make())
    patched(parks=Parks())
    assert states(make()) == expected


def test_states_go_both_ways(plain, llama, make):
    """A state of a context with spare cells loads in one without, and the other way round."""
    saved, theirs = llama.save_state(), plain.save_state()
    expected = ask(llama, [*FOREIGN, *ENDINGS[0]], 4)[0]
    plain.load_state(saved)
    assert ask(plain, [*FOREIGN, *ENDINGS[0]], 4)[0] == expected
    llama.load_state(theirs)
    assert ask(llama, [*FOREIGN, *ENDINGS[0]], 4)[0] == expected


def test_blobs_of_a_sequence_go_both_ways(plain, llama, parks):
    """Loading a sequence's blob leaves the other sequences alone."""
    blob = sequence(llama)
    assert llama_cpp.llama_state_seq_set_data(plain.ctx, as_bytes(blob), len(blob), 0) == len(blob)
    assert positions(sequence(plain)) == positions(blob)
    blob = sequence(plain)
    assert llama_cpp.llama_state_seq_set_data(llama.ctx, as_bytes(blob), len(blob), 0) == len(blob)
    (number,) = parks.engine.parked
    assert positions(sequence(llama, number)) == list(range(len(PROMPT) + 3))


def as_bytes(blob):
    return (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)


@pytest.mark.parametrize(
    "names",
    [
        ("llama_state_save_file", "llama_state_load_file"),
        ("llama_save_session_file", "llama_load_session_file"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_session_files_hold_the_apps_cells_alone(plain, llama, parks, tmp_path, names):
    save, load = (getattr(llama_cpp, name) for name in names)
    path = str(tmp_path / "session").encode()
    tokens = (llama_cpp.llama_token * 64)(*FOREIGN)
    n_tokens = ctypes.c_size_t()
    assert save(llama.ctx, path, tokens, len(FOREIGN))
    assert load(plain.ctx, path, tokens, 64, ctypes.byref(n_tokens))
    assert n_tokens.value == len(FOREIGN)
    ask(llama, PROMPT, 2)
    ask(llama, FOREIGN, 2)
    assert parks.engine.parked
    assert load(llama.ctx, path, tokens, 64, ctypes.byref(n_tokens))
    assert parks.engine.parked == set()
    assert len(state(llama)) == len(state(plain))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_names_too(plain, llama):
    size = llama_cpp.llama_get_state_size(llama.ctx)
    assert size == llama_cpp.llama_get_state_size(plain.ctx)
    blob = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_copy_state_data(llama.ctx, blob) == size
    assert llama_cpp.llama_set_state_data(plain.ctx, blob) == size


# -- calls that name all sequences --------------------------------------------------------------


def test_removing_from_any_sequence_means_the_apps(llama, parks):
    n_parked = parks.parking.n_cells
    assert llama._ctx.kv_cache_seq_rm(-1, 30, -1)
    assert positions(sequence(llama)) == list(range(30))
    assert llama_cpp.llama_memory_seq_rm(memory(llama), ctypes.c_int32(-1), 10, 20)
    assert positions(sequence(llama)) == [*range(10), *range(20, 30)]
    assert parks.parking.n_cells == n_parked
    assert comes_back(llama, parks)


def test_clearing_empties_the_apps(llama, parks):
    llama._ctx.kv_cache_clear()
    llama.reset()
    assert sequence(llama)[12:16] == bytes(4)
    assert comes_back(llama, parks)


def test_a_label_that_came_back_with_its_cells_goes_with_them(llama, parks):
    """Else they would be neither free nor used."""
    assert comes_back(llama, parks)
    label = parks.engine.parked.current
    assert positions(sequence(llama, label)) == list(range(len(PROMPT)))
    llama._ctx.kv_cache_seq_rm(-1, 30, 31)
    assert positions(sequence(llama, label)) == list(range(30))
    llama._ctx.kv_cache_clear()
    assert positions(sequence(llama, label)) == []
    llama.reset()
    answer = ask(llama, [*PROMPT, *ENDINGS[0]], 2)[0]
    ask(llama, FOREIGN, 2)
    assert ask(llama, [*PROMPT, *ENDINGS[0]], 2)[0] == answer


def test_a_label_alone_hides_nothing_from_a_clear(make, monkeypatch, patched):
    """Vanilla's own call then empties all cells, as sequence 0 has them all."""
    real, cleared = llama_cpp.llama_cpp.llama_memory_clear, []

    @functools.wraps(real)
    def llama_memory_clear(mem, data):
        cleared.append(data)
        real(mem, data)

    for module in (llama_cpp, llama_cpp.llama_cpp):
        monkeypatch.setattr(module, "llama_memory_clear", llama_memory_clear)
    plugin = Parks(n_spare=0)
    patched(parks=plugin)
    llama = make(n_ctx=256)
    ask(llama, PROMPT, 1)
    plugin.parking.limit = 200
    ask(llama, FOREIGN, 1)
    llama._ctx.kv_cache_clear()
    assert not cleared  # the other context stays
    llama.reset()
    plugin.parking.limit = 200
    assert comes_back(llama, plugin)
    assert plugin.engine.parked == {plugin.engine.parked.current}
    llama._ctx.kv_cache_clear()
    assert cleared == [True]
    assert [positions(sequence(llama, number)) for number in (0, *plugin.engine.parked)] == [[], []]


def cut_off_a_restore(_llama, engine):
    engine.begin_restore()
    engine.drop_half_restored()


@pytest.mark.parametrize("give_up", [lambda llama, _: llama.save_state(), cut_off_a_restore])
def test_given_up_cells_leave_no_label(llama, parks, give_up):
    assert comes_back(llama, parks)
    assert parks.engine.parked.current is not None
    give_up(llama, parks.engine)
    assert parks.engine.parked == set()
    assert (parks.engine.parked.current, parks.engine.parked.n_current) == (None, 0)


def test_cells_that_came_back_are_not_used_twice(make, patched):
    """The app evaluates a full context by itself, beside another full one that is parked."""
    plugin = Parks()
    patched(parks=plugin)
    llama = make()
    first, second, third = ([1, *RNG.integers(300, 4000, 255).tolist()] for _ in range(3))
    for prompt in (first, second, first):
        ask(llama, prompt, 1)
    assert plugin.parking.stats()["takes"] == 1
    assert plugin.engine.parked.current is not None
    llama.reset()
    llama.eval(third)
    assert positions(sequence(llama)) == list(range(256))
    assert plugin.parking.n_cells == 256


def test_a_label_takes_none_of_the_apps_own_cells(make, patched):
    plugin = Parks(n_spare=0)
    patched(parks=plugin)
    llama = make(n_ctx=256)
    long = [1, *RNG.integers(300, 4000, 255 - len(FOREIGN)).tolist()]
    ask(llama, PROMPT, 1)
    for prompt in (FOREIGN, PROMPT):
        plugin.parking.limit = 200
        ask(llama, prompt, 1)
    label = plugin.engine.parked.current
    assert label is not None
    llama.reset()
    llama.eval(PROMPT + long[len(PROMPT) : -1])
    assert plugin.parking.n_cells == len(FOREIGN)
    assert plugin.engine.parked.others()
    llama.eval(long[:2])
    assert not plugin.engine.parked


def test_keeping_the_apps_keeps_the_others(llama, parks):
    expected = positions(sequence(llama))
    llama._ctx.kv_cache_seq_keep(0)
    assert positions(sequence(llama)) == expected
    assert comes_back(llama, parks)


def comes_back(llama, parks):
    ask(llama, [*PROMPT, *ENDINGS[0]], 2)
    return parks.parking.stats()["takes"] == 1


def test_moved_cells_are_the_apps_alone(llama, parks):
    """Shared cells would otherwise move in every context."""
    ask(llama, OTHER, 2)  # begins like the parked context
    llama._ctx.kv_cache_seq_rm(0, 10, 20)
    llama._ctx.kv_cache_seq_shift(0, 20, -1, -10)
    assert parks.engine.parked == set()
    n = len(OTHER) + 1 - 10
    assert sorted(positions(sequence(llama))) == list(range(n))


def test_an_app_that_takes_sequences_it_did_not_ask_for_has_them_all(llama, parks):
    """llama.cpp allows such sequences, and returns in them the data that the app put there."""
    expected = positions(sequence(llama))
    llama._ctx.kv_cache_seq_cp(0, 3, -1, -1)
    assert parks.engine.parked == set()
    assert parks.engine.alteration == "llama_memory_seq_cp"
    llama._ctx.kv_cache_seq_rm(0, -1, -1)
    assert positions(sequence(llama, 3)) == expected
    llama._ctx.kv_cache_seq_cp(3, 0, -1, -1)
    assert positions(sequence(llama)) == expected


def test_other_weights_end_what_is_parked(llama, parks):
    llama_cpp.llama_set_adapters_lora(llama.ctx, None, 0, None)
    assert parks.engine.parked == set()
    assert parks.engine.alteration == "llama_set_adapters_lora"
