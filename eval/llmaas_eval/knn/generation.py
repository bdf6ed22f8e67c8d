"""Text generated with and without a datastore: its variety, and how much of it is copied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmaas_eval.knn.scoring import Chosen
from llmaas_eval.knn.users import Chat
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.archive.fingerprint import fingerprint
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.mixing.mixture import Mixture

__all__ = ["Variety", "Writer", "replies", "variety", "write_datastore", "written"]

N_TOKENS = 64
_N_CTX = 1024
_LOOP = 4
_COPIED = 8


class Variety(NamedTuple):
    """Variety of some texts, in percent.

    Attributes:
        distinct_1: Share of distinct tokens among all tokens.
        distinct_2: Share of distinct token pairs among all pairs.
        repeated: Share of 4-token runs that occurred earlier in the same text.
        copied: Share of 8-token runs that occur in the history.
    """

    distinct_1: float
    distinct_2: float
    repeated: float
    copied: float


def variety(texts: Sequence[Sequence[int]], history: Sequence[Sequence[int]]) -> Variety:
    """Measure the variety of texts.

    Distinct shares fall as texts are added, so compare equal numbers of texts.
    """
    known = {run for text in history for run in _runs(text, _COPIED)}
    loops = [list(_runs(text, _LOOP)) for text in texts]
    n_repeated = sum(len(runs) - len(set(runs)) for runs in loops)
    copied = [run in known for text in texts for run in _runs(text, _COPIED)]
    return Variety(
        _distinct(texts, 1),
        _distinct(texts, 2),
        100 * n_repeated / max(1, sum(map(len, loops))),
        100 * float(np.mean(copied)) if copied else 0.0,
    )


def _distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    runs = [run for text in texts for run in _runs(text, n)]
    return 100 * len(set(runs)) / max(1, len(runs))


def _runs(text: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    for start in range(len(text) - n + 1):
        yield tuple(text[start : start + n])


class Writer(contextlib.ExitStack):
    """A ``Llama`` as an app uses it, with the datastore in ``store`` or without plugins."""

    def __init__(self, model: Path, store: Path | None = None) -> None:
        """Activate the suite and load the model."""
        from llama_cpp import Llama

        from llmaas_plugins import activate

        super().__init__()
        plugins = {} if store is None else {"knn_lm": {"store": str(store)}}
        with contextlib.ExitStack() as undo:
            undo.push(self)
            self.enter_context(activate({"plugins": plugins, "on_error": "raise"}))
            self.llama: Any = Llama(
                str(model), n_ctx=_N_CTX, n_threads=1, n_threads_batch=1, seed=0, verbose=False
            )
            self.callback(self.llama.close)
            undo.pop_all()

    def write(self, prompt: str, temperature: float) -> list[int]:
        """Continue a prompt by at most ``N_TOKENS`` tokens."""
        tokens = self.tokens(prompt, is_begin=True)[: _N_CTX - N_TOKENS]
        self.llama.reset()
        self.llama.set_seed(0)
        found: list[int] = []
        stream = self.llama.generate(tokens, temp=temperature, top_p=1.0, min_p=0.0, top_k=0)
        with contextlib.closing(stream):
            for token in stream:
                if token == self.llama.token_eos() or len(found) == N_TOKENS:
                    break
                found.append(token)
        return found

    def tokens(self, text: str, *, is_begin: bool = False) -> list[int]:
        """Return the tokens of a text, with BOS if ``is_begin``."""
        return list(self.llama.tokenize(text.encode(), add_bos=is_begin))


def write_datastore(
    folder: Path, model: Path, history: Pairs, chosen: Chosen, mixture: Mixture
) -> None:
    """Write the chosen pairs as the datastore that the plugin opens."""
    with Writer(model) as writer:
        owner = fingerprint(writer.llama)
    rows = chosen.rows
    Datastore.write(
        folder / SELECTED,
        fingerprint=owner,
        keys=history.keys[rows],
        values=history.values[rows],
        weights=chosen.weights,
        origins=np.stack([np.zeros(len(rows)), rows], axis=1).astype(np.int32),
        conversations=["all"],
        basis=None,
        settings={"mixture": mixture.as_json(), "k": 100, "skip_above": 1.0, "key": "ffn_input"},
    )


def written(writer: Writer, chats: Sequence[Chat], temperature: float) -> list[list[int]]:
    """Generate the model's answer to the first message of each chat."""
    return [writer.write(f"User: {chat.turns[0][1]}\nAssistant:", temperature) for chat in chats]


def replies(writer: Writer, chats: Sequence[Chat]) -> list[list[int]]:
    """Return the first ``N_TOKENS`` tokens of the cloud model's answer in each chat."""
    return [writer.tokens(chat.turns[1][1])[:N_TOKENS] for chat in chats]
