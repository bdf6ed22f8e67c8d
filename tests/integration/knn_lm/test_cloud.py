"""The cloud's answers to an app improve local answers to that app, and to no other one."""

from __future__ import annotations

import httpx
import pytest
import stub_cloud
from datastores import CONVERSATIONS
from served import serving, wait_until
from stub_cloud import StubCloud

from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.build.inbox import waiting_files

pytest.importorskip("fastapi")

KEYS = {app: f"{app}-0123456789abcdef" for app in ("mail", "notes")}
QUESTION = "What is the word of the day?"
SECRET = "The word of the day is heliotrope, and nothing else."
SAID = {QUESTION: SECRET} | {
    one.messages[0].content: one.messages[1].content for one in CONVERSATIONS
}
CONFIG = """
[service]
state_dir = "state"
key_file = "keys.toml"
[plugins.knn_lm]
store = "knn"
learn = true
idle_s = 0.1
alpha = 0.9
beta = 0.0
skip_above = 1.0
k = 8
look_back = 0
[cloud]
base_url = "{url}"
model = "large"
[cloud.apps.mail]
keep = true
"""


def said(connection, request):
    """Answer as the cloud that knows everything."""
    text = SAID[request.body["messages"][-1]["content"]]
    stub_cloud.send_json(connection, 200, stub_cloud.completion(True, text))


def asked(server, app, text=QUESTION, **headers):
    """Return the text of an answer, and which model gave it."""
    response = httpx.post(
        f"{server.address}/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 16,
            "temperature": 0.0,
        },
        headers={"Authorization": f"Bearer {KEYS[app]}", **headers},
        timeout=60,
    )
    answer = response.json()["choices"][0]["message"]["content"]
    return answer, response.headers["x-llmaas-answered-by"]


@pytest.mark.slow
def test_the_local_model_learns_what_the_cloud_said(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text("".join(f'{app} = "{key}"\n' for app, key in KEYS.items()))
    store = tmp_path / "knn"
    with StubCloud() as stub:
        stub.how = said
        config = CONFIG.format(url=stub.url)
        with serving(tmp_path, "--api_key", "sesame", key="sesame", config=config) as server:
            never = {"X-LLMaaS-Cloud": "never"}
            before, answered_by = asked(server, "mail", **never)
            assert answered_by == "local"
            assert "heliotrope" not in before
            for app in KEYS:
                for text, answer in SAID.items():
                    assert asked(server, app, text) == (answer, "cloud")
            wait_until(lambda: (store / SELECTED).exists() and not waiting_files(store))
            assert server.status()["plugins"]["knn_lm"]["learned"] == len(SAID)
            stub.how = stub_cloud.status(503)
            after, answered_by = asked(server, "mail")
            assert answered_by == "local"
            assert "heliotrope" in after
            assert asked(server, "notes") == (before, "local")
