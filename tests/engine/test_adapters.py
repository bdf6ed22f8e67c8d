"""Adapters of claimed weights add what llama.cpp's own adapters add, whatever the weight's source.

The reference is stock llama.cpp with an adapter file of the same numbers, on a model whose unused
rows and columns are zero.
"""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest
from channel_claims import attach, claim_all, divergence, one_by_one
from claiming import (
    Claimer,
    add_adapter,
    claimed,
    created,
    decode,
    evaluate,
    hand_over,
    loaded,
    native,
    opened,
    step,
    vanilla,
)
from low_rank import matrices_of, random_term, random_terms, write_lora_of
from matrices import DOWN, TYPES, UP, zeroed

from llmaas_hooks import ConfigError, PluginError, WeightClaim, hookimpl
from llmaas_hooks.native.low_rank import BLOCK

CLOSE = {"F32": 2e-3, "F16": 4e-3}
"""Differences of logits by rounding, of weights whose activations are not rounded to 8 bits."""
QUERY, OUTPUT = r"blk\.\d+\.attn_q\.weight", r"blk\.\d+\.attn_output\.weight"
PLACES = {
    "ffn_up": (UP, "rows", 96),
    "attn_q": (QUERY, "rows", 64),
    "ffn_down": (DOWN, "columns", 256),
    "attn_output": (OUTPUT, "columns", 128),
}
WHOLE_BLOCKS = [
    (place, type_)
    for place in PLACES
    for type_ in TYPES
    if (place, type_) != ("attn_output", "Q4_K")
]


def claims_of(terms, *, source=None, axis="rows", n=None):
    """Return claims of weights that are whole at level 0, and cut and adapted at level 1."""
    return [
        WeightClaim(re.escape(name), source=source, **{axis: (None, n)}, adapters=(None, term))
        for name, term in terms.items()
    ]


def with_lora(path, lora, **settings):
    """Return the logits of a model with an adapter in stock llama.cpp."""
    with loaded(path, **settings) as model, created(model) as ctx:
        add_adapter(model, ctx, lora)
        return evaluate(ctx)


@pytest.fixture
def lora(tmp_path):
    """Return a function from terms of a model to the path of llama.cpp's adapter."""
    return lambda terms, path: write_lora_of(matrices_of(terms, path), tmp_path / "lora.gguf")


@pytest.fixture
def narrowed(tmp_path):
    """Return a function that zeroes all but the first rows or columns of a model's weights."""
    return lambda path, pattern, **n: zeroed(path, tmp_path / "zeroed.gguf", pattern, **n)


@pytest.mark.slow
@pytest.mark.parametrize("source", [None, "tiles", "file"])
@pytest.mark.parametrize("case", WHOLE_BLOCKS, ids="-".join)
def test_terms_are_those_of_llama_cpps_adapters(family, lora, narrowed, case, source):
    (pattern, axis, n), weights = PLACES[case[0]], case[1]
    path = family("llama", weights)
    terms = random_terms(path, pattern, **{axis: n})
    copy = narrowed(path, pattern, **{axis: n})
    expected, without = with_lora(copy, lora(terms, path)), vanilla(copy)
    found = claimed(path, *claims_of(terms, source=source, axis=axis, n=n), level=1)
    np.testing.assert_allclose(found, expected, atol=CLOSE.get(weights, 0.15))
    assert np.abs(found - expected).mean() < 0.05 * np.abs(without - expected).mean()


@pytest.mark.parametrize("extra", [False, True], ids=["plain", "repacked"])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_a_whole_weight_may_have_an_adapter(family, lora, rank, extra):
    path = family("llama", "Q4_0")
    terms = random_terms(path, f"{UP}|{DOWN}|{QUERY}|{OUTPUT}", rank=rank)
    expected = with_lora(path, lora(terms, path), use_extra_bufts=extra)
    plugin = Claimer(*claims_of(terms))
    with native(plugin=plugin), opened(path, use_extra_bufts=extra) as ctx:
        whole = evaluate(ctx)
        assert np.array_equal(whole, vanilla(path, use_extra_bufts=extra))
        plugin.contexts[0].level = 1
        found = evaluate(ctx)
    assert np.abs(found - expected).mean() < 0.05 * np.abs(whole - expected).mean()


@pytest.mark.parametrize("source", [None, "tiles", "file"])
def test_results_do_not_depend_on_the_number_of_threads(family, source):
    path, found = family("llama", "Q4_0"), []
    terms = random_terms(path, DOWN, rank=8, columns=256)
    for n_threads in (1, 4):
        plugin = Claimer(*claims_of(terms, source=source, axis="columns", n=256))
        settings = {"n_threads": n_threads, "n_threads_batch": n_threads}
        with native(plugin=plugin), loaded(path) as model, created(model, **settings) as ctx:
            plugin.contexts[0].level = 1
            found.append(evaluate(ctx))
    assert np.array_equal(*found)


def test_levels_change_within_a_sequence(family, lora, narrowed):
    path = family("llama", "F16")
    terms = random_terms(path, UP, rows=64)
    copy = narrowed(path, UP, rows=64)
    first, second = range(10, 30), range(30, 40)
    with opened(path) as wide, loaded(copy) as model, created(model) as narrow:
        add_adapter(model, narrow, lora(terms, path))
        assert decode(wide, first, 0) == 0
        hand_over(wide, narrow)
        expected = step(narrow, second, 20)
    plugin = Claimer(*claims_of(terms, n=64))
    with native(plugin=plugin), opened(path) as ctx:
        (context,) = plugin.contexts
        whole = evaluate(ctx)
        assert context.stats()["passed"] == context.stats()["graphs"]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
        assert decode(ctx, first, 0) == 0
        context.level = 1
        np.testing.assert_allclose(step(ctx, second, 20), expected, atol=CLOSE["F16"])
        at_level_1 = evaluate(ctx)
        context.level = 0
        assert np.array_equal(evaluate(ctx), whole)
        context.level = 9  # the last level
        assert np.array_equal(evaluate(ctx), at_level_1)
    assert np.array_equal(whole, vanilla(path))


