"""Prompts longer than the context: vanilla's error, then contexts that continue as in vanilla."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
from llama_cpp import Llama
from switching import ask

from llmaas_plugins import activate

LONG = [1, *np.random.default_rng(3).integers(300, 4000, 319).tolist()]
SHORT, OTHER = LONG[:60], [1, *LONG[20:80]]
SETTINGS = {"n_threads": 1, "n_threads_batch": 1, "n_ubatch": 1, "n_batch": 50, "verbose": False}


def outcome(llama, tokens, n):
    """Return tokens and their logits, or the error and the tokens that ``Llama`` holds then."""
    try:
        said, logits = ask(llama, tokens, n)
    except (RuntimeError, ValueError) as error:
        return str(error), llama.input_ids[: llama.n_tokens].tolist()
    return said, logits.tobytes()


def life(model, n_ctx):
    """Make requests that fit and others that do not; a longer context answered some of them."""
    with contextlib.closing(Llama(model, n_ctx=512, **SETTINGS)) as llama:
        found = [outcome(llama, LONG, 2)]
    fit = [(SHORT, 4), (LONG[:n_ctx], 1), (OTHER, 4)]
    full = [(LONG, 1), (LONG[: n_ctx + 1], 1), (LONG[: n_ctx - 5], 20), (LONG[:n_ctx], 2)]
    with contextlib.closing(Llama(model, n_ctx=n_ctx, **SETTINGS)) as llama:
        for one in fit:
            found += [outcome(llama, *other) for other in (one, *full)]
        # the limit is llama.cpp's context, not Llama's books
        with contextlib.suppress(ValueError):
            llama.create_completion(LONG, max_tokens=1)
            pytest.fail("the prompt is too long")
        return [*found, outcome(llama, OTHER, 4)]


@pytest.fixture(scope="module")
def vanilla(reference_model, request):
    """Return a life with contexts of some length, and its outcomes in vanilla."""
    live = functools.partial(life, str(reference_model), request.param)
    found = live()
    assert sum(isinstance(said, str) for said, _ in found) >= 5  # one more raises no error in NumPy
    return live, found


@pytest.mark.parametrize(
    ("vanilla", "on_error", "parked"),
    [(256, "raise", 0), (256, "log", 256), (200, "log", 0)],
    indirect=["vanilla"],
)
def test_a_prompt_that_does_not_fit(vanilla, tmp_path, caplog, on_error, parked):
    live, expected = vanilla
    table = {"codec": "lossless", "recompute": False, "parked_tokens": parked}
    table["store"] = str(tmp_path / "kv")
    for _ in range(2):  # a restart between them
        with activate({"on_error": on_error, "plugins": {"kv_chunks": table}}) as suite:
            found = live()
            status = suite.status()
        if parked:  # cells lie elsewhere, so logits are sums in another order
            assert [one[0] for one in found] == [one[0] for one in expected]
        else:
            assert found == expected
        assert status["errors"] == {}
        report = status["plugins"]["kv_chunks"]
        assert report["restores"] > 0
        assert (report["faults"], report["io_errors"]) == (0, 0)
    assert report["disk_hits"] > 0
    assert caplog.messages == []
