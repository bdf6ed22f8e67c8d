"""Words drawn for an app do not depend on other apps' seeds, and repeat only where asked to."""

from __future__ import annotations

import functools

import pytest
from limited import MAIL, NOTES, ask
from served import serving

pytest.importorskip("fastapi")

DRAWN = {"max_tokens": 12, "temperature": 1.5}
COMPLETIONS, CONTEXTS = "/v1/completions", "/v1/llmaas/apps/notes/contexts"


def completed(request_, key=NOTES, **more):
    status, _, found = request_("POST", COMPLETIONS, {"prompt": "The", **DRAWN, **more}, key)
    assert status == 200
    return found["choices"][0]["text"]


def replied(request_):
    path = f"{CONTEXTS}/{request_('POST', CONTEXTS, {}, NOTES)[2]['id']}"
    status, _, found = request_("POST", f"{path}/call", {"prompt": "Hi", **DRAWN}, NOTES)
    assert (status, request_("DELETE", path, None, NOTES)[0]) == (200, 200)
    return found["text"]


@pytest.mark.parametrize("asked", [completed, replied])
def test_another_apps_seed_decides_nothing(request_, asked):
    found = set()
    for _ in range(4):
        completed(request_, MAIL, seed=7)
        found.add(asked(request_))
    assert len(found) > 1


def test_a_seed_repeats_the_words(request_):
    assert len({completed(request_, seed=7) for _ in range(3)}) == 1
    assert completed(request_, seed=7) != completed(request_, seed=8)


def test_the_operators_seed_is_that_of_every_request(tmp_path):
    with serving(tmp_path, "--seed", "5", n_ctx=256) as server:
        request_ = functools.partial(ask, server)
        found = {completed(request_)}
        completed(request_, seed=7)
        found |= {completed(request_), completed(request_, seed=5)}
        assert len(found) == 1
