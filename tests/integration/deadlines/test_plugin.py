"""deadlines on the packaged model: levels follow promises, measured times and stored contexts."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request

import numpy as np
import pytest
from leveled import Recorder, write_times
from llama_cpp import Llama
from preparing import prepare
from served import serving
from switching import PROMPT, ask

from llmaas_hooks import RequestCost, ShorterPrompt, hookimpl, request_scope, serving_context
from llmaas_plugins import activate, deadlines, elastic, short_prompts
from llmaas_plugins.config import ServiceConfig
from llmaas_plugins.elastic import latency
from llmaas_plugins.elastic.latency import latency_path
from llmaas_plugins.model.digest import Digest
from llmaas_plugins.service import LLMService

N = len(PROMPT)
LONG = [1, *range(300, 379)]
DAYS = [
    "Once",
    "Then",
    "Later",
    "Soon",
    "Often",
    "Now",
    "Again",
    "Here",
    "There",
    "Still",
    "Today",
    "Alone",
]


@pytest.fixture
def model(reference_model, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "DIRECTORY", tmp_path / "latency")
    model = prepare(reference_model, tmp_path / "model.gguf", tables=("uniform",))
    write_times(model)
    return model


@pytest.fixture
def start():
    """Return a function that activates, and opens an engine."""
    with contextlib.ExitStack() as stack:

        def start(model, settings=None, listeners=None, **plugins):
            recorder = Recorder()
            config = {"elastic": {}, "deadlines": settings or {}} | plugins
            listeners = {"recorder": recorder} | (listeners or {})
            suite = stack.enter_context(
                activate({"on_error": "raise", "plugins": config}, listeners)
            )
            llama = Llama(str(model), n_ctx=256, verbose=False, n_threads=1, n_threads_batch=1)
            stack.enter_context(contextlib.closing(llama))
            return suite, llama, recorder

        yield start


def status(suite):
    return suite.status()["plugins"]["deadlines"]


def test_prompt_and_answer_get_the_widest_levels_that_fit(model, start):
    suite, llama, recorder = start(model)
    with deadlines.slo(ttft="60 %", tpot="40 %"):
        ask(llama, PROMPT, 3)
    assert recorder.taken(llama) == [(0.6, N), (0.4, 1), (0.4, 1)]
    ask(llama, LONG, 2)
    assert recorder.taken(llama)[0][0] == 1.0
    found = status(suite)
    assert found["requests"] | {"met": 1, "promised": 1} == found["requests"]
    assert found["last"][""]["ttft"]["measured_ms"] > 0
    assert found["last"][""]["tpot"]["measured_ms"] > 0


def test_predictions_follow_the_machine(model, start):
    """The table's times are seconds, and the packaged model takes milliseconds."""
    suite, llama, recorder = start(model)
    with deadlines.slo(ttft="2 s", tpot="2 s"):
        for i in range(4):
            llama.reset()
            ask(llama, [1, 400 + i, *PROMPT[2:]], 3)
    taken = recorder.taken(llama)
    assert taken[0] == (0.2, N)
    assert taken[-3:] == [(1.0, N), (1.0, 1), (1.0, 1)]
    assert status(suite)["requests"]["infeasible"] == 1
    assert status(suite)["last"][""]["ttft"]["expected_ms"] < 2000


def test_the_apps_own_levels_are_kept(model, start):
    _, llama, recorder = start(model)
    with deadlines.slo(ttft="60 %", tpot="40 %"), elastic.level(prefill=0.9):
        ask(llama, PROMPT, 2)
    assert recorder.taken(llama) == [(0.9, N), (0.4, 1)]


def test_cells_that_are_there_leave_time_for_a_wider_level(model, start):
    suite, llama, recorder = start(model, {"ttft": "60 %"})
    ask(llama, LONG, 1)
    ask(llama, [*LONG, 401, 402], 1)
    assert recorder.taken(llama)[-1] == (1.0, 2)
    assert status(suite)["requests"]["infeasible"] == 0


