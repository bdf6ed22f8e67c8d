"""int8 contexts: how far the model drifts on real text after its cells were 8-bit."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from llama_cpp import Llama

from llmaas_eval.quality import conversation_texts, drift, read
from llmaas_plugins import activate

N_LAST = 120


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, whose predictions the bounds are about."""
    return packaged_model


@pytest.fixture(scope="module")
def texts(reference_model):
    with contextlib.closing(Llama(str(reference_model), vocab_only=True, verbose=False)) as llama:
        return conversation_texts(llama, 350)[:3]


@pytest.fixture(scope="module")
def vanilla(reference_model, texts):
    settings = {"n_ctx": 512, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    with contextlib.closing(Llama(str(reference_model), **settings)) as llama:
        return [read(llama, text, N_LAST, 0) for text in texts]


def through_the_store(make_llama, tmp_path, texts, n_swaps, **settings):
    table = {"codec": "int8", "store": str(tmp_path / "kv")}
    with activate({"on_error": "raise", "plugins": {"kv_chunks": table}}) as suite:
        llama = make_llama(n_ctx=512, n_threads_batch=1, **settings)
        found = [read(llama, text, N_LAST, n_swaps) for text in texts]
        report = suite.status()["plugins"]["kv_chunks"]
        llama.close()
    assert report["restored_tokens"] > n_swaps * sum(len(text) - 220 for text in texts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("n_swaps", [1, 4])
def test_int8_keeps_the_predictions(make_llama, tmp_path, texts, vanilla, n_swaps):
    """The drift does not grow with many swaps; bounds are three times our measurements."""
    found = drift(texts, vanilla, through_the_store(make_llama, tmp_path, texts, n_swaps))
    assert abs(found.perplexity_ratio - 1) < 0.004
    assert 0 < found.kl < 3.6e-4
    assert found.top1 >= 0.97


def test_int8_of_q8_0_cells_is_exact(make_llama, tmp_path, texts):
    """q8_0 cells are 8-bit groups already."""
    settings = {"type_k": 8, "type_v": 8, "flash_attn": True}
    vanilla = make_llama(n_ctx=512, n_threads_batch=1, **settings)
    expected = [read(vanilla, texts[0], N_LAST, 0)]
    found = through_the_store(make_llama, tmp_path, texts[:1], 1, **settings)
    assert np.array_equal(expected, found)
