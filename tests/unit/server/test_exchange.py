"""Heads of answers: what plugins noted about a request."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import pytest

from llmaas_plugins.server.exchange import Answer, header


def head_with(notes, content_type=b"application/json"):
    """Return the first message of an answer with these notes."""
    sent = []

    async def send(message):
        sent.append(message)

    async def answered():
        answer = Answer(send)
        answer.notes = notes
        headers = [(b"content-type", content_type)]
        await answer.send({"type": "http.response.start", "status": 200, "headers": headers})
        await answer.send({"type": "http.response.body", "body": b"x"})

    asyncio.run(answered())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]


def test_notes_are_a_header():
    notes = {"deadlines": {"ttft": None, "name": "ü\r\n"}}
    assert json.loads(header(head_with(notes), b"x-llmaas-notes")) == notes
    assert not header(head_with({}), b"x-llmaas-notes")
    assert not header(head_with(notes, b"text/event-stream"), b"x-llmaas-notes")


@pytest.mark.parametrize("value", [np.float32(1.0), math.nan, "x" * 5000, object()])
def test_notes_that_fit_no_header_are_left_out(value):
    assert not header(head_with({"plugin": value}), b"x-llmaas-notes")
