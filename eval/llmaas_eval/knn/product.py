"""The offline subset in the real plugin: quality of its search, and text generated with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmaas_eval.knn.duplicates import without_duplicates
from llmaas_eval.knn.generation import Writer, replies, variety, write_datastore, written
from llmaas_eval.knn.methods import METHODS
from llmaas_eval.knn.options import SHARE, Options
from llmaas_eval.knn.rows import as_json
from llmaas_eval.knn.scoring import Chosen, Row, first, history_of
from llmaas_eval.knn.shipped import DIMS, exactly, shipped
from llmaas_eval.knn.users import load, split
from llmaas_eval.stats import Surprise
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.mixing.grid_search import fit_mixture

__all__ = ["draw_generated", "draw_shipped"]

_N_PROMPTS = 40
_THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)


def draw_shipped(options: Options, path: Path) -> list[Mapping[str, Any]]:
    """Compare exact search, the datastore's search and skipped searches on the offline subset."""
    del path
    rows: list[Mapping[str, Any]] = []
    for keys in options.each():
        history, fitted_on = history_of(keys, options.scoring)
        chosen, part = _offline(history), first(keys.test, options.scoring.n_test)
        k = options.scoring.k
        mixture = fit_mixture(exactly(history, chosen, fitted_on, k).met).mixture
        exact = exactly(history, chosen, part, k)
        alone, n = Surprise.of(part.p, part.conv), len(history)
        rows.append(as_json(Row(keys.name, "pure", n, 0, None, alone)))
        row = Row(keys.name, "exact", n, len(chosen.rows), mixture, exact.surprise(mixture, part))
        rows.append(as_json(row))
        for n_dims in DIMS:
            name, found = f"{n_dims} dimensions", shipped(history, chosen, part, k, n_dims)
            same = row._replace(method=name, surprise=found.surprise(mixture, part))
            rows.append(as_json(same) | {"recall": found.recall(exact)})
        for threshold in _THRESHOLDS:
            name = f"unless MaxProb is {threshold:g}"
            same = row._replace(method=name, surprise=exact.surprise(mixture, part, threshold))
            rows.append(as_json(same) | {"saved": float((part.max >= threshold).mean())})
    return rows


def draw_generated(options: Options, path: Path) -> list[Mapping[str, Any]]:
    """Measure the variety of answers to test prompts, with the plugin and without."""
    del path
    rows: list[Mapping[str, Any]] = []
    for keys in options.each():
        history, fitted_on = history_of(keys, options.scoring)
        chosen = _offline(history)
        mixture = fit_mixture(exactly(history, chosen, fitted_on, options.scoring.k).met).mixture
        parts = without_duplicates(split(load(options.data, keys.name), keys.name))
        chats = parts.test[:_N_PROMPTS]
        with TemporaryDirectory() as folder:
            write_datastore(Path(folder), options.model, history, chosen, mixture)
            for name, store in (("alone", None), ("with the datastore", Path(folder))):
                with Writer(options.model, store) as writer:
                    known = [writer.tokens(chat.text) for chat in parts.train]
                    texts = {
                        f"{name}, {how}": written(writer, chats, temperature)
                        for how, temperature in (("greedy", 0.0), ("temperature 0.8", 0.8))
                    }
                    if store is None:
                        texts["cloud model"] = replies(writer, chats)
                for how, some in texts.items():
                    figures = variety(some, known)._asdict()
                    rows.append({"user": keys.name, "text": how, **figures})
    return rows


def _offline(history: Pairs) -> Chosen:
    return METHODS["offline"](history, round(SHARE * len(history)))
