"""``knn_lm``: chats that the datastore has not seen, with and without it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmaas_hooks import ConfigError, Tokens
from llmaas_plugins.chats.exports import load_conversations
from llmaas_plugins.cli.files import TUNE_PREFIX, check_room
from llmaas_plugins.cli.setup.processes import completed
from llmaas_plugins.cli.tune.bench import LEAST_ROUNDS, Bench, Engine, Lengths, in_turn
from llmaas_plugins.cli.tune.figures import Figures, case_of, figures_of
from llmaas_plugins.cli.tune.worker import Led
from llmaas_plugins.config import Config, validated
from llmaas_plugins.files.temporary_folder import locked_folder
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.archive.record import conversation_id
from llmaas_plugins.knn_lm.config import KnnLMConfig

__all__ = ["datastore_path", "measure_datastore"]

_NAME = "knn_lm"
_MOST_CHATS, _SHARE = 12, 5
"""Most chats to hold out, and one of how many."""
_MOST_PIECES = 24
_LEAST_TOKENS = 48


class _Chat(NamedTuple):
    """Chat to judge with.

    Attributes:
        tokens: Its tokens.
        app: Only app that may use it; None if all may.
        id: Its id, if the datastore has seen it.
    """

    tokens: Tokens
    app: str | None
    id: bytes | None


def measure_datastore(bench: Bench, exports: Sequence[Path]) -> Figures:
    """Compare predictions with and without what the datastore knows of other chats.

    Chats that the datastore has seen are taken out of a copy of it.

    Args:
        bench: Models, texts and time.
        exports: Chats to judge with; by default, some of the datastore's own.
    """
    directory = datastore_path(bench.config).parent
    with bench.vanilla() as vanilla:
        chats = _given(directory, vanilla, exports) if exports else _held_out(directory)
        if len(chats) < LEAST_ROUNDS:
            raise ConfigError(
                f"found {len(chats)} chats of {_LEAST_TOKENS} tokens or more to judge with, "
                f"expected {LEAST_ROUNDS}. Give chats that the datastore has not seen with --chats."
            )
        seen = [chat.id for chat in chats if chat.id is not None]
        with (
            _without(bench, directory, seen) as store,
            bench.with_plugins(_NAME, store=str(store)) as engine,
        ):
            lengths = bench.lengths(vanilla, 3)
            pairs = []
            for i, (number, led) in enumerate(_pieces(chats, lengths)):
                if i >= len(chats) and bench.left_s <= 0:
                    break
                pairs.append(in_turn(i, (vanilla, led), (engine, led))._replace(group=number))
            return figures_of(
                _NAME, [case_of("unseen chats", pairs)], engine.state(), vanilla.state()
            )


def datastore_path(config: Config) -> Path:
    """Return the path of the selected pairs."""
    settings = validated(_NAME, KnnLMConfig, config.plugins[_NAME])
    assert isinstance(settings, KnnLMConfig)
    return settings.store.expanduser() / SELECTED


# -- inside --------------------------------------------------------------------------------------


def _held_out(directory: Path) -> list[_Chat]:
    """Return some of the datastore's own chats, drawn at random."""
    with Archive.open(directory) as archive:
        ids = [id_ for id_ in archive.ids() if len(archive.tokens(id_)) >= _LEAST_TOKENS]
        n = min(_MOST_CHATS, max(LEAST_ROUNDS, len(ids) // _SHARE))
        drawn = np.random.default_rng(0).permutation(len(ids))[:n]
        chosen = [ids[i] for i in drawn]
        if len(chosen) >= len(archive):  # nothing would be left to know
            chosen = []
        return [_Chat(archive.tokens(id_), archive.owner(id_), id_) for id_ in chosen]


def _given(directory: Path, engine: Engine, exports: Sequence[Path]) -> list[_Chat]:
    """Return chats of exports, drawn at random."""
    found = [chat for path in exports for chat in load_conversations(path)]
    chats = []
    with Archive.open(directory) as archive:
        for i in np.random.default_rng(0).permutation(len(found)):
            chat, id_ = found[i], conversation_id(found[i])
            tokens = engine.chat([{"role": m.role, "content": m.content} for m in chat.messages])
            if tokens is not None and len(tokens) >= _LEAST_TOKENS:
                app = None if chat.is_shared else chat.app
                known = id_ if id_ in archive else None
                chats.append(_Chat(np.array(tokens, np.int32), app, known))
            if len(chats) == _MOST_CHATS:
                break
    return chats


@contextmanager
def _without(bench: Bench, directory: Path, ids: Sequence[bytes]) -> Iterator[Path]:
    """Yield the datastore, or a copy of it that has not seen some chats."""
    if not ids:
        yield directory
        return
    n_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    check_room("tune", n_bytes, directory.parent)
    with locked_folder(directory.parent, TUNE_PREFIX) as folder:
        copy = folder / "knn"
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("inbox"))
        for action in (["forget", *(id_.hex() for id_ in ids)], ["select"]):
            bench.check_time()
            done = completed(
                ["datastore", *action, "--store", str(copy), "--config", str(bench.config.file)],
                shows_errors=False,
            )
            if done.returncode:
                raise ConfigError(f"a copy of the datastore cannot be made: {done.stderr.strip()}")
        yield copy


def _pieces(chats: Sequence[_Chat], lengths: Lengths) -> Iterator[tuple[int, Led]]:
    """Yield parts of each chat in turn, the first ones of all before the second ones."""
    n_answer, n = lengths.n_answer, 0
    for turn in range(_MOST_PIECES):
        for number, chat in enumerate(chats, 1):
            tokens = chat.tokens.tolist()
            at = min(_LEAST_TOKENS // 2, lengths.n_prompt) + turn * n_answer
            if at < len(tokens) and n < _MOST_PIECES:
                prompt, answer = tokens[max(0, at - lengths.n_prompt) : at], tokens[at:]
                yield number, Led(prompt, answer[:n_answer], app=chat.app)
                n += 1
