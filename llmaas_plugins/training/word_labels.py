"""Train an encoder to tell which words to keep, and judge it on texts that were held out."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from llmaas_hooks import ConfigError
from llmaas_plugins.short_prompts.encoder.body import Body
from llmaas_plugins.short_prompts.encoder.windows import windows_of
from llmaas_plugins.short_prompts.encoder.word_pieces import WordPieces
from llmaas_plugins.training.batches import Batches
from llmaas_plugins.training.bert import PADDING, Bert
from llmaas_plugins.training.trainer import Kept, Settings, train

__all__ = [
    "Examples",
    "Labeled",
    "Recipe",
    "auc",
    "examples_of",
    "judge",
    "learn",
    "run_identity",
    "step_seconds",
]

_NO_LABEL = -1
_HELD_OUT = 8
"""One of so many texts is held out."""
_SIMILAR = 16
"""Batches whose texts are sorted by length together, so that little is padding."""

Rows = NDArray[np.int32]
"""Windows, ``(n, 2 * n_pieces + 1)``: pieces, their labels, and a column that nothing reads."""


class Labeled(NamedTuple):
    """Text to learn from.

    Attributes:
        words: Words of the text, each with its blanks.
        is_kept: Whether each word is worth keeping.
    """

    words: Sequence[str]
    is_kept: Sequence[bool]


class Examples(NamedTuple):
    """Texts as windows of word pieces.

    Attributes:
        training: Windows to learn from.
        held_out: Texts to judge by.
    """

    training: Rows
    held_out: Sequence[Labeled]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to learn.

    Attributes:
        epochs: How often each text is read.
        n_rows: Windows of a step.
        rate: Highest learning rate of the layers, which are pretrained.
        linear_rate: Highest learning rate of the linear layer, which is not.
        n_trained: Number of last layers that are trained; 0 trains only the linear layer.
        seed: Seed of the order of windows and of first weights.
    """

    epochs: float = 1.0
    n_rows: int = 16
    rate: float = 5e-5
    linear_rate: float = 2e-2
    n_trained: int = 3
    seed: int = 0

    def n_steps(self, n_windows: int) -> int:
        """Return the number of steps."""
        return max(1, math.ceil(self.epochs * n_windows / self.n_rows))


