"""Apps of the service, without an engine: names, limits, and visibility of contexts."""

from __future__ import annotations

import json
import re

import pytest

from llmaas_hooks import ConfigError, LimitError
from llmaas_plugins.files.sqlite_erasing import Eraser
from llmaas_plugins.server.client import LLMClient
from llmaas_plugins.service import LLMService, ServiceConfig
from llmaas_plugins.service.service import Context


def no_engine():
    pytest.fail("nothing here may ask for the engine")


@pytest.fixture
def service(tmp_path):
    config = ServiceConfig(state_dir=tmp_path, max_contexts_per_app=2)
    with LLMService(no_engine, config) as service:
        yield service


@pytest.mark.parametrize("name", ["mail", "com.example.mail", "Grüße 世界", "a" * 128, ".", " "])
def test_app_names(service, name):
    context = service.bind(name).new_context()
    assert service.bind(name).contexts() == [context]


@pytest.mark.parametrize("name", ["", "a" * 129, "a\nb", "a\x00", "\ud800", "a/b"])
def test_bad_app_names(service, name):
    with pytest.raises(ConfigError, match="app name must be 1 to 128 printable characters") as e:
        service.bind(name)
    assert repr(name) in str(e.value)


def test_new_context_keeps_the_system_prompt(service):
    app = service.bind("mail")
    assert app.new_context("Be brief.").record().messages == [
        {"role": "system", "content": "Be brief."}
    ]
    record = app.new_context().record()
    assert (record.messages, record.n_tokens, record.n_calls) == ([], 0, 0)
    assert record.created == pytest.approx(record.used)


def test_a_context_is_printed_by_its_names(service):
    context = service.bind("mail").new_context("Be brief.")
    assert repr(context) == f"Context({context.id!r}, app='mail')"


def test_most_contexts_of_an_app(service):
    app = service.bind("mail")
    first, _ = app.new_context(), app.new_context()
    with pytest.raises(LimitError, match=r"app 'mail' has 2 .*service\.max_contexts_per_app"):
        app.new_context()
    service.bind("notes").new_context()  # the others have their own
    first.delete()
    app.new_context()


def test_apps_do_not_see_each_other(service):
    mine = service.bind("mail").new_context("secret")
    other = service.bind("notes")
    assert other.contexts() == []
    with pytest.raises(LookupError, match=f"app 'notes' has no context '{mine.id}'"):
        other.context(mine.id)
    assert service.bind("mail").context(mine.id) == mine


def test_another_apps_context_cannot_be_told_from_none(service, monkeypatch):
    """Neither messages nor reads differ, and nobody can guess a name of 122 random bits."""
    mine, other = service.bind("mail").new_context("secret " * 1000), service.bind("notes")
    read = []
    monkeypatch.setattr(json, "loads", read.append)  # used to read messages from the file
    said = []
    for name in (mine.id, "0" * 32):
        for use in (other.context, lambda name: Context(name, other).delete()):
            with pytest.raises(LookupError) as caught:
                use(name)
            said.append(str(caught.value).replace(name, "…"))
    assert len(set(said)) == 1
    assert read == []
    assert re.fullmatch("[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}", mine.id)


def test_a_deleted_context_is_gone(service):
    app = service.bind("mail")
    context = app.new_context()
    assert context.delete() == 0  # no suite, so no KV
    for use in (context.record, context.delete, lambda: context.call("hi")):
        with pytest.raises(LookupError, match=context.id):
            use()
    assert app.contexts() == []


def test_a_context_is_deleted_by_an_app_that_changed_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with LLMService(lambda: None, ServiceConfig(state_dir="state")) as service:
        context = service.bind("mail").new_context("You answer mail.")
        monkeypatch.chdir("/")
        context.delete()
        assert context.app.contexts() == []


def test_status_without_a_suite(service):
    assert service.status() == {"queue": 0}


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "https://x", "/run/llmaas.sock", ""])
def test_client_address(address):
    with pytest.raises(ConfigError, match="http://host:port or unix:/path"):
        LLMClient(address)


def test_client_without_a_service(tmp_path):
    with pytest.raises(FileNotFoundError):
        LLMClient(f"unix:{tmp_path}/no.sock").status()


def test_deletions_that_were_begun_are_finished_together(tmp_path, monkeypatch):
    """Without a plugin that stores KV, too, and the files are erased once for all of them."""
    config = ServiceConfig(state_dir=tmp_path / "state")
    with LLMService(lambda: None, config) as service:
        app = service.bind("mail")
        for i in range(5):
            service._log.delete(app.new_context(f"secret {i}").id, "mail")  # killed after that
        assert len(service._log.deletions()) == 5
    erase, erased = Eraser.erase, []
    monkeypatch.setattr(Eraser, "erase", lambda self: erased.append(erase(self)))
    with LLMService(lambda: None, config) as service:
        assert service._log.deletions() == []
    assert erased == [None]
    left = b"".join(path.read_bytes() for path in (tmp_path / "state").iterdir())
    assert b"secret" not in left


def test_a_context_without_kv_leaves_no_name(tmp_path):
    with LLMService(lambda: None, ServiceConfig(state_dir=tmp_path / "state")) as service:
        service.bind("mail").new_context("secret").delete()
        assert service._log.deletions() == []


def test_the_overview_is_of_one_app_or_of_all(service):
    ids = [service.bind(app).new_context("secret").id for app in ("mail", "notes", "mail")]
    found = service.overview("mail")
    assert found["n_contexts"] == 2
    assert [one["id"] for one in found["contexts"]] == [ids[2], ids[0]]
    assert "secret" not in json.dumps(found)
    assert all(one["places"] is None for one in found["contexts"])  # kv_chunks is not on
    assert {one["id"] for one in service.overview()["contexts"]} == set(ids)
    assert service.overview("game") == {"n_contexts": 0, "contexts": []}


def test_the_overview_lists_the_latest_contexts(service, monkeypatch):
    monkeypatch.setattr("llmaas_plugins.service.service._MOST_LISTED", 2)
    ids = [service.bind(f"app {i}").new_context().id for i in range(3)]
    found = service.overview()
    assert (found["n_contexts"], [one["id"] for one in found["contexts"]]) == (3, ids[:0:-1])
