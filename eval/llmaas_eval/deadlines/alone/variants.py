"""The same questions to other files of the model, and with shorter prompts (Figs 4a and 19).

Settings are the widest that keep the apps' promises by measured times: nothing is chosen by
answers, so only these settings are asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmaas_eval.deadlines.alone.answering import PAIRS, WHOLE
from llmaas_eval.deadlines.alone.choosing import Judge
from llmaas_eval.deadlines.alone.promises import apart, feasible, times_of, widest
from llmaas_eval.deadlines.alone.study import Row, values_of
from llmaas_eval.deadlines.loaded.answers import Kept
from llmaas_eval.deadlines.loaded.scoring import Item, Pair
from llmaas_eval.deadlines.loaded.traces import SHARES
from llmaas_eval.elastic.engine import Variant
from llmaas_eval.prompts.engine import Engine, as_tokens, opened
from llmaas_eval.prompts.scorers import Material, scorers_of
from llmaas_eval.prompts.words import only_question, shortened, words_of
from llmaas_eval.weights import kept_f16_copy
from llmaas_plugins.elastic.latency import Latency
from llmaas_plugins.elastic.uniform import LEVELS
from llmaas_plugins.model.quantize import quantize

__all__ = ["PROMPT_SHARES", "SCORERS", "WEIGHTS", "in_weights", "settings", "share_rows", "shorter"]

WEIGHTS = ("Q8_0", "F16", "Q4_0")
"""Types of the weights; the packaged model's own is the first."""
SCORERS = ("random", "attention")
PROMPT_SHARES = (0.8, 0.6, 0.4, 0.2)
_N_CTX = 1024


def settings(
    sets: Mapping[str, Sequence[Item]], latency: Latency
) -> Mapping[str, Collection[Pair]]:
    """Return for each app the whole model, and the widest settings that keep its promise.

    One of them has the same level for prompt and answer. Where a promise cannot be kept, it is the
    next wider one that can.
    """
    found: dict[str, Collection[Pair]] = {}
    for app, items in sets.items():
        times, (least, further) = times_of(latency, [len(i.prompt) for i in items]), SHARES[app]
        for promise in apart(sorted(level for level in LEVELS if level >= least), [further]):
            possible = feasible(promise, times, PAIRS)
            one_level = [pair for pair in possible if pair[0] == pair[1]]
            if one_level:
                pairs = (WHOLE, widest(possible), widest(one_level))
                found[app] = {pair for pair in pairs if pair is not None}
                break
    return found


def in_weights(model: Path, kind: str, folder: Path) -> Path:
    """Return the model with weights of another type; make the file if it is missing."""
    if kind == WEIGHTS[0]:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    path = kept_f16_copy(model, folder)
    if kind == "F16":
        return path
    quantized = folder / f"{model.stem}-as-{kind.lower()}.gguf"
    return quantized if quantized.exists() else quantize(path, quantized, kind)


def shorter(
    prepared: Path,
    sets: Mapping[str, Sequence[Item]],
    questions: Mapping[str, Sequence[int]],
    scorer: str,
    share: float,
) -> dict[str, list[Item]]:
    """Return questions whose prompts keep at most a share of their tokens; the question is whole.

    Args:
        prepared: Prepared model, which judges the words.
        sets: Questions by set.
        questions: Number of the last tokens of each prompt that are the question, by set.
        scorer: Name of the scorer.
        share: Share of the tokens.
    """
    with opened(prepared, _N_CTX) as engine:
        return {
            name: [
                item._replace(prompt=_shorter(engine, item.prompt, n, scorer, share))
                for item, n in zip(items, questions[name], strict=True)
            ]
            for name, items in sets.items()
        }


def share_rows(
    name: str,
    whole: Variant,
    sets: Mapping[str, Sequence[Item]],
    shorter_sets: Mapping[tuple[str, float], Mapping[str, Sequence[Item]]],
    kept: Kept,
) -> Iterator[Row]:
    """Yield the whole model's answers to shorter prompts, by scorer and share of the tokens."""
    for of_set, items in sets.items():
        label = f"{name}-{of_set}-whole"
        expected = kept.all_scores(label, lambda: whole, items, [WHOLE])[WHOLE]
        judge = Judge(expected, [item.choice for item in items])
        about = {"row": "share", "model": name, "set": of_set}
        whole_prompt = {"by": "whole prompt", "share": 1.0, "kept": 1.0}
        yield {**about, **whole_prompt, **values_of(judge.of(expected, [WHOLE]))}
        for (scorer, share), some in shorter_sets.items():
            mine = some[of_set]
            short_label = f"{label}-{scorer}-{share:g}"
            found = kept.all_scores(short_label, lambda: whole, mine, [WHOLE])[WHOLE]
            lengths = zip(mine, items, strict=True)
            part = np.mean([len(one.prompt) / len(item.prompt) for one, item in lengths])
            row = {**about, "by": scorer, "share": share, "kept": float(part)}
            yield {**row, **values_of(judge.of(found, [WHOLE]))}


# -- inside --------------------------------------------------------------------------------------


def _shorter(
    engine: Engine, prompt: Sequence[int], n_question: int, scorer: str, share: float
) -> list[int]:
    begin, *rest = prompt  # the token that begins a text is no word
    words = only_question(words_of(engine, as_tokens(rest)), n_question)
    scores = scorers_of(engine, [scorer])[scorer](words, Material(engine, as_tokens([])))
    return [begin, *shortened(words, scores, share).tolist()]
