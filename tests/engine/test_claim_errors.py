"""Claims that cannot be met: which plugin the message names, and how the app continues."""

from __future__ import annotations

import re

import numpy as np
import pytest
from claiming import (
    Claimer,
    claimed,
    created,
    evaluate,
    in_a_process,
    loaded,
    n_engines,
    native,
    opened,
    vanilla,
)
from matrices import DOWN, UP

from llmaas_hooks import ConfigError, PluginError, WeightClaim, hookimpl


@pytest.fixture
def model(family):
    """Return the path of a small model."""
    return family("llama")


@pytest.fixture
def said(caplog):
    """Return the suite's log lines."""
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("llmaas")]


# -- two plugins, one weight ------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["log", "raise"])
@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (
            WeightClaim(UP, rows=(8,)),
            WeightClaim(r"blk\.1\.ffn_(up|down)\.weight", columns=(32,)),
            "part",
        ),
        (
            WeightClaim(UP, source="file"),
            WeightClaim(r"blk\.1\.ffn_(up|down)\.weight", source="tiles"),
            "source",
        ),
    ],
    ids=["part", "source"],
)
def test_one_property_has_one_owner(model, on_error, one, other, what):
    expected = vanilla(model)
    named = rf"'second' and 'first' both claim the {what} of blk\.1\.ffn_up\.weight"
    with native(on_error, first=Claimer(one), second=Claimer(other)):
        for _ in range(2):
            with pytest.raises(ConfigError, match=named), loaded(model):
                pytest.fail("it was loaded")
    assert np.array_equal(vanilla(model), expected)


# -- claims that are wrong before the file is read --------------------------------------------

