"""Answers of the engine to questions: which choice a model finds likeliest after an answer's words.

A prompt is computed with all values, so the token after it does not depend on the sparse mode. That
is why an answer has words before the choice: these tokens are decoded one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from llmaas_eval.sparse.ours import opened
from llmaas_eval.tasks.questions import Asked

__all__ = ["WAYS", "Answers", "answers"]

WAYS = ("answers", "every token")
"""Tokens that are sparse: those of answers, as in a running app, or prompts, too, as in the paper.
"""


class Answers(NamedTuple):
    """Answers to questions.

    Attributes:
        right: Whether the likeliest choice is the right one, by question; 0 or 1.
        nats: -log p of the right choice among all choices, by question.
    """

    right: list[int]
    nats: list[float]


def answers(
    model: Path, table: Mapping[str, Any], questions: Sequence[Asked], way: str, name: str = ""
) -> Answers:
    """Answer questions.

    Args:
        model: GGUF file.
        table: Settings of ``flash_weights``.
        questions: The questions.
        way: One of ``WAYS``.
        name: Label of the progress bar.
    """
    n_ctx = 8 + max(len(one.prompt) + len(one.lead) for one in questions)
    found = Answers([], [])
    with opened(model, dict(table), n_ctx) as (llama, flash):
        bos = llama.token_bos()
        for one in tqdm(questions, desc=name, unit="question", disable=None):
            prompt = [bos, *one.prompt]
            batches = [prompt] if way == WAYS[0] else [[token] for token in prompt]
            llama.reset()
            with flash.answer(llama):  # batches of one token are sparse
                for batch in [*batches, *([token] for token in one.lead)]:
                    llama.eval(batch)
            logits = np.asarray(llama.scores[llama.n_tokens - 1], np.float64)[list(one.choices)]
            found.right.append(int(logits.argmax() == one.choice))
            found.nats.append(float(np.logaddexp.reduce(logits) - logits[one.choice]))
    return found