def test_biases_and_adapters_are_both_added(family, lora, narrowed, biased):
    path, (with_biases, biases) = family("llama", "F16"), biased
    both = f"{DOWN}|{OUTPUT}"
    terms = random_terms(path, both, columns=64)
    expected = with_lora(narrowed(with_biases, both, columns=64), lora(terms, path))
    claims = [
        WeightClaim(re.escape(name), columns=(64,), biases=biases[name][None], adapters=(term,))
        for name, term in terms.items()
    ]
    np.testing.assert_allclose(claimed(path, *claims), expected, atol=CLOSE["F16"])


def test_an_apps_own_adapter_is_added_beside_it(family, tmp_path):
    path = family("llama", "F32")
    ours, its = (random_terms(path, f"{UP}|{DOWN}", seed=seed) for seed in (1, 2))
    joined = {}
    for name, (a, b) in matrices_of(ours, path).items():
        its_a, its_b = matrices_of(its, path)[name]
        joined[name] = np.concatenate([a, its_a]), np.concatenate([b, its_b], 1)
    expected = with_lora(path, write_lora_of(joined, tmp_path / "joined.gguf"))
    own = write_lora_of(matrices_of(its, path), tmp_path / "own.gguf")
    plugin = Claimer(*claims_of(ours))
    with native(plugin=plugin), loaded(path) as model, created(model) as ctx:
        add_adapter(model, ctx, own)
        plugin.contexts[0].level = 1
        np.testing.assert_allclose(evaluate(ctx), expected, atol=CLOSE["F32"])


@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("source", [None, "file"])
def test_extents_that_shrink_leave_out_a_part_of_the_adapter(family, source, axis):
    path, pattern = family("llama", "F16"), UP if axis == "rows" else DOWN
    terms = random_terms(path, pattern, **{axis: 256})

    def cut(term, n):
        if axis == "rows":
            return replace(term, n_rows=n, b=term.b[: n // BLOCK])
        return replace(term, n_columns=n, a=term.a[: n // BLOCK])

    expected = {}
    for n in (64, 256):
        terms_of_n = {name: cut(term, n) for name, term in terms.items()}
        claims = claims_of(terms_of_n, source=source, axis=axis, n=n)
        expected[n] = claimed(path, *claims, level=1)
    plugin = Claimer(*claims_of(terms, source=source, axis=axis, n=256))
    with native(plugin=plugin), opened(path) as ctx:
        (context,) = plugin.contexts
        context.level = 1
        for n in (64, 256):
            for name in terms:
                context.set_part(name, (None, n))
            assert np.array_equal(evaluate(ctx), expected[n])


@pytest.mark.parametrize(("pattern", "axis"), [(UP, "rows"), (DOWN, "columns")])
def test_nothing_is_added_where_nothing_is_used(family, pattern, axis):
    path = family("llama", "F16")
    terms = random_terms(path, pattern, **{axis: 32})
    found = claimed(path, *claims_of(terms, axis=axis, n=0), level=1)
    assert np.array_equal(found, claimed(path, WeightClaim(pattern, **{axis: (0,)})))


def test_sparse_products_have_adapters(reference_model, channels):
    """All values are used, so sparse products equal dense ones but for rounding."""
    terms = random_terms(reference_model, f"{DOWN}|{UP}|{QUERY}|{OUTPUT}", rank=4)
    plugin, found = Claimer(claim_all(reference_model), *claims_of(terms)), {}
    with native(plugin=plugin), opened(reference_model, use_extra_bufts=False) as ctx:
        attach(plugin, channels(1), share=1)
        (context,) = plugin.contexts
        for level, is_sparse in ((0, True), (1, True), (1, False)):
            context.level, context.sparse_tokens = level, is_sparse
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
            found[level, is_sparse] = one_by_one(ctx)
    error = divergence(found[1, False], found[1, True])
    assert 0 < 50 * error < divergence(found[1, False], found[0, True])


class Once:
    """Plugin that claims adapters and keeps none of them."""

    def __init__(self, terms):
        self.terms, self.arrays = terms, []

    @hookimpl
    def llmaas_weights(self):
        claims, self.terms = claims_of(self.terms), None
        self.arrays = [weakref.ref(claim.adapters[1].a) for claim in claims]
        return claims


def test_the_host_keeps_only_its_own_copy(family):
    path = family("llama", "F16")
    plugin = Once(random_terms(path, UP))
    with native(plugin=plugin), opened(path):
        gc.collect()
        assert [array() for array in plugin.arrays] == [None, None]


def test_experts_have_no_adapters(family):
    term = random_term(np.random.default_rng(0), 2, 32, 32)
    claim = WeightClaim(r"blk\.0\.ffn_down_exps\.weight", columns=(32,), adapters=(term,))
    with pytest.raises(PluginError, match="cannot have adapters") as caught:
        claimed(family("llama-moe", "F16"), claim)
    assert isinstance(caught.value.__cause__, ConfigError)
