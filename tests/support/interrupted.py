"""A request of one app that another app's request interrupts at chosen turns."""

from __future__ import annotations

import contextlib
import itertools
import threading

import numpy as np
from llama_cpp import Llama
from switching import PROMPT

from llmaas_hooks import hookimpl
from llmaas_hooks.request_scope import serving_context
from llmaas_plugins import activate

N_PIECE = 24
OTHER = [1, *range(500, 560)]
APPS = map("app {}".format, itertools.count())
SAMPLED = {"temperature": 0.9, "seed": 7, "repeat_penalty": 1.2, "max_tokens": 12}


class Turns:
    """Divides prompts, and lets another request use the engine at some turns of the first one.

    Attributes:
        left: Prompt tokens that were left at each turn of the first request.
        logits: Rows from which the first request's tokens were sampled.
    """

    def __init__(self):
        self.llama = None
        self.at = frozenset()
        self.left, self.logits, self.replies, self.requests = [], [], [], []
        self.is_other = False

    def ask_other(self):
        with serving_context(None, "other"):
            options = {"max_tokens": 6, "temperature": 0.7, "seed": 4}
            reply = self.llama.create_completion(OTHER, **options)
        self.replies.append(reply["choices"][0]["text"])

    @hookimpl
    def llmaas_turn(self, request, n_left):
        if self.is_other:
            return N_PIECE
        self.left.append(n_left)
        if len(self.left) - 1 in self.at:
            self.is_other = True
            thread = threading.Thread(target=self.ask_other)
            thread.start()
            thread.join()
            self.is_other = False
        return N_PIECE

    @hookimpl
    def llmaas_request_end(self, request):
        self.requests.append(request.app)

    @hookimpl(trylast=True)
    def llmaas_logits(self, view):
        if not self.is_other:
            self.logits.append(view.logits.copy())

    def answer(self, at=(), prompt=PROMPT, context_id=None, **options):
        """Return the text of an answer in which others interrupt at turns ``at``.

        The app is a new one, so that nothing of the prompt is stored.
        """
        self.at, self.left, self.logits, self.requests = frozenset(at), [], [], []
        with serving_context(context_id, next(APPS)):
            reply = self.llama.create_completion(prompt, **(SAMPLED | options))
        return reply["choices"][0]["text"]


@contextlib.contextmanager
def opened(model, tmp_path, settings=None, turns=None, *, extra=None, on_error="raise", **plugins):
    """Open an engine with kv_chunks and other plugins; yield the interrupter."""
    turns = turns or Turns()
    turns.extra = extra
    table = {"store": str(tmp_path / "kv"), "codec": "lossless"} | (settings or {})
    config = {"on_error": on_error, "plugins": {"kv_chunks": table} | plugins}
    with (
        activate(config, {"turns": turns} | ({"extra": extra} if extra else {})),
        contextlib.closing(Llama(str(model), n_ctx=512, verbose=False, n_threads=1)) as llama,
    ):
        turns.llama = llama
        yield turns


def check_interruptions(turns, **options):
    """Check that interruptions at each turn, and at all, change no logits; return the turns."""
    expected = turns.answer(**options)
    rows, n_turns, left = turns.logits, len(turns.left), turns.left
    for at in (*([i] for i in range(n_turns)), range(n_turns)):
        found = turns.answer(at, **options)
        assert turns.left == left
        assert found == expected, at
        np.testing.assert_array_equal(turns.logits, rows, err_msg=str(at))
    assert len(turns.replies) == 2 * n_turns
    assert len(set(turns.replies)) == 1
    return left
