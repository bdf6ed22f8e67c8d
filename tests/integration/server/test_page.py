"""Figures for the page: contexts by key, where they are, and metrics by the names in use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import mistake
from limited import ADMINISTRATOR, NOTES
from packed_models import pack
from preparing import prepare
from served import launched, serving, wait_until

from llmaas_plugins.cli.main import main
from llmaas_plugins.server import page
from llmaas_plugins.server.client import LLMClient

pytest.importorskip("fastapi")

SHORT = {"temperature": 0.0, "max_tokens": 4}
OVERVIEW = "/v1/llmaas/contexts"
PROMPT = "Anna went to the market and bought bread, milk and eggs for her friends."
DASHBOARD = Path(__file__).parents[3] / "docs" / "how-to" / "grafana.json"
ALL_PLUGINS = """
[service]
state_dir = "state"
[plugins.kv_chunks]
store = "kv"
parked_tokens = 256
[plugins.flash_weights]
memory_budget = "170 MiB"
arena = "1 MiB"
[plugins.elastic]
[plugins.deadlines]
[plugins.knn_lm]
store = "knn"
learn = true
drafts = true
"""


def overview(client):
    return client.request("GET", "/contexts")


def placed(client):
    """Return the places of contexts by id, once each token is counted at one place."""

    def counted():
        contexts = overview(client)["contexts"]
        is_whole = [sum(one["places"].values()) == one["n_tokens"] for one in contexts]
        return contexts if all(is_whole) else None

    contexts = wait_until(counted)  # chunks are stored after the reply
    return {
        one["id"]: {place: n for place, n in one["places"].items() if n > 0} for one in contexts
    }


def mostly(places):
    """Return the place of most tokens; all contexts have their first tokens in common."""
    return max(places, key=places.get)


# -- keys --------------------------------------------------------------------------------------


def test_a_key_sees_the_contexts_of_its_own_app_only(server, mail, request_):
    mine = [mail.new_context("Anna is here.").id for _ in range(2)]
    notes = LLMClient(server.address, api_key=NOTES, timeout_s=60).bind("notes")
    other = notes.new_context("secret")
    status, _, found = request_("GET", OVERVIEW)
    assert (status, found["app"], found["n_contexts"]) == (200, "mail", 2)
    assert [one["id"] for one in found["contexts"]] == mine[::-1]  # the latest first
    assert {one["app"] for one in found["contexts"]} == {"mail"}
    assert all("messages" not in one for one in found["contexts"])
    _, _, found = request_("GET", OVERVIEW, key=NOTES)
    assert (found["app"], [one["id"] for one in found["contexts"]]) == ("notes", [other.id])
    _, _, found = request_("GET", OVERVIEW, key=ADMINISTRATOR)
    assert found["app"] is None
    assert {one["id"] for one in found["contexts"]} == {*mine, other.id}
    assert found["n_contexts"] == 3
    other.delete()


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_a_key_there_are_the_files_only(request_, key):
    assert request_("GET", OVERVIEW, key=key)[0] == 401
    for path in ("/", "/page/page.mjs", "/page/page.css"):
        status, headers, content = request_("GET", path, key=key)
        assert (status, headers["cache-control"]) == (200, "no-cache")
        assert content
    assert request_("HEAD", "/", key=key)[::2] == (200, b"")
    assert request_("GET", "/page/no-such", key=key)[0] == 404
    assert request_("POST", "/", {}, key)[0] == 405


# -- places ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_where_the_tokens_of_contexts_are(tmp_path):
    """They are in the engine, then in RAM beside it, and on disk after a restart."""
    settings = {"kv": "parked_tokens = 256", "n_ctx": 512}
    with serving(tmp_path, **settings) as server:
        app = server.client.bind("mail")
        contexts = [app.new_context(f"You are number {i}. {PROMPT}") for i in range(12)]
        assert placed(server.client)[contexts[0].id] == {}
        for context in contexts:
            context.call(PROMPT, **SHORT)
        first, *_, before, last = (context.id for context in contexts)
        places = placed(server.client)
        assert set(places[last]) == {"cells"}
        assert mostly(places[before]) == "parked"
        assert mostly(places[first]) == "ram"
        contexts[0].delete()
        assert first not in placed(server.client)
        assert overview(server.client)["n_contexts"] == 11
        assert server.stop() == 0
    with serving(tmp_path, **settings) as server:
        server.client.bind("mail").context(contexts[1].id).call(PROMPT, **SHORT)
        places = placed(server.client)
        assert mostly(places[contexts[1].id]) == "cells"
        assert mostly(places[last]) == "disk"


def test_without_kv_chunks_places_are_unknown(tmp_path):
    config = '[service]\nstate_dir = "state"\n[plugins.deadlines]\n'
    with serving(tmp_path, config=config + "[plugins.kv_chunks]\nenabled = false\n") as server:
        server.client.bind("mail").new_context("Hi.").call("Hi", **SHORT)
        assert overview(server.client)["contexts"][0]["places"] is None


# -- names of metrics --------------------------------------------------------------------------


def names_in(text):
    """Return the metrics that a text names, with a key if it names one."""
    found = re.findall(r'((?:llmaas|process)_[a-z][a-z_]*)(?:\{[^}]*?key=\\*"(\w+))?', text)
    return set(found)


@pytest.mark.slow
def test_every_metric_that_the_page_and_the_dashboard_name_exists(reference_model, tmp_path):
    model = prepare(reference_model, tmp_path / "model.gguf")
    pack(model)
    with serving(tmp_path, config=ALL_PLUGINS, model=str(model)) as server:
        context = server.client.bind("mail").new_context(PROMPT)
        for _ in range(2):
            context.call(PROMPT, slo={"ttft": "10 s"}, **SHORT)
        metrics = server.metrics()
    weights = {
        name: metrics[f"llmaas_flash_weights_{name}_bytes"]
        for name in ("weight", "held", "read", "needed")
    }
    assert 0 < weights["weight"] < weights["needed"]
    assert weights["read"] < weights["needed"]  # 0 while they all fit
    assert weights["held"] > 0
    exist = {re.split(r"[{ ]", name)[0] for name in metrics}
    exist_with_key = {name for name in metrics if "key=" in name}
    folder = Path(page.__file__).parent / "page_files"
    expressions = json.dumps(
        [
            target["expr"]
            for panel in json.loads(DASHBOARD.read_text())["panels"]
            for target in panel["targets"]
        ]
    )
    named = names_in(expressions)
    for script in folder.glob("*.mjs"):
        named |= names_in(script.read_text())
    assert len(named) > 25
    for name, key in named:
        assert name in exist, name
        assert not key or f'{name}{{key="{key}"}}' in exist_with_key, (name, key)
    used = re.findall(r'at\("(\w+)"\)', (folder / "metrics.mjs").read_text())
    outcomes = {name for name in used if not name.startswith("llmaas_")}
    assert outcomes
    assert {f'llmaas_deadlines_requests{{key="{key}"}}' for key in outcomes} <= exist_with_key


def test_serve_prints_the_address_of_the_page(server, tmp_path):
    assert f"The page with contexts, memory and speed: {server.address}/\n" in server.log()
    socket = tmp_path / "run" / "s.sock"
    with launched(tmp_path, "--uds", str(socket), config='[service]\nstate_dir = "state"\n') as _:
        log = tmp_path / "log"
        wait_until(lambda: "Listening on unix:" in log.read_text())
        assert "The page" not in log.read_text()


# -- the page of `llmaas status` ---------------------------------------------------------------


def test_the_administrator_sees_a_page_without_a_browser(server, mail, monkeypatch, capsys):
    mail.new_context("Anna is here.").call("Hi", **SHORT)
    asked = ["status", "--url", server.address, "--key-env", "STATUS_KEY"]
    monkeypatch.setenv("STATUS_KEY", ADMINISTRATOR)
    assert main(asked) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{server.address}: 0 calls running or waiting"
    assert [line for line in lines if line.startswith("[")][:2] == ["[calls]", "[memory by owner]"]
    assert any(line.startswith("  the rest ") for line in lines)
    assert "codec=lossless" in lines[lines.index("[kv_chunks]") + 1]
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == server.status().keys()
    monkeypatch.setenv("STATUS_KEY", NOTES)
    said = mistake(capsys, asked)
    assert "not that of app 'notes'. (HTTP 403); --key-env NAME names the variable" in said
    assert "No API key was sent" in mistake(capsys, asked[:3])
