"""elastic: contexts of a model whose narrow levels leave out keys and values."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from cell_rows import cell_rows, exported, imported
from leveled import report
from preparing import prepare
from restoring import lose
from switching import ENDINGS, OTHER, PROMPT, ask

from llmaas_plugins import _native, elastic
from llmaas_plugins.elastic.metadata import read_elastic

NARROW = 0.4
KERNELS = ("generic", "avx2", "avx512")
SETTINGS = {"n_ubatch": 1, "flash_attn": True}
"""Settings with which a batch computes the same bits as single tokens."""

SCALED_BYTES = 128
"""Bytes of F16 values that share a scale in lossy codecs: zeros beside other values get errors."""


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("elastic") / "cut.gguf"
    return prepare(reference_model, path, cuts_keys_values=True)


@pytest.fixture(scope="module")
def n_kept(model):
    """Return the bytes of a row of F16 keys that belong to groups of the narrow level."""
    found = read_elastic(model)
    widths = found.tables["uniform"][found.levels.index(NARROW)]
    return 2 * int(widths.groups[0]) * found.blocks.head_dim


def parts(rows, n_kept):
    """Return the bytes of groups that the narrow level has, and of the others, of all layers."""
    return np.stack([one[:, :n_kept] for one in rows]), np.stack([one[:, n_kept:] for one in rows])


def narrow_cells(blob, n_kept):
    """Return which cells have zeros for the groups that the narrow level leaves out.

    Keys and values of all layers agree, and the other cells have no zeros there.
    """
    found = []
    for rows in cell_rows(blob):
        first, second = parts(rows, n_kept)
        assert first.any(axis=(0, 2)).all()
        is_zero = ~second.any(axis=2)
        assert (is_zero == is_zero[0]).all()
        found.append(is_zero[0])
    assert np.array_equal(*found)
    return found[0]


def test_the_status_says_so(narrowing, engine):
    suite = narrowing()
    engine()
    (one,) = report(suite)["models"].values()
    assert one["cuts_keys_values"] is True


def test_each_cell_has_the_groups_of_its_level(narrowing, engine, n_kept):
    """The prompt is narrow, the answer wide, and so is a request that reuses both."""
    narrowing()
    llama = engine()
    with elastic.level(prefill=NARROW, decode=1.0):
        answer, _ = ask(llama, PROMPT, 4)
    n_prompt, n_answer = len(PROMPT), len(answer) - 1
    expected = [True] * n_prompt + [False] * n_answer
    assert narrow_cells(exported(llama.ctx), n_kept).tolist() == expected
    ask(llama, [*PROMPT, *answer[:-1], *ENDINGS[0]], 1)
    expected += [False] * len(ENDINGS[0])
    assert narrow_cells(exported(llama.ctx), n_kept).tolist() == expected
    with elastic.level(NARROW):
        ask(llama, [*PROMPT[:-8], *ENDINGS[1]], 1)
    n_reused = n_prompt - 8
    assert narrow_cells(exported(llama.ctx), n_kept).tolist() == [True] * n_reused + [True] * 20


def test_a_wide_level_reads_zeros_of_narrow_cells(narrowing, engine):
    """Stock llama.cpp says the same after the same cells."""
    suite = narrowing()
    llama = engine(**SETTINGS)
    with elastic.level(NARROW):
        ask(llama, PROMPT, 1)
    cells = exported(llama.ctx)
    longer = [*PROMPT, *ENDINGS[0]]
    _, found = ask(llama, longer, 3)
    with elastic.level(NARROW):
        llama.reset()
        _, narrow = ask(llama, longer, 3)
    suite.deactivate()
    with contextlib.closing(engine(**SETTINGS)) as stock:
        imported(stock.ctx, cells)
        stock.input_ids[: len(PROMPT)] = PROMPT
        stock.n_tokens = len(PROMPT)
        _, expected = ask(stock, longer, 3)
    assert np.array_equal(found, expected)
    assert np.abs(found - narrow).max() > 0.1


@pytest.mark.parametrize(
    ("codec", "kernels"),
    [("lossless", None), ("int8", None), *(("tolerance", one) for one in KERNELS)],
)
def test_stored_cells_keep_their_zeros(  # noqa: PLR0917  its fixtures
    narrowing, engine, tmp_path, n_kept, codec, kernels, select
):
    if kernels is not None:
        select(kernels)
    kept = {"codec": codec, "recompute": False, "store": str(tmp_path / "kv")}
    narrowing(plugins={"kv_chunks": kept})
    with contextlib.closing(engine(**SETTINGS)) as llama, elastic.level(NARROW):
        ask(llama, PROMPT, 1)
        before = exported(llama.ctx)
        ask(llama, OTHER, 1)
    suite = narrowing(plugins={"kv_chunks": kept})
    llama = engine(**SETTINGS)
    longer = [*PROMPT, *ENDINGS[0]]
    ask(llama, longer, 1)
    assert suite.status()["plugins"]["kv_chunks"]["disk_hits"] > len(PROMPT) // 16
    after, n_restored = exported(llama.ctx), len(PROMPT)
    is_narrow = narrow_cells(after, max(n_kept, SCALED_BYTES))
    assert is_narrow.tolist() == [True] * n_restored + [False] * len(ENDINGS[0])
    if codec == "lossless":
        for own, restored in zip(cell_rows(before), cell_rows(after), strict=True):
            for one, other in zip(own, restored, strict=True):
                assert np.array_equal(one[:n_restored], other[:n_restored])


@pytest.fixture
def select():
    before = _native.kernels_name()

    def choose(name):
        try:
            _native.kernels_select(name)
        except _native.NativeError:
            pytest.skip(f"this processor has no {name}")

    yield choose
    _native.kernels_select(before)


def test_a_context_goes_on_at_another_level_from_the_disk(narrowing, engine, tmp_path):
    """Chunks are shared by all levels: the logits are those of the engine's own cells."""
    kept = {"codec": "lossless", "recompute": False, "store": str(tmp_path / "kv")}
    longer = [*PROMPT, *ENDINGS[0]]
    narrowing()
    with contextlib.closing(engine(**SETTINGS)) as llama:
        with elastic.level(NARROW):
            ask(llama, PROMPT, 1)
        _, expected = ask(llama, longer, 3)
    narrowing(plugins={"kv_chunks": kept})
    with contextlib.closing(engine(**SETTINGS)) as llama, elastic.level(NARROW):
        ask(llama, PROMPT, 1)
        ask(llama, OTHER, 1)
    narrowing(plugins={"kv_chunks": kept})
    _, found = ask(engine(**SETTINGS), longer, 3)
    assert np.array_equal(found, expected)


def test_what_is_computed_again_has_the_groups_of_the_prompts_level(
    narrowing, engine, tmp_path, n_kept
):
    """A lost chunk of a narrow context is wide if the waiting request is, as is its last token."""
    kept = {"codec": "lossless", "recompute": False, "store": str(tmp_path / "kv")}
    suite = narrowing(plugins={"kv_chunks": kept})
    llama = engine()
    with elastic.level(NARROW):
        for prompt in (PROMPT, OTHER):
            ask(llama, prompt, 1)
    lose(suite, llama, PROMPT, [5])  # tokens 80 to 95
    ask(llama, PROMPT, 1)
    is_narrow = narrow_cells(exported(llama.ctx), n_kept)
    assert is_narrow.tolist() == [True] * 80 + [False] * 16 + [True] * 3 + [False]
