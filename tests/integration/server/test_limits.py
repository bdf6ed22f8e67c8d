"""Limits of ``llmaas serve``: keys, bodies, the queue, and its reports about itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading

import pytest
from limited import ADMINISTRATOR, MAIL, NOTES, busy
from served import drain, wait_until

from llmaas_hooks import LimitError

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

SHORT = {"temperature": 0.0, "max_tokens": 4}
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


# -- keys ------------------------------------------------------------------------------------------


def test_an_app_is_served_by_its_key(mail, request_):
    context = mail.new_context("Anna is here.")
    assert context.call("Hi", **SHORT)["text"]
    assert drain(context.stream("Why?", **SHORT))[1]["text"]
    assert [found.id for found in mail.contexts()] == [context.id]
    chat = {"messages": MESSAGES, **SHORT}
    assert request_("POST", CHAT, chat)[0] == 200
    assert request_("GET", "/v1/models")[0] == 200
    assert request_("POST", "/extras/tokenize", {"input": "Hi"})[0] == 200


@pytest.mark.parametrize("key", [None, "wrong", MAIL[:-1]])
def test_nobody_else_is(request_, key):
    for method, path in (
        ("POST", CHAT),
        ("GET", "/v1/models"),
        ("GET", "/v1/llmaas/apps/mail/contexts"),
        ("GET", "/v1/llmaas/status"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
    ):
        status, headers, found = request_(method, path, b"not even JSON", key)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert found["detail"] == found["error"]["message"]
        assert found["detail"].startswith("Invalid API key" if key else "No API key was sent; ")


def test_an_app_does_not_get_at_another_ones_contexts(server, mail, request_):
    context = mail.new_context("secret")
    path = f"/v1/llmaas/apps/mail/contexts/{context.id}"
    for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/call")):
        status, _, found = request_(method, where, b"{}", NOTES)
        assert status == 403
        assert found["detail"] == "This is the key of app 'notes'; it does not open 'mail'."
    assert request_("GET", path.replace("mail", "notes"), key=NOTES)[0] == 404
    for path in ("/metrics", "/v1/llmaas/status"):
        status, _, found = request_("GET", path)
        assert status == 403
        assert "needs the administrator's key" in found["detail"]
    # the administrator may
    assert server.client.bind("mail").context(context.id).record()["messages"]


def test_the_openai_client_understands_refusals(server):
    def client(key):
        return openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0)

    with client("wrong") as stranger, pytest.raises(openai.AuthenticationError) as caught:
        stranger.chat.completions.create(model="any", messages=MESSAGES)
    assert caught.value.body["message"] == "Invalid API key"
    with client(MAIL) as mail, pytest.raises(openai.BadRequestError, match="max_tokens"):
        mail.chat.completions.create(model="any", messages=MESSAGES, max_tokens="many")
    with client(MAIL) as mail, pytest.raises(openai.APIStatusError) as caught:
        mail.completions.create(model="any", prompt="x" * 20_000)
    assert caught.value.status_code == 413


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["at once", "in chunks"])
def test_a_body_that_is_too_long(server, request_, how):
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    if how == "at once":
        status, _, found = request_("POST", "/v1/completions", body)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        with contextlib.closing(connection):
            pieces = (body[i : i + 1000] for i in range(0, len(body), 1000))
            headers = {"Authorization": f"Bearer {MAIL}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", pieces, headers, encode_chunked=True)
            response = connection.getresponse()
            status, found = response.status, json.loads(response.read())
    assert status == 413
    assert "longer than 16384 bytes, service.max_body_bytes" in found["error"]["message"]


def test_a_body_in_chunks(server):
    body = json.dumps({"prompt": "Once", **SHORT}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        headers = {"Authorization": f"Bearer {MAIL}", "Content-Type": "application/json"}
        pieces = (body[i : i + 7] for i in range(0, len(body), 7))
        connection.request("POST", "/v1/completions", pieces, headers, encode_chunked=True)
        assert json.loads(connection.getresponse().read())["choices"][0]["text"]


NOT_JSON = [b"", b"garbage", b'{"a":1}x', b"\xff\xfe", b'{"a": NaN}', b'{"a": 1e999}']
NOT_JSON += [b'{"prompt": "\\ud800"}', b"[" * 4000, b'{"a":' * 800, b"[]", b"null", b'"text"']


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: repr(body[:12]))
@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/embeddings", "/extras/tokenize", "contexts"]
)
def test_garbage(server, request_, path, body):
    path = "/v1/llmaas/apps/mail/contexts" if path == "contexts" else path
    status, _, found = request_("POST", path, body)
    assert status == 400
    assert "JSON" in found["error"]["message"]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "json"])
def test_a_body_of_another_type(request_, kind):
    """A page in a browser may send these to another site without being asked."""
    for path in (CHAT, "/v1/llmaas/apps/mail/contexts"):
        status, _, found = request_("POST", path, b'{"messages": []}', kind=kind)
        assert status == 415
        assert f"application/json, found {kind!r}" in found["error"]["message"]


@pytest.mark.parametrize("kind", ["Application/JSON; charset=utf-8", "application/x+json"])
def test_other_names_of_json(request_, kind):
    assert request_("POST", "/extras/tokenize", {"input": "Hi"}, kind=kind)[0] == 200


def schema(pattern):
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}


def tools(pattern):
    function = {"name": "f", "parameters": {**schema(pattern), "required": ["a"]}}
    choice = {"type": "function", "function": {"name": "f"}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}


def form(pattern):
    return {"response_format": {"type": "json_object", "schema": schema(pattern)}}


GRAMMARS = ["x", "root ::= (", 'root ::= root "a"', "root ::= nothing", 'other ::= "a"']
WRONG = [
    (CHAT, {"messages": 5}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "NoneType"),
    (CHAT, {"messages": MESSAGES, "max_tokens": "many"}, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"x": 1}}, "int"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}, "logprobs"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "poem"}}, "response_format"),
    (CHAT, {"messages": MESSAGES * 1000}, "longer than 16384"),
    (CHAT, {"messages": MESSAGES[:1] * 100, "max_tokens": 4, "stream": True, "n": []}, "n:"),
    ("/v1/completions", {"prompt": ["a", "b"]}, "expected one prompt, found 2 prompts"),
    ("/v1/completions", {"prompt": [1] * 5000}, "expected one prompt, found 5000 token ids; send"),
    ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
    ("/v1/completions", {"prompt": "a", "logprobs": 2}, "logprobs"),
    ("/v1/embeddings", {"input": "x"}, "no embeddings"),
    ("/v1/embeddings", {"input": []}, "found an empty list"),
    ("/extras/detokenize", {"tokens": [5, 4096]}, "from 0 to 4095, found 4096"),
    ("/extras/detokenize", {"tokens": [-1]}, "found -1"),
    *((CHAT, {"messages": MESSAGES, "grammar": grammar}, "grammar") for grammar in GRAMMARS),
    (CHAT, {"messages": MESSAGES, **form("^[^]]$")}, "response_format.schema: it needs more"),
    (CHAT, {"messages": MESSAGES, **form("^\\$[0-9]+$")}, "llama.cpp cannot parse it"),
    (CHAT, {"messages": MESSAGES, **tools("^\\$[0-9]+$")}, "tools: llama.cpp cannot"),
    (CHAT, {"messages": MESSAGES, "grammar": "x" * 15000}, "grammar: "),
    (CHAT, {"messages": MESSAGES, "x": json.loads("[" * 70 + "]" * 70)}, "nested deeper than 64"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2**63}, "max_tokens: must be from"),
    (CHAT, {"messages": MESSAGES, "seed": 10**30}, "seed: must be from"),
    ("/v1/completions", {"prompt": "a", "top_k": 10**30}, "top_k: must be from"),
    ("/v1/completions", {"prompt": "a", "temperature": 1e300}, "temperature: must be at most"),
    (CHAT, {"messages": MESSAGES, "presence_penalty": None}, "presence_penalty: must be a number"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 1000}, "stop: at most 64"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"4096": 1}}, "from 0 to 4095, found '4096'"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"-1": 1}}, "found '-1'"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"0" * 12 + "9999": 1}}, "from 0 to 4095"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body", "message"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_cannot_work_with(request_, path, body, message, stream):
    """Some of these crash llama_cpp.server, others give its 500s and empty streams."""
    status, _, found = request_("POST", path, {**body, "stream": stream} if stream else body)
    assert status in (400, 413)
    assert message in found["error"]["message"]


CONTEXTS = "/v1/llmaas/apps/mail/contexts"


@pytest.mark.parametrize(
    ("method", "path", "body", "expected", "message"),
    [
        ("POST", CONTEXTS, {"system": 5, "sytem": ""}, 422, "system: .*string; sytem: unknown key"),
        ("POST", f"{CONTEXTS}/x/call", {"prompt": "Hi", "level": 2}, 422, "^level: the level must"),
        ("GET", f"{CONTEXTS}/x", None, 404, "no context 'x'"),
        ("DELETE", CONTEXTS, None, 405, "Method Not Allowed"),
    ],
)
def test_errors_of_our_own_routes_have_the_same_form(  # noqa: PLR0917  a table
    request_, method, path, body, expected, message
):
    status, _, found = request_(method, path, body)
    assert status == found["status"] == expected
    assert re.search(message, found["error"]["message"])
    assert found["error"]["type"] == "invalid_request_error"
    assert found["detail"] == found["error"]["message"]


GROWING = 'root ::= root2\nroot2 ::= "a" root2 "b" | "a" root2 "c" | "a" root2 "d" | "a"'


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_costs_more_with_each_token(request_, stream):
    body = {"prompt": "aaaa", "grammar": GROWING, "max_tokens": 200, "stream": stream}
    body |= {"temperature": 0.0, "logit_bias": {"66": 100}}
    status, _, found = request_("POST", "/v1/completions", body)
    if stream and status == 200:
        (message,) = re.findall(rb'event: error\ndata: .*"message": "(.*?)"', found)
        assert message.startswith(b"grammar: it needs more")
    else:
        assert status == 400
        assert found["error"]["message"].startswith("grammar: it needs more")
    assert request_("POST", "/v1/completions", {"prompt": "Once", **SHORT})[0] == 200


@pytest.mark.slow
def test_too_many_new_grammars_of_one_app(request_):
    """Each grammar takes a second; other apps come between them."""
    pattern = {"type": "string", "pattern": "^[^]]$"}
    found = []

    def ask_for(i):
        form = {"type": "json_object", "schema": {**pattern, "title": str(i)}}
        body = {"messages": MESSAGES, "response_format": form}
        found.append(request_("POST", CHAT, body)[0])

    threads = [threading.Thread(target=ask_for, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    body = {"prompt": "Once", "grammar": 'root ::= "yes"', **SHORT}
    assert request_("POST", "/v1/completions", body, NOTES)[0] == 200
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [400] * 4 + [429] * 2


@pytest.mark.parametrize("surplus", [{}, {"messages": 5}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit(request_, stream, surplus):
    """The server takes a body with ``messages`` for a chat's when it explains errors."""
    body = {"prompt": "a b " * 3000, "stream": stream} | surplus
    status, _, found = request_("POST", "/v1/completions", body)
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("surplus", [{}, {"messages": 5}])
def test_log_probabilities_that_the_engine_does_not_keep(request_, surplus):
    body = {"prompt": "Once", "logprobs": 1, **SHORT} | surplus
    status, _, found = request_("POST", "/v1/completions", body)
    assert status == 400
    assert "logprobs is not supported" in found["error"]["message"]