def test_a_prompt_that_is_appended_to_the_cells_is_evaluated_whole(model, start):
    _, llama, recorder = start(model, {"ttft": "60 %"})
    ask(llama, LONG, 1)
    recorder.taken(llama)
    llama.n_tokens = 0  # the app starts over by itself
    next(llama.generate(LONG, reset=False, temp=0.0))
    assert recorder.taken(llama) == [(0.6, len(LONG))]


def test_times_may_be_measured_while_the_app_runs(model, start):
    path = latency_path(model, "uniform")
    path.unlink()
    _, llama, recorder = start(model, {"ttft": "60 %"})
    ask(llama, PROMPT, 1)
    write_times(model)
    llama.reset()
    ask(llama, [1, 401, *PROMPT[2:]], 1)
    assert [level for level, _ in recorder.taken(llama)] == [1.0, 0.6]


def test_stored_contexts_leave_time_for_a_wider_level(model, start, tmp_path):
    kv = {"store": str(tmp_path / "kv"), "codec": "lossless"}
    suite, llama, recorder = start(model, {"ttft": "60 %"}, kv_chunks=kv)
    for context in "ab":
        with serving_context(context):
            ask(llama, [1, ord(context), *LONG[2:]], 1)
    suite.settle()
    recorder.taken(llama)
    with serving_context("a"):
        ask(llama, [1, ord("a"), *LONG[2:], 401, 402], 1)
    level, n = recorder.taken(llama)[-1]
    assert n < len(LONG) // 2
    assert level == 1.0


class Shortener:
    """Plugin that can leave out the middle of a prompt."""

    @hookimpl
    def llmaas_cost(self, request):
        shorter = (ShorterPrompt(x, int(x * len(request.tokens)), 0.001) for x in (0.7, 0.4))
        return RequestCost(shorter=tuple(shorter))

    @hookimpl
    def llmaas_shorten(self, request, share):
        if share is None:
            return None
        n_read = int(share * len(request.tokens))
        return np.concatenate([request.tokens[:1], request.tokens[1 - n_read :]])


def test_a_prompt_is_shortened_if_no_level_keeps_the_promise(model, start):
    suite, llama, recorder = start(model, listeners={"shortener": Shortener()})
    n_read = int(0.7 * N)
    for ttft, expected, n_left_out in (("25 %", (0.2, N), 0), ("15 %", (0.2, n_read), N - n_read)):
        llama.reset()
        with deadlines.slo(ttft=ttft), request_scope.noting() as notes:
            answer = ask(llama, PROMPT, 3)[0]
        assert recorder.taken(llama)[0] == expected
        assert notes["deadlines"]["prompt"]["left_out"] == n_left_out
        assert notes["deadlines"]["infeasible"] == []
    assert status(suite)["requests"]["shortened"] == 1
    llama.reset()
    with elastic.level(prefill=0.2):
        assert ask(llama, [PROMPT[0], *PROMPT[1 - n_read :]], 3)[0] == answer


@pytest.mark.parametrize("share", [None, 0.4])
def test_short_prompts_reads_what_was_planned(model, start, share):
    suite, llama, recorder = start(model, short_prompts={"scorer": "last"})
    text = "\n\n".join(f"{one} a man went to the river and sat on a stone." for one in DAYS)
    prompt = llama.tokenize(text.encode(), True, True)
    asked = contextlib.nullcontext() if share is None else short_prompts.share(share)
    with deadlines.slo(ttft="15 %"), asked, request_scope.noting() as notes:
        ask(llama, prompt, 2)
    plan, read = notes["deadlines"]["prompt"], notes["short_prompts"]
    assert plan["share"] == read["share"] == (share or 0.7)
    assert plan["left_out"] == len(prompt) - read["tokens_read"] > 0.25 * len(prompt)
    level = notes["deadlines"]["ttft"]["level"]
    assert level == (0.2 if share is None else 0.3)  # 0.3 of 40 % is within 15 %, too
    assert recorder.taken(llama)[0] == (level, read["tokens_read"])
    assert notes["deadlines"]["infeasible"] == []
    assert status(suite)["requests"]["shortened"] == 1


