"""Choices of a model among the texts of a question's choices, with a level for prompt and answer.

A choice counts by the mean log probability of its tokens, as in ElastiLM's evaluation. The first
token is predicted by the prompt, at its level; all others at the answer's level.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from llmaas_eval.batches import loaded
from llmaas_eval.elastic.engine import FULL, Claimer, Variant
from llmaas_eval.evaluated import Part, log_probabilities
from llmaas_hooks.native import NativeContext
from llmaas_plugins import activate

__all__ = ["Item", "Pair", "Scores", "Wanted", "scores", "unanswered"]

_N_CTX = 8192
_PROMPT, _FIRST_CHOICE = 0, 1
"""Sequences: the prompt, each choice, and after these the common beginning at each level."""


Pair = tuple[int, int]
"""Indices of the levels of prompt and answer."""
Wanted = Mapping[Pair, Collection[int]]
"""Indices of the questions to answer, by pair of levels."""


class Item(NamedTuple):
    """Tokens of a question.

    Attributes:
        prompt: Tokens of the prompt, with the token that begins it.
        lead: Tokens of the answer before the choice, which are given.
        choices: Tokens of each choice.
        choice: Index of the right one.
    """

    prompt: Sequence[int]
    lead: Sequence[int]
    choices: Sequence[Sequence[int]]
    choice: int


class Scores(NamedTuple):
    """Answers to questions at one pair of levels; shape ``(n_questions,)`` each.

    Attributes:
        choice: Index of the likeliest choice; -1 for a question that was not asked.
        nats: Mean -log p of the right choice's tokens.
    """

    choice: NDArray[np.int32]
    nats: NDArray[np.float32]


def unanswered(n: int) -> Scores:
    """Return the scores of ``n`` questions that were not asked."""
    return Scores(np.full(n, -1, np.int32), np.full(n, np.nan, np.float32))


def scores(
    variant: Variant, items: Sequence[Item], wanted: Wanted, name: str = ""
) -> dict[Pair, Scores]:
    """Answer questions with pairs of levels.

    Args:
        variant: Model and widths by level; without widths, the whole model is the only level.
        items: Questions.
        wanted: Questions to answer with each pair.
        name: Label of the progress bar.
    """
    found = {pair: unanswered(len(items)) for pair in wanted}
    by_prompt = {prefill: [d for p, d in found if p == prefill] for prefill, _ in found}
    asked = sorted({i for rows in wanted.values() for i in rows})
    n_choices = max(len(items[i].choices) for i in asked)
    begin, first = _common([items[i].prompt for i in asked]), _FIRST_CHOICE + n_choices
    with _opened(variant, first + 1 + max(by_prompt)) as engine:
        for prefill in by_prompt:
            engine.decode([(begin, 0, first + prefill)], prefill)
        for i in tqdm(asked, desc=name, unit="question", disable=None):
            item = items[i]
            for prefill, every in by_prompt.items():
                levels = [decode for decode in every if i in wanted[prefill, decode]]
                if not levels:
                    continue
                engine.begin(first + prefill, len(begin))
                rest = [*item.prompt[len(begin) :]]
                (after,) = engine.decode([(rest, len(begin), _PROMPT)], prefill)
                for decode in levels:
                    logs = engine.choices(item, after[-1], decode)
                    found[prefill, decode].choice[i] = int(np.argmax(logs))
                    found[prefill, decode].nats[i] = -logs[item.choice]
    return found


# -- inside --------------------------------------------------------------------------------------


class _Engine:
    """A context whose sequences share cells, at a level that can be chosen for each batch."""

    def __init__(self, ctx: int, native: NativeContext, *, has_levels: bool) -> None:
        self._ctx, self._native, self._has_levels = ctx, native, has_levels
        self._memory = llama_cpp.llama_get_memory(ctx)
        vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)

    def begin(self, source: int, n_tokens: int) -> None:
        """Let the prompt's sequence begin with the cells of another one."""
        llama_cpp.llama_memory_seq_rm(self._memory, _PROMPT, -1, -1)
        llama_cpp.llama_memory_seq_cp(self._memory, source, _PROMPT, 0, n_tokens)

    def choices(self, item: Item, after: NDArray[np.float32], level: int) -> NDArray[np.float64]:
        """Return the mean log probability of each choice's tokens, after the prompt's sequence."""
        texts = [[*item.lead, *choice] for choice in item.choices]
        start, n_lead = len(item.prompt), len(item.lead)
        heads = [*dict.fromkeys(tuple(text[:-1]) for text in texts if len(text) > 1)]
        parts = [(head, start, _FIRST_CHOICE + i) for i, head in enumerate(heads)]
        for _, _, sequence in parts:
            llama_cpp.llama_memory_seq_cp(self._memory, _PROMPT, sequence, 0, start)
        rows = dict(zip(heads, self.decode(parts, level), strict=True))
        for _, _, sequence in parts:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        found = []
        for text in texts:
            head = tuple(text[:-1])
            logs = [after[None], *([rows[head]] if head else [])]
            predicted = np.concatenate(logs)[np.arange(len(text)), text]
            found.append(float(predicted[n_lead:].mean()))
        return np.array(found)

    def decode(self, parts: Sequence[Part], level: int) -> list[NDArray[np.float32]]:
        """Evaluate tokens; return log probabilities after each, an array for each part.

        Args:
            parts: Tokens, position of the first one, and sequence.
            level: Index of the level.

        Raises:
            RuntimeError: ``llama_decode`` failed.
        """
        if not any(len(tokens) for tokens, _, _ in parts):
            return []
        self._native.level = level if self._has_levels else FULL
        logs = log_probabilities(self._ctx, self._n_vocab, parts)
        ends = np.cumsum([len(tokens) for tokens, _, _ in parts])[:-1]
        return np.split(logs, ends)


def _common(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all prompts begin with, short of a whole prompt."""
    shortest = min(map(len, prompts)) - 1
    rows = np.array([prompt[:shortest] for prompt in prompts])
    is_same = (rows == rows[0]).all(axis=0)
    n = shortest if is_same.all() else int(is_same.argmin())
    return [*prompts[0][:n]]


@contextlib.contextmanager
def _opened(variant: Variant, n_sequences: int) -> Iterator[_Engine]:
    claimer = Claimer()
    claimer.claims = variant.claims()
    with (
        activate({"plugins": {}, "on_error": "raise"}, {"eval": claimer}),
        loaded(Path(variant.path)) as model,
    ):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = _N_CTX
        params.n_seq_max, params.kv_unified = n_sequences, True
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 1
        ctx = llama_cpp.llama_init_from_model(model, params)
        if ctx is None:
            raise RuntimeError(f"llama.cpp made no context of {_N_CTX} tokens for {variant.path}")
        try:
            yield _Engine(ctx, claimer.contexts[-1], has_levels=bool(variant.levels))
        finally:
            llama_cpp.llama_free(ctx)
