"""Served calls ask for shares, and judging ends when nobody waits for the answer."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

import pytest
from served import serving, wait_until

STORY = (
    "the old keeper of the tower walks down to the water each morning and looks for the boats that "
    "come back from the sea with nets and fish while the wind is still low and the birds are quiet "
)
ASKED = "What does the keeper do?"
TURN = f"Read this.\n{STORY * 3}\n\nWhat does the keeper do?"


def post(server, path, body, **headers):
    request = urllib.request.Request(
        f"{server.address}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"} | headers,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers, json.load(answer)


def test_served_calls_ask_by_a_field_or_a_header(tmp_path):
    own = '[plugins.short_prompts]\nleast_tokens = 32\nscorer = "first"\n'
    config = f'[service]\nstate_dir = "state"\n{own}'
    body = {"prompt": TURN, "max_tokens": 2}
    with serving(tmp_path, config=config, n_ctx=512) as server:
        for given, headers in (
            ({"prompt_share": 0.5}, {}),
            ({}, {"X-LLMaaS-Prompt-Share": "0.5"}),
            ({"prompt_share": 0.5}, {"X-LLMaaS-Prompt-Share": "0.9"}),
        ):
            head, _ = post(server, "/v1/completions", body | given, **headers)
            assert json.loads(head["X-LLMaaS-Notes"])["short_prompts"]["share"] == 0.5
        chat = {"messages": [{"role": "user", "content": body["prompt"]}], "max_tokens": 2}
        head, answer = post(server, "/v1/chat/completions", chat | {"prompt_share": 0.5})
        note = json.loads(head["X-LLMaaS-Notes"])["short_prompts"]
        assert answer["usage"]["prompt_tokens"] == note["tokens"] > note["tokens_read"]
        context = post(server, "/v1/llmaas/apps/notes/contexts", {})[1]["id"]
        path = f"/v1/llmaas/apps/notes/contexts/{context}/call"
        found = post(server, path, {"prompt": body["prompt"], "max_tokens": 2, "prompt_share": 0.5})
        assert found[1]["notes"]["short_prompts"]["share"] == 0.5
        for wrong in (0, 1.5, "half", True, [0.5]):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(server, "/v1/completions", body | {"prompt_share": wrong})
            assert refused.value.code == 400
            assert "prompt_share" in refused.value.read().decode()


def test_judging_ends_when_the_client_leaves(tmp_path):
    own = '[plugins.short_prompts]\nscorer = "self_information"\nshare = 0.5\n'
    config = f'[service]\nstate_dir = "state"\n{own}'
    body = json.dumps({"prompt": STORY * 24, "max_tokens": 1}).encode()
    with serving(tmp_path, config=config, n_ctx=2048) as server:
        leaving = http.client.HTTPConnection(server.address.removeprefix("http://"))
        leaving.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_until(lambda: server.metrics()["llmaas_queue_running_calls"])
        leaving.close()
        server.wait_until_idle()
        assert server.status()["plugins"]["short_prompts"]["prompts"] == 0
        post(server, "/v1/completions", {"prompt": TURN * 2, "max_tokens": 1})
        assert server.status()["plugins"]["short_prompts"]["prompts"] == 1
        assert "Traceback" not in server.log()
