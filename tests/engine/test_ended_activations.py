"""Models whose weights an activation keeps, once it has ended: no new context can use them."""

from __future__ import annotations

import pytest
from claiming import Claimer, claimed, created, in_a_process, loaded, native
from llama_cpp import llama_cpp

from llmaas_hooks import WeightClaim
from llmaas_patches.native import has_our_buffers

CLAIM = ".*ffn_down.weight"

SCRIPT = f"""
import sys
import numpy as np
from claiming import Claimer, created, evaluate, loaded, native
from forking import in_child
from llmaas_hooks import LlmaasError, WeightClaim, hookimpl

path, on_error, kind = sys.argv[1:]

class Listener:
    @hookimpl
    def llmaas_logits(self, view):
        del view

def later():
    claims = [WeightClaim({CLAIM!r}, source="tiles")]
    plugins = {{"native": Claimer(), "another claim": Claimer(*claims), "no native": Listener()}}
    return native(on_error, plugin=plugins[kind])

def refused(model):
    try:
        with created(model):
            raise AssertionError("not refused")
    except LlmaasError as error:
        assert "load the model again" in str(error), error

plugin = Claimer(WeightClaim(".*ffn_down.weight|token_embd.weight", source="file"))
suite = native(plugin=plugin)
with loaded(path) as model, created(model) as ctx:
    expected = evaluate(ctx)
    suite.deactivate()
    with later():
        refused(model)
        assert in_child(lambda: refused(model)) == 0
        assert np.array_equal(evaluate(ctx), expected)
        with loaded(path) as again, created(again) as other:
            assert other
            refused(model)
"""


@pytest.mark.parametrize("kind", ["native", "another claim", "no native"])
@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_a_new_context_is_refused_and_the_process_goes_on(family, on_error, kind):
    """Stock llama.cpp would end the process; open contexts and other models work."""
    done = in_a_process(SCRIPT, family("llama"), on_error, kind)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("source", ["file", "tiles"])
def test_weights_are_ours_until_the_model_is_freed(family, source):
    """Another model at the same address must not be refused."""
    suite = native(plugin=Claimer(WeightClaim(CLAIM, source=source)))
    with loaded(family("llama")) as model:
        assert has_our_buffers(int(model))
        suite.deactivate()
        assert has_our_buffers(int(model))
    assert not has_our_buffers(int(model))


def test_a_model_without_claimed_sources_is_not_refused(family):
    """Neither a model that only has parts nor one that is older than every activation."""
    path = family("llama")
    with loaded(path) as older:
        suite = native(plugin=Claimer(WeightClaim(CLAIM, columns=(32,))))
        with loaded(path) as model:
            suite.deactivate()
            with native(plugin=Claimer()), created(model) as ctx, created(older) as other:
                assert ctx
                assert other


@pytest.mark.parametrize("n_ctx", [0, 512])
def test_no_model_is_not_refused_but_null(family, n_ctx):
    claimed(family("llama"), WeightClaim(CLAIM, source="file"))  # the library is in use
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_ctx
    with native(plugin=Claimer()):
        assert llama_cpp.llama_init_from_model(None, params) is None
