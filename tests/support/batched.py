"""Calls to ``llmaas serve`` that are decoded together, and the same calls alone."""

from __future__ import annotations

import json
import threading

from served import completion, completion_text

PROMPTS = ("Once upon a time", "The dog", "My sister and I", "In a small house", "A king")
GREEDY = {"temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": 24}


def streamed(server, body):
    with completion(server, body | {"stream": True}) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def at_once(*asks):
    """Return the results of functions that are called on threads at the same time."""
    found = {}

    def keep(i, ask):
        found[i] = ask()

    threads = [threading.Thread(target=keep, args=pair) for pair in enumerate(asks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[i] for i in range(len(asks))]


def one_by_one(server, asks):
    """Return the results of calls, before each of which another one takes their cells."""
    found = []
    for ask in asks:
        take_cells(server)
        found.append(ask())
    return found


def take_cells(server):
    """Make a call that leaves nothing of earlier ones in the engine's cells."""
    completion_text(server, GREEDY | {"prompt": "Some other text", "max_tokens": 1})


def batches(server):
    """Return the number of batches of several calls so far, and of their tokens."""
    found = server.status()["together"]
    return found["batches"], found["tokens"]