def examples_of(texts: Sequence[Labeled], body: Body, seed: int = 0) -> Examples:
    """Divide texts into those to learn from and those to judge by, and the first into windows.

    Raises:
        ConfigError: There are fewer than two texts with words.
    """
    texts = [text for text in texts if len(text.words)]
    if len(texts) < 2:
        raise ConfigError(f"found {len(texts)} texts with words, expected 2 or more. Give more.")
    texts = [texts[i] for i in np.random.default_rng(seed).permutation(len(texts))]
    n_held_out = max(1, len(texts) // _HELD_OUT)
    pieces = WordPieces(body.vocabulary)
    rows = [row for text in texts[n_held_out:] for row in _rows(text, pieces, body.n_positions)]
    n = max(len(ids) for ids, _ in rows)
    found = np.full((len(rows), 2 * n + 1), PADDING, np.int32)
    found[:, n:] = _NO_LABEL
    for row, (ids, labels) in zip(found, rows, strict=True):
        row[: len(ids)], row[n : n + len(ids)] = ids, labels
    return Examples(found, texts[:n_held_out])


def learn(
    body: Body,
    rows: Rows,
    recipe: Recipe,
    *,
    kept: Kept | None = None,
    progress: Callable[[int, float], None] = lambda _n, _loss: None,
) -> Bert:
    """Train an encoder's last layers and its linear layer.

    Args:
        body: Pretrained encoder.
        rows: Windows to learn from.
        recipe: How to learn.
        kept: Where to keep the training. It goes on from a checkpoint that exists there.
        progress: Called after each step with its number of windows and its loss.

    Raises:
        ConfigError: The checkpoint is damaged, or of another run; or learning diverged.
        StoreError: The checkpoint cannot be read or written.
    """
    bert = Bert(body, recipe.n_trained, 2, recipe.seed)
    factor = recipe.linear_rate / recipe.rate
    train(
        _OnRows(bert),
        _loss,
        _SimilarBatches(rows, recipe.n_rows, recipe.seed),
        Settings(
            recipe.n_steps(len(rows)),
            recipe.rate,
            factors={"bert.weight": factor, "bert.bias": factor},
        ),
        kept=kept,
        progress=lambda n, loss: progress(n // rows.shape[1], loss),
    )
    return bert


def step_seconds(body: Body, rows: Rows, recipe: Recipe) -> float:
    """Return the seconds of a step with windows of usual lengths.

    Another step comes first: the first one of a process takes longer, as it loads modules.
    """
    module, batches = _OnRows(Bert(body, recipe.n_trained, 2)), _SimilarBatches(rows, 4, 0)
    times, n = list[float](), min(recipe.n_rows, len(rows))
    for step in range(3):
        some = batches.at(step)
        started = time.monotonic()
        outputs = module(torch.from_numpy(some[:, :-1]))
        outputs.backward(_loss(outputs, some)[1])
        times.append(time.monotonic() - started)
    return (times[1] + times[2]) / 2 / 4 * n


def judge(bert: Bert, body: Body, texts: Sequence[Labeled]) -> list[NDArray[np.float32]]:
    """Return the probability that each word is worth keeping, for each text.

    A word has the mean of its pieces.
    """
    from llmaas_plugins.short_prompts.scorers.encoder import word_scores

    pieces, found = WordPieces(body.vocabulary), []
    for text in texts:
        divided, values = pieces.of(text.words), list[NDArray[np.float32]]()
        for window in windows_of(len(divided.ids), body.n_positions - 2):
            ids = _marked(divided.ids[window.start : window.end], pieces)
            with torch.no_grad():
                chances = bert(torch.from_numpy(ids[None])).softmax(-1)[0, 1:-1, 1].numpy()
            values.append(chances[window.first - window.start : window.last - window.start])
        found.append(word_scores(np.concatenate([np.empty(0, np.float32), *values]), divided))
    return found


def auc(scores: Sequence[NDArray[np.float32]], texts: Sequence[Labeled]) -> float:
    """Return how often a word that is kept has a larger score than one of its text that is not.

    Texts count alike; those whose words are all kept, or none, are left out. NaN without others.
    """
    found = []
    for values, text in zip(scores, texts, strict=True):
        is_kept = np.array(text.is_kept, bool)
        yes, no = values[is_kept], np.sort(values[~is_kept])
        if len(yes) and len(no):
            below, most = (np.searchsorted(no, yes, side) for side in ("left", "right"))
            found.append(float((below + most).mean() / (2 * len(no))))
    return float(np.mean(found)) if found else math.nan


def run_identity(body: Body, rows: Rows, recipe: Recipe) -> str:
    """Return the SHA-256 of everything that a training depends on."""
    about = {
        "body": body.digest,
        "rows": hashlib.sha256(np.ascontiguousarray(rows, "<i4").tobytes()).hexdigest(),
        "recipe": asdict(recipe),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


# -- inside --------------------------------------------------------------------------------------


def _rows(
    text: Labeled, pieces: WordPieces, n_positions: int
) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Return the pieces and the labels of a text's windows."""
    divided = pieces.of(text.words)
    labels = np.repeat(np.array(text.is_kept, np.int32), np.diff(divided.starts))
    found = []
    for window in windows_of(len(divided.ids), n_positions - 2):
        own = np.full(window.end - window.start + 2, _NO_LABEL, np.int32)
        own[1:-1] = labels[window.start : window.end]
        found.append((_marked(divided.ids[window.start : window.end], pieces), own))
    return found


def _marked(ids: NDArray[np.int32], pieces: WordPieces) -> NDArray[np.int32]:
    return np.concatenate([[pieces.begin], ids, [pieces.end]]).astype(np.int32)


class _OnRows(nn.Module):
    """Encoder that reads the pieces of rows, without padding that all rows of a batch have."""

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, rows: Tensor) -> Tensor:
        pieces = rows[:, : rows.shape[1] // 2]
        n = int((pieces != PADDING).any(0).sum())
        found: Tensor = self.bert(pieces[:, :n].long())
        return found


def _loss(outputs: Tensor, windows: Rows) -> tuple[float, Tensor]:
    """Return the mean cross-entropy of all labels, and its gradient."""
    n_all, n = windows.shape[1] // 2, outputs.shape[1]
    labels = torch.from_numpy(windows[:, n_all : n_all + n].astype(np.int64))
    cut = outputs.detach().requires_grad_()
    with torch.enable_grad():
        loss = functional.cross_entropy(cut.flatten(0, 1), labels.flatten(), ignore_index=_NO_LABEL)
    (gradient,) = torch.autograd.grad(loss, cut)
    return float(loss.detach()), gradient


class _SimilarBatches(Batches):
    """Batches of windows of similar lengths, in random order."""

    def __init__(self, rows: Rows, n_rows: int, seed: int) -> None:
        super().__init__(rows, n_rows, seed)
        self._lengths = (rows[:, : rows.shape[1] // 2] != PADDING).sum(1)
        self._turn, self._order = -1, np.empty(0, np.intp)

    def _window(self, place: int) -> int:
        turn, at = divmod(place, len(self._windows))
        if turn != self._turn:
            self._turn, self._order = turn, self._new_order(turn)
        return int(self._order[at])

    def _new_order(self, turn: int) -> NDArray[np.intp]:
        chance = np.random.default_rng((self._seed, turn))
        order, n = chance.permutation(len(self._windows)), self._n_rows
        batches = []
        for start in range(0, len(order), _SIMILAR * n):
            some = order[start : start + _SIMILAR * n]
            some = some[np.argsort(self._lengths[some], kind="stable")]
            batches += [some[i : i + n] for i in range(0, len(some), n)]
        last = batches.pop() if len(batches[-1]) < n else np.empty(0, np.intp)
        return np.concatenate([*(batches[i] for i in chance.permutation(len(batches))), last])
