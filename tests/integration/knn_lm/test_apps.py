"""Stored chats belong to their app and never influence another app's answers or drafts."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
from datastores import CONVERSATIONS, QUESTIONS, K, stored
from mixed_requests import mixing_engine
from served import wait_until

from llmaas_hooks import serving_context
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.build.inbox import remember, waiting_files
from llmaas_plugins.knn_lm.datastore.datastore import Datastore

OWNERS = ["mail", None, "notes", None, None, "mail"]
"""Apps of the conversations; ``mail`` owns the one about QUESTIONS[0]."""


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, for which similar texts are close."""
    return packaged_model


@pytest.fixture
def using(reference_model):
    """Return a function that activates for a store and makes an engine."""

    return functools.partial(mixing_engine, reference_model)


def says(llama, app, n=12):
    """Return the answer that the app gets to each question."""
    found = []
    with serving_context(None, app):
        for question in QUESTIONS:
            llama.reset()
            prompt = f"User: {question}\nAssistant:"
            found.append(llama(prompt, max_tokens=n, temperature=0.0)["choices"][0]["text"])
    return found


@pytest.mark.slow
def test_an_app_is_answered_as_if_other_apps_had_stored_nothing(using, reference_model, tmp_path):
    pairs = stored(reference_model)
    whose = np.array(OWNERS, object)[pairs.origins[:, 0]]
    pairs.write(tmp_path / "all", owners=OWNERS)
    alone = {}
    for app in ("mail", "notes", None):
        pairs.write(tmp_path / str(app), rows=(whose == app) | (whose == None))  # noqa: E711
        with using(tmp_path / str(app)) as (_, llama):
            alone[app] = says(llama, app)
    assert alone["mail"] != alone["notes"]
    with using(tmp_path / "all") as (_, llama):
        for app in ("notes", "mail", None, "notes", "other"):
            assert says(llama, app) == alone[None if app == "other" else app]
    pairs.write(tmp_path / "shared")
    with using(tmp_path / "shared") as (_, llama):
        expected = says(llama, "game")
    with using(tmp_path / "all", share_across_apps=True) as (_, llama):
        assert says(llama, "game") == expected


def test_an_approximate_search_answers_every_app(using, reference_model, tmp_path):
    pytest.importorskip("faiss")
    stored(reference_model).write(tmp_path, owners=OWNERS)
    with using(tmp_path, index="faiss") as (suite, llama):
        for app in ("notes", "mail", None, "notes", "other"):
            says(llama, app, n=4)
        assert suite.status()["plugins"]["knn_lm"]["mixed"] > 0


def test_rows_that_an_app_may_hear_are_the_only_ones_found(reference_model, tmp_path):
    pairs = stored(reference_model)
    whose = np.array(OWNERS, object)[pairs.origins[:, 0]]
    for index in ("scan", "faiss"):
        path = pairs.write(tmp_path / index, owners=OWNERS)
        if index == "faiss":
            pytest.importorskip("faiss")
        with contextlib.closing(Datastore.open(path, None, index)) as store:
            for app in ("mail", "notes", None):
                ranges = store.ranges_for(app)
                for query in pairs.keys[::9].astype(np.float32):
                    rows = store.search(query, K, ranges).rows
                    assert len(rows)
                    assert {whose[row] for row in rows.tolist()} <= {app, None}


def test_a_datastore_of_one_app_says_nothing_to_others(using, reference_model, tmp_path):
    stored(reference_model).write(tmp_path, owners=["mail"] * len(OWNERS))
    with using(tmp_path, look_back=32) as (suite, llama):
        says(llama, "notes"), says(llama, None)
        assert suite.status()["plugins"]["knn_lm"]["mixed"] == 0
        says(llama, "mail")
        assert suite.status()["plugins"]["knn_lm"]["mixed"] > 0


def test_forgetting_leaves_the_owners_of_the_others(reference_model, tmp_path):
    path = stored(reference_model).write(tmp_path, owners=OWNERS)
    Datastore.without(path, [CONVERSATIONS[1].title])
    with contextlib.closing(Datastore.open(path, None)) as store:
        owners = [owner for i, owner in enumerate(OWNERS) if i != 1]
        for app in ("mail", "notes"):
            rows = [row for within in store.ranges_for(app) for row in within]
            may = [owners[i] in {app, None} for i in store.origins[:, 0].tolist()]
            assert rows == np.flatnonzero(may).tolist()


@pytest.mark.slow
def test_what_is_learned_and_proposed_belongs_to_its_app(using, tmp_path):
    for one, app in zip(CONVERSATIONS, OWNERS, strict=True):
        remember(tmp_path, one.messages, title=one.title, app=app)
    with using(tmp_path, learn=True, idle_s=0.01, drafts=True, mix=False) as (suite, llama):
        says(llama, None, n=1)
        wait_until((tmp_path / SELECTED).exists)
        wait_until(lambda: not waiting_files(tmp_path))
        registry = suite.plugin("knn_lm")._drafts
        for app in ("mail", "notes", None, "other"):
            says(llama, app)
        (drafts,) = registry._drafts.values()
        found = {app: draft._stored.sequences() for app, draft in drafts.items()}
        with Archive.open(tmp_path) as archive:
            for app in ("mail", "notes", None):
                ids = [id_ for id_ in archive.ids() if archive.owner(id_) in {app, None}]
                assert {tuple(tokens.tolist()) for tokens in found[app]} == {
                    tuple(archive.tokens(id_).tolist()) for id_ in ids
                }
        assert set(found) == {"mail", "notes", None}
    with contextlib.closing(Datastore.open(tmp_path / SELECTED, None)) as store:
        assert len(store.ranges_for("mail")) == len(store.ranges_for("notes")) == 2
        assert len(store.ranges_for(None)) == 1
