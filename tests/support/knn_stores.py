"""Datastores of the packaged model, and questions that are answered with them."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from datastores import CONVERSATIONS, ENGINE, QUESTIONS, K
from llama_cpp import Llama

from llmaas_plugins import activate
from llmaas_plugins.knn_lm.archive.files import SELECTED

QUESTION = QUESTIONS[0]
FIRST = CONVERSATIONS[0].title


class Store:
    """A store directory, and a writer of its files."""

    def __init__(self, directory, pairs):
        self.directory, self.pairs = directory, pairs
        self.file = directory / SELECTED

    def write(self, pairs=None, **settings):
        """Write the datastore, optionally with other pairs or settings."""
        (self.pairs if pairs is None else pairs).write(self.directory, **settings)

    def links(self):
        """Return the store's files that this process has open."""
        found = []
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(link.readlink()))
        return [path for path in found if path.startswith(str(self.directory))]

    def activate(self, on_error="raise", **table):
        own = {"store": str(self.directory), "k": K, "look_back": 0} | table
        return activate({"on_error": on_error, "plugins": {"knn_lm": own}})


def ask(llama, question=QUESTION, n=8):
    """Return the next tokens, from an engine that starts anew."""
    llama.reset()
    stream = begin(llama, question)
    found = list(itertools.islice(stream, n))
    stream.close()
    return found


def begin(llama, question=QUESTION):
    prompt = llama.tokenize(f"User: {question}\nAssistant:".encode(), special=True)
    return llama.generate(prompt, temp=0.0)


def report(suite):
    return suite.status()["plugins"]["knn_lm"]


def replies(model):
    with contextlib.closing(Llama(str(model), **ENGINE)) as llama:
        return {question: ask(llama, question) for question in QUESTIONS}


def anywhere(alpha=0.7, beta=0.25, theta=1e4, far=None):
    """Return a mixture in which neighbors count at any distance."""
    return {"alpha": alpha, "beta": beta, "theta": theta, "far": far}