# -- the line --------------------------------------------------------------------------------------


def waiting(n, target):
    threads = [threading.Thread(target=target) for _ in range(n)]
    for thread in threads:
        thread.start()
    return threads


def test_calls_of_all_kinds_wait_in_one_line(server, mail, request_):
    done = []

    def complete():
        done.append(request_("POST", "/v1/completions", {"prompt": "Once", **SHORT})[0])

    context = mail.new_context()
    with busy(server, mail):
        threads = waiting(4, complete)
        wait_until(lambda: server.status()["queue"] == 5)
        for method, path, body in (
            ("POST", "/v1/completions", {"prompt": "Once"}),
            ("POST", CHAT, {"messages": MESSAGES, "stream": True}),
            ("GET", "/v1/models", None),
            ("POST", "/extras/tokenize", {"input": "x"}),
            ("DELETE", f"/v1/llmaas/apps/mail/contexts/{context.id}", None),
        ):
            status, headers, found = request_(method, path, body)
            assert (status, headers["retry-after"]) == (429, "1")
            assert found["error"]["code"] == "rate_limit_exceeded"
            assert found["error"]["message"].startswith(
                "4 calls are waiting for the engine, the limit "
            )
        for use in (lambda: context.call("Hi"), lambda: next(context.stream("Hi"))):
            with pytest.raises(LimitError, match=r"the limit is 4.*\(HTTP 429\)"):
                use()
        assert server.status()["queue"] == 5
        assert mail.contexts()  # does not need the engine
        assert request_("GET", "/health", key=None)[0] == 200
    for thread in threads:
        thread.join(60)
    assert done == [200] * 4


