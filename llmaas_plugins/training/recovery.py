"""Learn the adapter of a level: closed form, training, and a judgment on text that was held out.

ElastiLM trains an adapter for each level on next tokens (§3.2). Here the whole model's predictions
are the target by default: they say more than one token a position, and need no text by others.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from llmaas_hooks import ConfigError
from llmaas_hooks.native.low_rank import LowRank
from llmaas_plugins.elastic.adapter_index import content_end
from llmaas_plugins.elastic.adapters import Adapter
from llmaas_plugins.elastic.units import Blocks, Widths, all_units
from llmaas_plugins.model.gguf_header import read_header
from llmaas_plugins.training import closed_form
from llmaas_plugins.training.batches import Batches, Lengths
from llmaas_plugins.training.objectives import (
    Objective,
    Quality,
    batched,
    closure,
    improves,
    mean_quality,
    qualities,
)
from llmaas_plugins.training.student import ADAPTED, Level, dimensions_of
from llmaas_plugins.training.trainer import Kept, Settings, train
from llmaas_plugins.training.workers import Workers

__all__ = [
    "Outcome",
    "Recipe",
    "Texts",
    "judge",
    "padded",
    "recover",
    "run_identity",
    "split",
    "text_tokens",
]

_HELD_OUT, _LEAST_HELD_OUT, _MOST_HELD_OUT = 8, 8, 64
"""One of so many windows is held out, and the fewest and the most to hold out."""
_CHUNK_BYTES = 16 << 20

Windows = NDArray[np.int32]


class Texts(NamedTuple):
    """Windows of tokens, ``(n_windows, n_tokens)``.

    Attributes:
        training: Windows to learn from.
        held_out: Windows to judge by.
    """

    training: Windows
    held_out: Windows


@dataclass(frozen=True, slots=True)
class Recipe(Lengths):
    """How to learn an adapter.

    Attributes:
        n_tokens: Tokens to train on.
        rank: Rank of the adapters.
        loss: Name of a loss in ``LOSSES``.
        n_rows: Windows of a step.
        rate: Highest learning rate.
        is_fitted: Whether to start from the closed form.
        seed: Seed of the order of windows and of first weights.
    """

    n_tokens: int
    rank: int = 8
    loss: str = "kl"
    n_rows: int = 2
    rate: float = 1e-2
    is_fitted: bool = True
    seed: int = 0


class Outcome(NamedTuple):
    """Result of a level.

    Attributes:
        before: Mean quality without the adapter, on the windows held out.
        after: Mean quality with the adapter, as it is stored.
        is_better: Whether the adapter improves the level, and its older adapter, beyond chance.
        adapters: Adapters by weight name, padded with zeros to the whole weights.
        older: Mean quality with the level's older adapter, if it has one.
    """

    before: Quality
    after: Quality
    is_better: bool
    adapters: Mapping[str, Adapter]
    older: Quality | None = None

    @property
    def closure(self) -> float | None:
        """Share of the gap to the whole model that the adapter wins back; None without a gap."""
        return closure(self.before, self.after)


def text_tokens(n_tokens: int, n_window: int) -> int:
    """Return the tokens of a text to learn ``n_tokens`` from, with those to hold out."""
    n = math.ceil(n_tokens * _HELD_OUT / (_HELD_OUT - 1))
    return max(n, n_tokens + _LEAST_HELD_OUT * n_window)


def split(windows: Windows) -> Texts:
    """Hold out the last part of a text.

    Raises:
        ConfigError: There are fewer than two windows.
    """
    if len(windows) < 2:
        raise ConfigError(
            f"the text fills {len(windows)} windows of {windows.shape[1]} tokens, expected 2 or "
            "more. Give a longer text with `--text FILE`."
        )
    n = min(_MOST_HELD_OUT, max(_LEAST_HELD_OUT, len(windows) // _HELD_OUT), len(windows) // 2)
    return Texts(windows[:-n], windows[-n:])


def recover(  # noqa: PLR0913 -- of what, from what, how, with whom, kept where
    level: Level,
    texts: Texts,
    recipe: Recipe,
    *,
    older: Level | None = None,
    workers: Workers | None = None,
    kept: Kept | None = None,
    progress: Callable[[int], None] = lambda _n: None,
) -> Outcome:
    """Learn a level's adapter and judge it.

    Args:
        level: The level, with an adapter that changes nothing.
        texts: Text to learn from and to judge by.
        recipe: How to learn.
        older: The level with its older adapter, which a new one must improve, too.
        workers: Processes that train together; each calls this function.
        kept: Where to keep the training. It goes on from a checkpoint that exists there.
        progress: Called with the number of tokens just trained on.

    Raises:
        ConfigError: The checkpoint is damaged, or of another run.
        StoreError: The checkpoint cannot be read or written.
    """
    workers = workers or Workers()
    before = judge(level, texts.held_out)
    if recipe.is_fitted and workers.is_first and not (kept and kept.path.exists()):
        closed_form.fit(level, texts.training)
    train(
        level,
        Objective(level.teacher, recipe.loss),
        Batches(texts.training, recipe.n_rows, recipe.seed, workers),
        Settings(recipe.n_steps(texts.training.shape[1]), recipe.rate),
        workers=workers,
        kept=kept,
        progress=lambda n, _loss: progress(n),
    )
    adapters = _stored(level)
    after = judge(level, texts.held_out)
    rival = None if older is None else judge(older, texts.held_out)
    return _outcome(before, after, recipe, adapters, rival)


def judge(level: Level, windows: Windows) -> list[Quality]:
    """Return the quality of each window."""
    found = []
    with torch.no_grad():
        for some in batched(windows):
            outputs = level(torch.from_numpy(some[:, :-1].astype(np.int32)))
            found += qualities(level.teacher, outputs, some)
    return found


def run_identity(
    path: Path,
    widths: Widths,
    texts: Texts,
    recipe: Recipe,
    biases: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
) -> str:
    """Return the SHA-256 of everything that a level's training depends on.

    Args:
        path: Path of the prepared file. Its adapters do not count.
        widths: Widths of the level.
        texts: Text to learn from.
        recipe: How to learn.
        biases: Biases of the level, by weight name.
    """
    about = {
        "model": _weights_digest(path),
        "groups": widths.groups.tolist(),
        "neurons": widths.neurons.tolist(),
        "text": hashlib.sha256(np.ascontiguousarray(texts.training, "<i4").tobytes()).hexdigest(),
        "recipe": asdict(recipe),
        "biases": {
            name: hashlib.sha256(np.ascontiguousarray(bias, "<f4").tobytes()).hexdigest()
            for name, bias in biases.items()
        },
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def padded(stored: LowRank, blocks: Blocks, weight: str) -> Adapter:
    """Return a stored adapter with zeros where its level does not use the weight."""
    _, layer, name, _ = weight.split(".")
    n_in, n_out = dimensions_of(blocks, all_units(blocks), int(layer), name)
    a, b = stored.floats()
    return Adapter(
        np.pad(a, ((0, 0), (0, n_in - a.shape[1]))), np.pad(b, ((0, n_out - len(b)), (0, 0)))
    )


# -- inside --------------------------------------------------------------------------------------


def _stored(level: Level) -> dict[str, Adapter]:
    """Round a level's adapters to the 8 bits in which they are stored, and return them padded."""
    found, rounded, mine = {}, {}, level.arrays()
    for layer, name in product(range(level.teacher.blocks.n_layers), ADAPTED):
        key = f"{layer}:{name}"
        stored = LowRank.of(mine[f"{key}:a"], mine[f"{key}:b"])
        rounded[f"{key}:a"], rounded[f"{key}:b"] = stored.floats()
        weight = f"blk.{layer}.{name}.weight"
        found[weight] = padded(stored, level.teacher.blocks, weight)
    level.load(rounded)
    return found


def _outcome(
    before: Sequence[Quality],
    after: Sequence[Quality],
    recipe: Recipe,
    adapters: Mapping[str, Adapter],
    older: Sequence[Quality] | None = None,
) -> Outcome:
    column = "kl" if recipe.loss == "kl" else "loss"
    is_better = _improves(before, after, column)
    if older is None:
        return Outcome(mean_quality(before), mean_quality(after), is_better, adapters)
    is_better = is_better and _improves(older, after, column)
    return Outcome(
        mean_quality(before), mean_quality(after), is_better, adapters, mean_quality(older)
    )


def _improves(before: Sequence[Quality], after: Sequence[Quality], column: str) -> bool:
    """Return whether a value of the windows is lower beyond chance."""
    gains = np.array([getattr(b, column) for b in before]) - [getattr(a, column) for a in after]
    return improves(gains)


def _weights_digest(path: Path) -> str:
    """Return the SHA-256 of a prepared file's tensors."""
    header, digest = read_header(path), hashlib.sha256()
    content = np.memmap(path, np.uint8, "r")
    for at in range(header.data_at, content_end(header), _CHUNK_BYTES):
        digest.update(content[at : min(at + _CHUNK_BYTES, content_end(header))].data)
    return digest.hexdigest()
