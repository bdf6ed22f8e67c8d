"""Attention that skips other contexts' cells: results keep their bits, and taps see the same."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools

import llama_cpp
import numpy as np
import pytest
from claiming import Claimer, created, loaded, native
from gguf import GGMLQuantizationType
from matrices import zeroed
from soak import scale
from watching import Watch

from llmaas_hooks import WeightClaim

N_LOGITS = 8
RNG = np.random.default_rng(2)
OWN, OTHER = RNG.integers(300, 4000, (2, 800))
PIECES = (400, 100, 20, 1, 1, 1)
"""Batch sizes: tiles of queries, blocks of queries, single queries."""
N_OWN = 600
"""Cells of the tested sequence, a few more than the pieces take."""
SETTINGS = {"n_ctx": 2304, "n_batch": 800, "n_ubatch": 512, "n_seq_max": 8, "kv_unified": True}
SETTINGS |= {"swa_full": True}
Q8_0 = int(GGMLQuantizationType.Q8_0)
OFF, ON = 0, 1
pytestmark = pytest.mark.soak
CACHES = {
    "products": {"flash_attn_type": OFF},
    "flash": {"flash_attn_type": ON},
    "flash, q8_0": {"flash_attn_type": ON, "type_k": Q8_0, "type_v": Q8_0},
}
SLIDING = ("gemma3", "gpt-oss")
FAMILIES = ("qwen2", "phi3", "deepseek2", "granitehybrid")
EVERY = [*itertools.product(FAMILIES, CACHES)]
SOME = [*zip(FAMILIES, itertools.cycle(CACHES), strict=False)]
EACH_CACHE = pytest.mark.parametrize("cache", CACHES)
EACH_CACHE_AND_THREADS = pytest.mark.parametrize(
    ("cache", "n_threads"),
    scale(
        [("products", 2), ("flash", 1), ("flash", 2), ("flash, q8_0", 1)],
        [*itertools.product(CACHES, [1, 2])],
    ),
)


def decode(ctx, *runs):
    """Evaluate runs of (sequence, tokens, start) in one batch; return logits of its last tokens."""
    rows = [(seq, tokens[i], start + i) for seq, tokens, start in runs for i in range(len(tokens))]
    batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (seq, token, position) in enumerate(rows):
        batch.token[i], batch.pos[i] = int(token), position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        batch.logits[i] = i >= len(rows) - N_LOGITS
    assert llama_cpp.llama_decode(ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)
    vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
    shape = min(len(rows), N_LOGITS), llama_cpp.llama_vocab_n_tokens(vocab)
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(ctx), shape).copy()


def free(ctx, sequence):
    memory = llama_cpp.llama_get_memory(ctx)
    assert llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)


def evaluate(ctx, start=0, pieces=PIECES):
    """Return the logits of a context that continues in sequence 0."""
    found = []
    for n in pieces:
        found.append(decode(ctx, (0, OWN[start : start + n], start)))
        start += n
    return np.concatenate(found)


def behind(ctx):
    decode(ctx, (0, OTHER[:N_OWN], 0))
    decode(ctx, (2, OTHER[:700], 0))
    free(ctx, 0)


def around(ctx):
    decode(ctx, (2, OTHER[:300], 0))
    decode(ctx, (0, OTHER[:N_OWN], 0))
    decode(ctx, (3, OTHER[:700], 0))
    free(ctx, 0)


def in_two_places(ctx):
    """Place the first cells before 300 cells of another sequence, and the rest behind them."""
    decode(ctx, (0, OTHER[:400], 0))
    decode(ctx, (2, OTHER[:300], 0))
    decode(ctx, (3, OTHER[:300], 0))
    free(ctx, 0)


@contextlib.contextmanager
def narrowed(path, *claims, **settings):
    """Open a context whose attention is narrowed; also yield the engine that plugins see."""
    plugin = Claimer(*claims)
    settings = SETTINGS | settings
    with native(plugin=plugin), loaded(path) as model, created(model, **settings) as ctx:
        plugin.contexts[0].narrow_attention = True
        yield ctx, plugin.contexts[0]


@functools.cache
def vanilla_logits(path, cache, n_threads):
    """Return the logits of a context that has the cells for itself."""
    settings = SETTINGS | CACHES[cache] | {"n_threads": n_threads, "n_threads_batch": n_threads}
    with loaded(path) as model, created(model, **settings) as ctx:
        return evaluate(ctx)


def n_narrowed(native_context):
    return native_context.stats()["narrowed"]


@EACH_CACHE_AND_THREADS
@pytest.mark.parametrize("surround", scale([around], [behind, around]))
def test_bits_are_those_of_a_context_that_has_the_cells_for_itself(
    family, surround, cache, n_threads
):
    path = family("llama", "F16")
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    with narrowed(path, **CACHES[cache], **threads) as (ctx, native_context):
        surround(ctx)
        n_before = n_narrowed(native_context)
        found = evaluate(ctx)
        assert n_narrowed(native_context) - n_before == 2 * len(PIECES)
    assert np.array_equal(found, vanilla_logits(path, cache, n_threads))


@EACH_CACHE_AND_THREADS
@pytest.mark.parametrize("surround", [around, in_two_places])
def test_heads_are_left_out_at_the_same_time(family, tmp_path, surround, cache, n_threads):
    path, heads = family("llama", "F16"), (None, 128)
    queries, output = r"blk\.\d+\.attn_q\.weight", r"blk\.\d+\.attn_output\.weight"
    copy = zeroed(path, tmp_path / "zeroed.gguf", output, columns=128)
    claims = WeightClaim(queries, rows=heads), WeightClaim(output, columns=heads)
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    with narrowed(path, *claims, **CACHES[cache], **threads) as (ctx, native_context):
        surround(ctx)
        native_context.level = 1
        n_before = n_narrowed(native_context)
        found = evaluate(ctx)
        assert n_narrowed(native_context) > n_before
        assert native_context.stats()["cut"] >= 2 * len(PIECES) * 7
    assert_close(found, vanilla_logits(copy, cache, n_threads))
    if surround is around:
        assert np.array_equal(found, vanilla_logits(copy, cache, n_threads))


def assert_close(found, expected):
    """Allow as much as two threads differ from one in vanilla, for logits of magnitude 4."""
    assert np.abs(found - expected).max() <= 0.03


@EACH_CACHE_AND_THREADS
def test_cells_at_the_very_end(family, cache, n_threads):
    """Here fewer than 256 cells may follow the first, and threads split the work elsewhere."""
    path = family("llama", "F16")
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    with narrowed(path, **CACHES[cache], **threads) as (ctx, native_context):
        decode(ctx, (2, OTHER[:700], 0))
        found = evaluate(ctx)
        assert n_narrowed(native_context) == 2 * len(PIECES)
    expected = vanilla_logits(path, cache, n_threads)
    assert_close(found, expected)
    if cache == "flash, q8_0":
        assert np.array_equal(found, expected)


@EACH_CACHE_AND_THREADS
def test_cells_in_two_places(family, cache, n_threads):
    """With flash attention, threads share heads here, so the bits are those of one thread.

    Without flash attention, each place has its own products.
    """
    path, pieces = family("llama", "F16"), (400, 1, 1, 1)
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    with loaded(path) as model, created(model, **SETTINGS | CACHES[cache]) as ctx:
        expected = evaluate(ctx, pieces=pieces)
    with narrowed(path, **CACHES[cache], **threads) as (ctx, native_context):
        found = [evaluate(ctx, pieces=pieces[:1])]
        decode(ctx, (2, OTHER[:700], 0))
        n_before = n_narrowed(native_context)
        found.append(evaluate(ctx, 400, pieces[1:]))
        assert n_narrowed(native_context) - n_before == 2 * len(pieces[1:])
    assert_close(np.concatenate(found), expected)
    if cache != "products":
        assert np.array_equal(np.concatenate(found), expected)


@EACH_CACHE
@pytest.mark.parametrize(
    ("name", "swa_full"),
    scale([("gemma3", False), ("gpt-oss", True)], [*itertools.product(SLIDING, [False, True])]),
)
def test_sliding_windows(family, name, swa_full, cache):
    """Each of the two masks has its own range, also when cells have left a window."""
    path, swa = family(name, "F16"), {"swa_full": swa_full}
    with loaded(path) as model, created(model, **SETTINGS | CACHES[cache] | swa) as ctx:
        expected = evaluate(ctx)
    with narrowed(path, **CACHES[cache] | swa) as (ctx, native_context):
        around(ctx)
        n_before = n_narrowed(native_context)
        found = evaluate(ctx)
        assert n_narrowed(native_context) > n_before
    assert_close(found, expected)
    if swa_full and "q8_0" in cache:
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(("name", "cache"), scale(SOME, EVERY))
def test_other_families(family, name, cache):
    path = family(name, "F16")
    with loaded(path) as model, created(model, **SETTINGS | CACHES[cache]) as ctx:
        expected = evaluate(ctx)
    with narrowed(path, **CACHES[cache]) as (ctx, native_context):
        behind(ctx)
        n_before = n_narrowed(native_context)
        found = evaluate(ctx)
        assert n_narrowed(native_context) > n_before
    assert np.array_equal(found, expected)


@EACH_CACHE
def test_sequences_of_one_batch_see_all_that_one_of_them_sees(family, cache):
    path = family("llama", "F16")

    def converse(ctx):
        decode(ctx, (0, OWN[:200], 0))
        decode(ctx, (1, OWN[300:550], 0))
        together = [decode(ctx, (0, OWN[200:203], 200), (1, OWN[550:552], 250))]
        return np.concatenate([*together, decode(ctx, (0, OWN[203:204], 203))])

    with loaded(path) as model, created(model, **SETTINGS | CACHES[cache]) as ctx:
        expected = converse(ctx)
    with narrowed(path, **CACHES[cache]) as (ctx, native_context):
        around(ctx)
        n_before = n_narrowed(native_context)
        found = converse(ctx)
        assert n_narrowed(native_context) - n_before == 2 * 4
    assert_close(found, expected)
    if cache != "flash":  # with it, vanilla's tiles of queries begin at another cell
        assert np.array_equal(found, expected)


def test_graphs_pass_where_nothing_is_to_be_left_out(family):
    with narrowed(family("llama")) as (ctx, native_context):
        evaluate(ctx)
        stats = native_context.stats()
    assert stats["passed"] == stats["graphs"]
    assert stats["narrowed"] == 0


def test_it_is_off_unless_asked_for(family):
    with narrowed(family("llama")) as (ctx, native_context):
        assert native_context.narrow_attention
        native_context.narrow_attention = False
        assert not native_context.narrow_attention
        around(ctx)
        evaluate(ctx)
        stats = native_context.stats()
    assert stats["passed"] == stats["graphs"]


# -- with taps ------------------------------------------------------------------------------------


@EACH_CACHE
@pytest.mark.parametrize("surround", [around, in_two_places])
def test_taps_see_the_same_attention(family, surround, cache):
    path, seen = family("llama", "F16"), []
    for is_narrow in (False, True):
        with narrowed(path, **CACHES[cache]) as (ctx, native_context):
            surround(ctx)
            native_context.narrow_attention = is_narrow
            density = native_context.density()
            evaluate(ctx)
            assert (n_narrowed(native_context) > 0) or not is_narrow
            seen.append((*density.read(sum(PIECES)), density.cells(sum(PIECES))))
    (sums, counts, cells), (narrow_sums, narrow_counts, narrow_cells) = seen
    assert counts.all()
    assert np.array_equal(narrow_counts, counts)
    assert np.array_equal(narrow_cells, cells)
    assert np.abs(narrow_sums - sums).max() <= 1e-3 * sums.max()


@EACH_CACHE
def test_taps_find_restored_cells(family, cache):
    path, n = family("llama", "F16"), 500
    with narrowed(path, **CACHES[cache]) as (ctx, native_context):
        evaluate(ctx, pieces=(n,))
        blob = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(ctx, 0))()
        assert llama_cpp.llama_state_seq_get_data(ctx, blob, len(blob), 0) == len(blob)
        free(ctx, 0)
        around(ctx)
        density = native_context.density()
        density.place(0, n)
        assert llama_cpp.llama_state_seq_set_data(ctx, blob, len(blob), 0) == len(blob)
        evaluate(ctx, n, (1,))
        cells = density.cells(n + 1)
    assert (np.diff(cells) == 1).all()
    assert (cells[:, 0] == 300).all()


def test_an_app_s_callback_sees_probabilities_of_all_cells(family):
    watch = Watch(lambda tensor: tensor.name.startswith(b"kq_soft_max"))
    path = family("llama", "F16")
    with narrowed(path, **CACHES["products"], **watch.settings) as (ctx, _):
        around(ctx)
        watch.take()
        found = evaluate(ctx)
    seen = watch.take()
    assert len(seen) == 2 * len(PIECES)
    for probabilities in seen:
        assert probabilities.shape[-1] > 300 + N_OWN + 700
        assert np.allclose(probabilities.sum(-1), 1, atol=1e-4)
    assert_close(found, vanilla_logits(path, "products", 1))


@EACH_CACHE
def test_graphs_that_come_in_pieces(family, cache):
    """An app's own callback makes llama.cpp split the graphs."""
    path = family("llama", "F16")
    cut = Watch(lambda tensor: tensor.op % 3 == 0, lambda _tensor: None)
    with narrowed(path, **CACHES[cache], **cut.settings) as (ctx, native_context):
        around(ctx)
        found = evaluate(ctx)
        stats = native_context.stats()
    assert stats["graphs"] > 2 * len(PIECES)
    assert_close(found, vanilla_logits(path, cache, 1))