def test_one_app_does_not_keep_another_one_out(server, mail, request_):
    done = []

    def complete(key):
        done.append((key, request_("POST", "/v1/completions", {"prompt": "Once", **SHORT}, key)[0]))

    with busy(server, mail):
        threads = waiting(4, lambda: complete(MAIL))
        wait_until(lambda: server.status()["queue"] == 5)
        threads += waiting(2, lambda: complete(NOTES))
        wait_until(lambda: done == [(MAIL, 429)] * 2)
        assert server.status()["queue"] == 5
    for thread in threads:
        thread.join(60)
    assert sorted(done[2:]) == [(MAIL, 200)] * 2 + [(NOTES, 200)] * 2


# -- what it tells about itself --------------------------------------------------------------------


def test_health_needs_no_key(request_):
    assert request_("GET", "/health", key=None)[::2] == (200, {"status": "ok"})


def test_metrics(server, mail, request_):
    before = server.metrics(ADMINISTRATOR)
    context = mail.new_context("Anna is here.")
    for _ in range(2):
        context.call("Hi", **SHORT)
    mail.new_context().call("Where is the station?", **SHORT)
    context.call("Why?", **SHORT)  # a switch back
    assert request_("GET", "/nowhere", key=ADMINISTRATOR)[0] == 404
    after = server.metrics(ADMINISTRATOR)

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown('llmaas_requests_total{route="call",status="200"}') == 4
    assert grown('llmaas_requests_total{route="contexts",status="201"}') == 2
    assert grown('llmaas_requests_total{route="other",status="404"}') == 1
    assert grown("llmaas_generated_tokens_total") == 16
    assert grown("llmaas_decode_seconds_total") > 0
    assert 0 < grown("llmaas_reused_tokens_total") < grown("llmaas_prompt_tokens_total")
    for name in ("switch", "first_token", "queue_wait"):
        assert grown(f"llmaas_{name}_seconds_count") == 4
    assert grown("llmaas_first_token_seconds_sum") > grown("llmaas_switch_seconds_sum") > 0
    assert (after["llmaas_queue_waiting_calls"], after["llmaas_queue_running_calls"]) == (0, 0)
    entries = ["ram_bytes", "disk_bytes", "ram_hits", "disk_hits", "faults", "io_errors"]
    entries += ["restores", "disk_evicted", "restored_tokens"]

    def shown():
        found = server.metrics(ADMINISTRATOR)
        return [found[f"llmaas_kv_chunks_{entry}"] for entry in entries]

    def agrees():  # after all saves have ended
        kv = server.kv()
        return shown() == [kv[entry] for entry in entries]

    wait_until(agrees)
    assert grown("llmaas_kv_chunks_restores") >= 1
    assert grown("llmaas_kv_chunks_restore_seconds") > 0
    assert after["process_resident_memory_bytes"] > 1 << 20


def test_metrics_of_a_busy_server(server, mail):
    with busy(server, mail):
        assert server.metrics(ADMINISTRATOR)["llmaas_queue_running_calls"] == 1