def test_a_prompt_that_the_app_reads_stays_whole_and_is_judged_as_whole(model, start):
    """The host shortens no prompt whose positions the app counts on."""
    suite, llama, recorder = start(model, {"ttft": "15 %"}, listeners={"shortener": Shortener()})
    answer = llama.generate(PROMPT, temp=0.0, stopping_criteria=lambda *_: False)
    next(answer)
    answer.close()
    assert recorder.taken(llama)[0] == (0.2, N)
    found = status(suite)
    assert "prompt" not in found["last"][""]  # there was nothing to choose from
    assert found["requests"] | {"infeasible": 1, "shortened": 0} == found["requests"]


def test_apps_have_limits_of_their_own(model, start):
    suite, llama, recorder = start(model, {"apps": {"keyboard": {"ttft": "30 %"}}})
    for app in ("mail", "keyboard"):
        llama.reset()
        with serving_context("c", app):
            ask(llama, [1, 400 + len(app), *PROMPT[2:]], 1)
    assert [level for level, _ in recorder.taken(llama)] == [1.0, 0.3]
    assert list(status(suite)["last"]) == ["keyboard"]


def test_a_relative_path_names_the_same_times(model, start, monkeypatch):
    monkeypatch.chdir(model.parent)
    _, llama, recorder = start(model.name, {"ttft": "60 %"})
    monkeypatch.chdir("/")
    ask(llama, PROMPT, 1)
    assert recorder.taken(llama) == [(0.6, N)]


def test_a_model_that_is_still_being_identified_is_planned_for_later(model, start, monkeypatch):
    """A request does not wait until a large file is read."""
    get, waits = Digest.get, []

    def late(self, seconds=None):
        waits.append(seconds)
        return None if len(waits) == 1 else get(self, seconds)

    suite, llama, recorder = start(model, {"ttft": "60 %"})
    monkeypatch.setattr(Digest, "get", late)
    for i in range(2):
        llama.reset()
        ask(llama, [1, 400 + i, *PROMPT[2:]], 1)
    assert [level for level, _ in recorder.taken(llama)] == [1.0, 0.6]
    assert waits[0] <= 0.1
    assert status(suite)["requests"]["unplanned"] == 1


@pytest.mark.parametrize("what", ["none", "damaged", "replaced"])
def test_without_usable_times_the_whole_model_answers(model, start, what, caplog):
    path = latency_path(model, "uniform")
    if what == "none":
        path.unlink()
    elif what == "damaged":
        path.write_bytes(path.read_bytes()[:-2])
    suite, llama, recorder = start(model, {"ttft": "30 %"})
    if what == "replaced":
        other = model.with_suffix(".new")
        other.write_bytes(model.read_bytes())
        other.replace(model)
    ask(llama, PROMPT, 2)
    assert recorder.taken(llama) == [(1.0, N), (1.0, 1)]
    assert status(suite)["requests"]["unplanned"] == 1
    assert "llmaas elastic profile" in caplog.text


def test_a_model_that_is_not_prepared_is_served(reference_model, start):
    suite, llama, _ = start(reference_model, {"ttft": "1 s"})
    assert ask(llama, PROMPT, 2)
    assert status(suite)["requests"]["unplanned"] == 1


def test_without_promises_the_text_is_the_same(model, start):
    suite, llama, _ = start(model)
    expected = ask(llama, PROMPT, 8)[0]
    suite.deactivate()
    with (
        activate({"plugins": {"elastic": {}}}),
        contextlib.closing(
            Llama(str(model), n_ctx=256, verbose=False, n_threads=1, n_threads_batch=1)
        ) as other,
    ):
        assert ask(other, PROMPT, 8)[0] == expected


