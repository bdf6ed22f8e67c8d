"""Chats learned in a service with all four plugins, and the apps whose answers use them."""

from __future__ import annotations

import contextlib

import pytest
from datastores import CONVERSATIONS, ENGINE
from llama_cpp import Llama
from packed_models import pack
from preparing import prepare
from served import wait_until

from llmaas_plugins import activate, elastic
from llmaas_plugins.chats.exports import Message
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.build.inbox import remember, waiting_files
from llmaas_plugins.machine import resident_bytes
from llmaas_plugins.service import LLMService, ServiceConfig

QUESTION = "What is the word of the day?"
SECRETS = {
    "mail": "The word of the day is heliotrope, and nothing else.",
    "notes": "The word of the day is marzipan, and nothing else.",
}
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(reference_model, tmp_path_factory):
    path = prepare(reference_model, tmp_path_factory.mktemp("knn") / "model.gguf")
    pack(path)
    return path


@contextlib.contextmanager
def service(model, folder, **knn):
    """Start a service with all four plugins, an idle device and streamed weights."""
    mixed = {"alpha": 0.9, "beta": 0.0, "skip_above": 1.0, "k": 8, "look_back": 0}
    knn |= {"store": str(folder / "knn"), "learn": True, "idle_s": 0.01} | mixed
    plugins = {
        "kv_chunks": {"store": str(folder / "kv"), "codec": "lossless"},
        "flash_weights": {"memory_budget": resident_bytes() + (100 << 20), "arena": 1 << 20},
        "elastic": {},
        "knn_lm": knn,
    }
    with (
        activate({"on_error": "raise", "plugins": plugins}) as suite,
        contextlib.closing(Llama(str(model), **ENGINE | {"n_ubatch": 1})) as llama,
        contextlib.closing(LLMService(llama, ServiceConfig(state_dir=folder / "state"))) as found,
    ):
        yield suite, found


def answers(service):
    """Return each app's answers in a new conversation."""
    found = {}
    for app in ("game", *SECRETS, "game", "mail"):
        reply = service.bind(app).new_context().call(QUESTION, **GREEDY).text
        assert found.setdefault(app, reply) == reply
    return found


def status(suite, plugin):
    return suite.status()["plugins"][plugin]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_what_an_app_lets_be_learned_is_in_its_own_answers_only(model, tmp_path, drafts):
    """This holds before and after a restart and at any level."""
    store = tmp_path / "knn"
    for app, secret in SECRETS.items():
        messages = [Message("user", QUESTION), Message("assistant", secret)]
        remember(store, messages, title="word", app=app)
        for one in CONVERSATIONS:
            remember(store, one.messages, title=one.title, app=app)
    with service(model, tmp_path, drafts=drafts) as (suite, served):
        before = answers(served)
        wait_until((store / SELECTED).exists)
        wait_until(lambda: not waiting_files(store))
        after = answers(served)
        with elastic.level(0.5):
            narrow = answers(served)
        assert status(suite, "knn_lm")["learned"] == 2 * (len(CONVERSATIONS) + 1)
        assert status(suite, "flash_weights")["models"][0]["read_bytes"] > 0
    with service(model, tmp_path, drafts=drafts) as (suite, served):
        again = answers(served)
        assert status(suite, "kv_chunks")["reused_tokens"] > 0
        assert (status(suite, "knn_lm").get("accepted", 0) > 0) == drafts
    assert before["mail"] == before["notes"] == before["game"]
    for found in (after, again):
        assert "heliotrope" in found["mail"]
        assert "marzipan" in found["notes"]
        assert found["game"] == before["game"]
    for found in (after, again, narrow):
        for app, other in (("mail", "marzipan"), ("notes", "heliotrope")):
            assert other not in found[app]
            assert other not in found["game"]