WRONG = {
    "matches no tensor": WeightClaim("nothing.weight", source="tiles"),
    "regular expression": WeightClaim("blk.(", source="tiles"),
    "rows and columns": WeightClaim(UP, rows=(8,), columns=(32,)),
    "claims nothing": WeightClaim(UP),
    "64 extents": WeightClaim(UP, rows=(8,) * 65),
    "0 or more": WeightClaim(UP, rows=(-8,)),
    "token_embd.weight": WeightClaim(r"token_embd\.weight", source="tiles"),
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_wrong_claim_is_raised(model, reason):
    named = f"'plugin' failed.*{reason}"
    with (
        native(plugin=Claimer(WRONG[reason])),
        pytest.raises(PluginError, match=named),
        loaded(model),
    ):
        pytest.fail("it was loaded")


@pytest.mark.parametrize("reason", WRONG)
def test_a_wrong_claim_is_logged_and_left_out(model, said, reason):
    expected = vanilla(model)
    plugin = Claimer(WRONG[reason])
    with native("log", plugin=plugin), opened(model) as ctx:
        assert np.array_equal(evaluate(ctx), expected)
    (line,) = said()
    assert reason in line
    assert "'plugin'" in line
    assert len(plugin.contexts) == 1


def test_the_other_claims_of_the_plugin_hold(model, said):
    good = WeightClaim(DOWN, columns=(64,))
    expected = claimed(model, good)
    with native("log", plugin=Claimer(WRONG["claims nothing"], good)), opened(model) as ctx:
        assert np.array_equal(evaluate(ctx), expected)
    assert len(said()) == 1


# -- claims that the model, or its graphs, cannot meet ----------------------------------------

NORM = r"blk\.0\.attn_norm\.weight"


@pytest.fixture
def wide(family):
    """Return the path of a model whose weights can be split at any column."""
    return family("llama", "F16")


TOO_MANY = WeightClaim(DOWN, source="tiles", columns=tuple(range(16, 272, 16)))


def test_too_many_tiles_are_refused_when_the_model_is_loaded(wide):
    with native(plugin=Claimer(TOO_MANY)):
        named = r"'plugin' failed.*blk\.\d\.ffn_down\.weight.*at most 16"
        with pytest.raises(PluginError, match=named), loaded(wide):
            pytest.fail("it was loaded")


def test_too_many_tiles_are_logged_and_no_claim_holds(wide, said):
    expected = vanilla(wide)
    plugin = Claimer(TOO_MANY, WeightClaim(UP, rows=(8,)))
    with native("log", plugin=plugin), opened(wide) as ctx:
        assert np.array_equal(evaluate(ctx), expected)
    (line,) = said()
    assert re.search(r"'plugin' failed.*blk\.\d\.ffn_down\.weight.*at most 16", line)


def test_sixteen_tiles_are_not_too_many(wide):
    sixteen = WeightClaim(DOWN, source="tiles", columns=TOO_MANY.columns[:15])
    np.testing.assert_allclose(claimed(wide, sixteen, level=-1), vanilla(wide), atol=0.01)


@pytest.fixture
def looks_up(family):
    """Return the path of a model whose embeddings are not its output matrix."""
    return family("gpt-oss")


EMBEDDINGS = WeightClaim(r"token_embd\.weight", rows=(8,))
NO_GRAPH = r"'plugin' failed.*token_embd\.weight.*no graph multiplies"


def test_a_part_of_what_no_graph_multiplies_is_refused_by_name(looks_up):
    with native(plugin=Claimer(EMBEDDINGS)), loaded(looks_up) as llama:
        with pytest.raises(PluginError, match=NO_GRAPH), created(llama):
            pytest.fail("it was created")
        assert n_engines() == 0


def test_a_part_of_what_no_graph_multiplies_is_logged(looks_up, said):
    expected = vanilla(looks_up)
    plugin = Claimer(EMBEDDINGS, WeightClaim(r"blk\.\d+\.ffn_up_exps\.weight", rows=(8,)))
    with native("log", plugin=plugin), opened(looks_up) as ctx:
        assert np.array_equal(evaluate(ctx), expected)
    (line,) = said()
    assert re.search(NO_GRAPH, line)
    assert len(plugin.contexts) == 1


@pytest.mark.parametrize("source", ["tiles", "file"])
@pytest.mark.parametrize("on_error", ["log", "raise"])
def test_the_source_of_a_vector_is_refused(model, on_error, source):
    script = f"""
from claiming import *
from llmaas_hooks import PluginError, WeightClaim
expected = vanilla({str(model)!r})
with native({on_error!r}, plugin=Claimer(WeightClaim({NORM!r}, source={source!r}))):
    try:
        with opened({str(model)!r}) as ctx:
            assert ctx is None or np.array_equal(evaluate(ctx), expected)
    except PluginError as error:
        print(error)
print("alive", np.array_equal(vanilla({str(model)!r}), expected))
"""
    done = in_a_process(script)
    assert done.returncode == 0, done.stderr[-1000:]
    assert "attn_norm.weight" in done.stdout + done.stderr
    assert done.stdout.endswith("alive True\n")


# -- hooks that fail --------------------------------------------------------------------------


class Fails(Claimer):
    """Plugin that raises in one hook, or returns something other than a list of claims."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    @hookimpl
    def llmaas_weights(self, load):
        if self.hook == "wrong type":
            return [str(load.path)]
        if self.hook == "llmaas_weights":
            raise RuntimeError("out of order")
        return []

    @hookimpl
    def llmaas_native_context(self, context):
        super().llmaas_native_context(context)
        if self.hook == "llmaas_native_context":
            raise RuntimeError("out of order")


REASONS = {
    "wrong type": "TypeError",
    "llmaas_weights": "RuntimeError: out of order",
    "llmaas_native_context": "RuntimeError: out of order",
}


@pytest.mark.parametrize("hook", REASONS)
def test_a_hook_that_fails_is_logged_once_and_the_model_works(model, said, hook):
    expected = vanilla(model)
    good = Claimer()
    with native("log", broken=Fails(hook), good=good), opened(model) as ctx:
        assert np.array_equal(evaluate(ctx), expected)
        assert len(good.contexts) == 1
    (line,) = [line for line in said() if "more" not in line]
    assert "'broken'" in line
    assert REASONS[hook] in line


@pytest.mark.parametrize("hook", REASONS)
def test_a_hook_that_fails_is_raised(model, hook):
    expected = vanilla(model)
    named = f"'broken'.*{REASONS[hook]}"
    with native(broken=Fails(hook)), pytest.raises(PluginError, match=named), opened(model):
        pytest.fail("it was opened")
    assert np.array_equal(vanilla(model), expected)


@pytest.mark.parametrize("hook", ["wrong type", "llmaas_weights"])
def test_the_claims_of_the_other_plugins_hold(model, said, hook):
    claim = WeightClaim(DOWN, columns=(64,))
    expected = claimed(model, claim)
    with native("log", broken=Fails(hook), good=Claimer(claim)), opened(model) as ctx:
        assert np.array_equal(evaluate(ctx), expected)
    assert len(said()) == 1


def test_no_context_is_left_of_a_failed_hook(model):
    with native(broken=Fails("llmaas_native_context")), loaded(model) as llama:
        with pytest.raises(PluginError, match="'broken'"), created(llama):
            pytest.fail("it was created")
        assert n_engines() == 0