def test_an_app_reads_what_was_kept(model, start, tmp_path):
    _, llama, _ = start(model, {"ttft": "2 s"})
    with request_scope.noting() as notes:
        ask(llama, PROMPT, 2)
    assert notes["deadlines"]["ttft"]["promised"] == "2000 ms"
    with (
        LLMService(llama, ServiceConfig(state_dir=tmp_path / "state")) as service,
        deadlines.slo(ttft="40 %"),
    ):
        reply = service.bind("mail").new_context().call("Who?", max_tokens=2)
    assert reply.notes["deadlines"]["ttft"]["promised"] == "40 %"


CONFIG = """
on_error = "raise"
[service]
state_dir = "state"
[plugins.elastic]
[plugins.deadlines]
"""


def post(server, path, body, **headers):
    request = urllib.request.Request(
        f"{server.address}{path}",
        json.dumps({"max_tokens": 2, "temperature": 0.0} | body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            notes = json.loads(response.headers.get("X-LLMaaS-Notes", "{}"))
            return response.status, json.load(response) | {"notes": notes}
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_service_takes_a_field_and_a_header(model, tmp_path):
    pytest.importorskip("fastapi")
    with serving(tmp_path, "--model", str(model), config=CONFIG) as server:

        def last(app=""):
            return server.status()["plugins"]["deadlines"]["last"][app]

        slo = {"ttft": "5 s", "tpot": "50 %"}
        status, answer = post(server, "/v1/completions", {"prompt": "Once", "slo": slo})
        assert status == 200
        assert answer["notes"]["deadlines"] == last()
        assert (last()["ttft"]["promised"], last()["tpot"]["promised"]) == ("5000 ms", "50 %")
        header = {"X-LLMaaS-SLO": "4 s/70 ms"}
        body = {"prompt": "Twice", "slo": {"tpot": "1 s"}}
        assert post(server, "/v1/completions", body, **header)[0] == 200
        assert (last()["ttft"]["promised"], last()["tpot"]["promised"]) == ("4000 ms", "1000 ms")
        context = server.client.bind("mail").new_context()
        reply = context.call("Who?", slo={"ttft": "3 s"}, max_tokens=2)
        assert reply["notes"]["deadlines"] == last("mail")
        assert context.call("And who?", max_tokens=2)["notes"] == {}
        assert last("mail")["ttft"]["promised"] == "3000 ms"
        assert server.metrics()['llmaas_deadlines_requests{key="promised"}'] == 3
        assert post(server, "/v1/completions", body | {"slo": {"ttft": None}})[0] == 200
        status, answer = post(server, "/v1/embeddings", {"input": "Once", "slo": slo})
        assert status == 400
        for wrong in ({}, "300 ms", {"ttft": 300}, {"first": "1 s"}, [1]):
            status, answer = post(server, "/v1/completions", {"prompt": "No", "slo": wrong})
            assert status == 400
            assert answer["error"]["message"].startswith("slo: ")
            assert "expected" in answer["error"]["message"]
        for header in ("/", "fast", "1 s/2 s/3 s"):
            status, answer = post(
                server, "/v1/completions", {"prompt": "No"}, **{"X-LLMaaS-SLO": header}
            )
            assert status == 400
            assert "X-LLMaaS-SLO: expected" in answer["error"]["message"]


def test_a_service_without_the_plugin_refuses_promises(model, tmp_path):
    pytest.importorskip("fastapi")
    config = CONFIG.replace("[plugins.deadlines]\n", "")
    with serving(tmp_path, "--model", str(model), config=config) as server:
        status, answer = post(server, "/v1/completions", {"prompt": "Once", "slo": {"ttft": "1 s"}})
        assert status == 400
        assert "the plugin deadlines is not on" in answer["error"]["message"]
