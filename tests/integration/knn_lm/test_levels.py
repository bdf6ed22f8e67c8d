"""knn_lm with elastic: keys come from the whole model, and only its states are compared."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from datastores import CONVERSATIONS, ENGINE, QUESTIONS, Natives, stored
from llama_cpp import Llama
from preparing import prepare
from served import wait_until

from llmaas_plugins import activate, elastic
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.build.encoder import Encoder
from llmaas_plugins.knn_lm.build.inbox import remember
from llmaas_plugins.knn_lm.build.ingest import add_conversations, binding_of


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    return prepare(reference_model, tmp_path_factory.mktemp("model") / "model.gguf")


def keys_in(store):
    with Archive.open(store) as archive:
        return archive.pairs(np.arange(archive.n_pairs)).keys


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Return keys of a conversation that is learned while no level is requested."""
    store = tmp_path_factory.mktemp("whole")
    natives = Natives()
    with (
        activate({"on_error": "raise", "plugins": {"elastic": {}}}, {"natives": natives}),
        contextlib.closing(Llama(str(model), **ENGINE)) as llama,
        Encoder(llama, natives.by_ctx, "ffn_input", n_batch=32) as encoder,
        Archive.open(store, binding_of(llama, "ffn_input"), writable=True) as archive,
    ):
        add_conversations(archive, llama, encoder, [(CONVERSATIONS[0], "test")])
    return keys_in(store)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configured", "asked"), [(1.0, 0.3), (0.5, None)], ids=["block", "config"]
)
def test_what_is_learned_does_not_depend_on_the_level_in_use(
    model, whole, tmp_path, configured, asked
):
    remember(tmp_path, CONVERSATIONS[0].messages, title=CONVERSATIONS[0].title)
    own = {"store": str(tmp_path), "learn": True, "idle_s": 0.01}
    config = {"elastic": {"level": configured}, "knn_lm": own}
    with (
        activate({"on_error": "raise", "plugins": config}) as suite,
        contextlib.closing(Llama(str(model), **ENGINE)) as llama,
    ):
        llama("Hello", max_tokens=1)
        with elastic.level(asked) if asked else contextlib.nullcontext():
            wait_until(lambda: suite.status()["plugins"]["knn_lm"]["learned"] == 1)
    assert np.array_equal(keys_in(tmp_path), whole)


def test_only_what_the_whole_model_computes_is_mixed(model, tmp_path):
    stored(model).write(tmp_path)

    def said(llama, level):
        llama.reset()
        with elastic.level(level):
            prompt = f"User: {QUESTIONS[0]}\nAssistant:"
            reply = llama(prompt, max_tokens=8, temperature=0.0, stream=True)
        return "".join(piece["choices"][0]["text"] for piece in reply)

    def texts(**plugins):
        with (
            activate({"on_error": "raise", "plugins": {"elastic": {}, **plugins}}) as suite,
            contextlib.closing(Llama(str(model), **ENGINE)) as llama,
        ):
            found = [said(llama, level) for level in (0.5, 1.0, 0.9)]
            return found, suite.status()["plugins"].get("knn_lm")

    alone, _ = texts()
    found, report = texts(knn_lm={"store": str(tmp_path), "look_back": 0, "k": 16})
    assert [found[0], found[2]] == [alone[0], alone[2]]
    assert found[1] != alone[1]
    assert (report["mixed"], report["at_other_levels"]) == (8, 16)


def test_gains_are_those_of_the_whole_model(model, tmp_path):
    stored(model).write(tmp_path)
    own = {"store": str(tmp_path), "look_back": 32, "k": 16}
    with (
        activate({"on_error": "raise", "plugins": {"elastic": {}, "knn_lm": own}}) as suite,
        contextlib.closing(Llama(str(model), **ENGINE)) as llama,
    ):
        n_remembered = []
        for level in (0.5, 1.0, 0.5):
            llama.reset()
            with elastic.level(level):
                llama(f"User: {QUESTIONS[0]}\nAssistant:", max_tokens=8, temperature=0.0)
            n_remembered.append(suite.status()["plugins"]["knn_lm"]["remembered_gains"])
    assert n_remembered[0] == 0 < n_remembered[1] == n_remembered[2]
