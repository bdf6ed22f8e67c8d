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
    others = {"deadlines": {"missed": ["ttft"]}, "a": "x" * 1000}
    found = header(head_with({"plugin": value, **others, "b": "x" * 3500}), b"x-llmaas-notes")
    assert json.loads(found) == others


@pytest.mark.parametrize("notes", [{}, {"deadlines": {"name": "ü\n\ndata: x\r\n"}}])
def test_notes_about_a_stream_are_a_comment_before_its_last_event(notes):
    sent = []
    pieces = [b'data: {"text": "data: [DONE]"}\r\n\r\n', b"data: [DONE]\r\n\r\n", b""]

    async def send(message):
        sent.append(message)

    async def answered():
        answer = Answer(send)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await answer.send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces:
            if piece == pieces[1]:
                answer.notes = notes  # they are known when the request has ended
            more = {"more_body": bool(piece)}
            await answer.send({"type": "http.response.body", "body": piece, **more})
        await answer.flush()

    asyncio.run(answered())
    bodies = [message["body"] for message in sent[1:]]
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]
    if notes:
        name, text = bodies.pop(1).split(b": ", 2)[1:]
        assert name == b"x-llmaas-notes"
        assert text.endswith(b"\r\n\r\n")
        assert text.count(b"\n") == 2
        assert json.loads(text) == notes
    assert bodies == pieces
