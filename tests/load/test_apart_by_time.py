"""Whether response times tell an app another app's prompts; a control shows that they could."""

from __future__ import annotations

import http.client
import json
import random
import time

import numpy as np
import pytest
from served import serving
from soak import scale

pytest.importorskip("fastapi")

N_PAIRS = scale(5, 200)
N_CONTROL = scale(5, 40)
WORDS = "rain coffee train shadow garden window letter music paper river summer bread"
KEYS = {
    "mail": "mail-2f6c51e5b0d34a1c",
    "game": "game-90b7c1d2e3f44556",
    None: "admin-0123456789ab",
}
LARGEST_Z = 4.0
"""Two samples of one distribution differ by more once in 16,000 tests."""


@pytest.fixture(params=["apart", "sharing"])
def asking(request, tmp_path):
    """Start a server; return a function that asks as an app for seconds and reused tokens."""
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'{app} = "{key}"\n' for app, key in KEYS.items() if app))
    keys.chmod(0o600)
    kv = "parked_tokens = 1024\nrecompute = false\n"
    kv += f"share_across_apps = {str(request.param == 'sharing').lower()}"
    options = ("--api_key", KEYS[None])
    service = f'key_file = "{keys}"'
    with serving(
        tmp_path, *options, key=KEYS[None], service=service, kv=kv, codec="tolerance", n_ubatch=128
    ) as server:

        def reused():
            return server.metrics(KEYS[None])["llmaas_reused_tokens_total"]

        def ask(app, text):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[app]}"}
            before = reused()
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            started = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            seconds = time.perf_counter() - started
            connection.close()
            return seconds, reused() - before

        yield request.param, ask


def differ_by(first, second):
    """Return the standard deviations by which two samples' ranks differ (Mann-Whitney test)."""
    n, m = len(first), len(second)
    ranks = np.argsort(np.argsort(np.concatenate([first, second]))) + 1
    u = ranks[:n].sum() - n * (n + 1) / 2
    return (u - n * m / 2) / np.sqrt(n * m * (n + m + 1) / 12)


@pytest.mark.soak
def test_an_app_cannot_tell_by_the_time_what_another_asked(asking):
    kind, ask = asking
    rng = random.Random(11)

    def text():
        return " ".join(rng.choices(WORDS.split(), k=120))

    for app in ("mail", "game"):
        ask(app, text())
    seconds, found = {True: [], False: []}, {True: [], False: []}
    for _ in range(N_PAIRS if kind == "apart" else N_CONTROL):
        for is_guessed in rng.sample([True, False], 2):
            secret = text()
            ask("mail", secret)
            took, n_found = ask("game", secret if is_guessed else text())
            seconds[is_guessed].append(took)
            found[is_guessed].append(n_found)
    z = differ_by(seconds[True], seconds[False])
    if kind == "sharing":
        assert min(found[True]) > 100 > max(found[False])  # so the test would detect it
        assert z < -LARGEST_Z or N_CONTROL < 40
        return
    # the app's own tokens, from prompts that begin with the same words
    assert max(found[True]) < 40
    assert abs(z) < LARGEST_Z
