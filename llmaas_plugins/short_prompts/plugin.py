"""Hooks of the plugin: offer shorter prompts, and choose what a request reads."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from llmaas_hooks import (
    NativeContext,
    Request,
    RequestCost,
    ShorterPrompt,
    Tokens,
    forks,
    hookimpl,
)
from llmaas_plugins.short_prompts.budget import Room, Shortened, budget, shorten
from llmaas_plugins.short_prompts.choice import ScorerChoice
from llmaas_plugins.short_prompts.config import ShortPromptsConfig
from llmaas_plugins.short_prompts.patterns import Pattern
from llmaas_plugins.short_prompts.protection import PROTECTION, Protection, prompt_of
from llmaas_plugins.short_prompts.report import Counts, report_of, text_left_out
from llmaas_plugins.short_prompts.scorer import Prompt, Scorer
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of

__all__ = ["ShortPrompts"]

_NAME = "short_prompts"
_MOST_APPS, _MOST_SHOWN = 64, 80


class ShortPrompts:
    """Plugin that leaves out the words of a prompt that its answer needs least."""

    Config: ClassVar[type[ShortPromptsConfig]] = ShortPromptsConfig

    def __init__(self, config: ShortPromptsConfig) -> None:
        """Take the settings; scorers are made when requests need them."""
        self._config = config
        self._protection = Protection(PROTECTION.kinds, tuple(map(Pattern, config.protect)))
        self._lock = forks.lock()
        self._natives: dict[int, NativeContext] = {}
        self._scorers = ScorerChoice(config.scorer, self._natives)
        self._prompts: weakref.WeakKeyDictionary[Request, Prompt] = weakref.WeakKeyDictionary()
        self._failing: weakref.WeakSet[Any] = weakref.WeakSet()  # engines without scores
        self._counts = Counts()
        self._last: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def shortened(self, llama: Any, tokens: Tokens, shares: Sequence[float]) -> list[Shortened]:
        """Return what a ``Llama`` would read of a prompt with each of some shares.

        A prompt that asks for the text in a gap is read whole. ``least_tokens`` does not count.

        Raises:
            LlmaasError: The words cannot be scored.
        """
        vocabulary = vocabulary_of(llama)
        prompt = prompt_of(tokens, vocabulary, self._protection)
        if vocabulary.fills_gap(tokens):
            whole = shorten(prompt, np.zeros(len(prompt.words), np.float32), len(tokens))
            return [whole] * len(shares)
        scores = self._scorers.scorer_for(llama).scores(prompt, llama)
        return [shorten(prompt, scores, budget(prompt, share)) for share in shares]

    @property
    def least_tokens(self) -> int:
        """Fewest tokens of a prompt that is shortened."""
        return self._config.least_tokens

    def scorer_name(self, llama: Any) -> str:
        """Return the name of the scorer for a ``Llama``'s prompts."""
        return self._scorers.name_for(llama)

    def scorer_identity(self, llama: Any) -> str:
        """Return a name of that scorer that is another one if an encoder was trained again."""
        return self._scorers.identity_for(llama)

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep a context's hook point: scorers set its level and read its attention."""
        self._natives[context.ctx] = context
        self._scorers.identify(context)

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Forget a context."""
        self._natives.pop(ctx, None)

    @hookimpl
    def llmaas_cost(self, request: Request) -> RequestCost | None:
        """Offer prompts of the configured shares, or of the one that the app chose itself."""
        asked, own = request.levels.prompt_share, self._config.share_of(request.app)
        shares = set(self._config.shares) if asked is None else {asked}
        if not shares or (own if asked is None else asked) == 1 or not self._may_shorten(request):
            return None
        llama = request.engine.llama
        if llama in self._failing:
            return None
        prompt, n_tokens = self._prompt(request), len(request.tokens)
        room = Room.of(prompt)
        scorer = self._scorers.scorer_for(llama)
        seconds = scorer.seconds(n_tokens)
        found: list[ShorterPrompt] = []
        for share in sorted(shares, reverse=True):
            n_budget = budget(prompt, share)
            n_left = room.n_read(n_budget)
            if n_left < (found[-1].n_tokens if found else n_tokens):
                before_s = seconds if room.needs_scores(n_budget) else 0.0
                found.append(ShorterPrompt(share, n_left, before_s))
        if not found:
            return None
        chosen_by = _as_evaluated(request, scorer, self._scorers.identity_for(llama))
        return RequestCost(shorter=tuple(found), shorter_by=chosen_by)

    @hookimpl
    def llmaas_shorten(self, request: Request, share: float | None) -> Tokens | None:
        """Return the tokens of the words that the scorer ranks first, and of protected ones."""
        share = self._config.share_of(request.app) if share is None else share
        if share is None or share == 1 or not self._may_shorten(request):
            return None
        began = time.perf_counter()
        found = self._shortened(request.engine.llama, self._prompt(request), share)
        if not found.n_left_out:
            return None  # all of it is protected
        self._tell(request, found, share, time.perf_counter() - began)
        return found.tokens

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Return counts, and the last shortened prompt of each recent app."""
        with self._lock:
            return {**self._counts.report(), "last": dict(self._last)}

    @hookimpl
    def llmaas_shutdown(self) -> None:
        """Free the tiny language model."""
        self._scorers.close()

    # -- inside ---------------------------------------------------------------------------------

    def _may_shorten(self, request: Request) -> bool:
        is_short = len(request.tokens) < self._config.least_tokens
        if is_short or _NAME in request.declined:
            return False
        return not vocabulary_of(request.engine.llama).fills_gap(request.tokens)

    def _prompt(self, request: Request) -> Prompt:
        """Return a request's words; both hooks of a request need them."""
        found = self._prompts.get(request)
        if found is None:
            vocabulary = vocabulary_of(request.engine.llama)
            found = prompt_of(request.tokens, vocabulary, self._protection)
            self._prompts[request] = found
        return found

    def _shortened(self, llama: Any, prompt: Prompt, share: float) -> Shortened:
        n_budget = budget(prompt, share)
        scores = np.zeros(len(prompt.words), np.float32)
        if Room.of(prompt).needs_scores(n_budget):
            try:
                scores = self._scorers.scorer_for(llama).scores(prompt, llama)
            except Exception:
                self._failing.add(llama)  # until it succeeds
                raise
            self._failing.discard(llama)
        return shorten(prompt, scores, n_budget)

    def _tell(self, request: Request, found: Shortened, share: float, seconds: float) -> None:
        """Count a shortened prompt, and report it to the one who made the request."""
        llama, scorers = request.engine.llama, self._scorers
        scorer = _as_evaluated(request, scorers.scorer_for(llama), scorers.name_for(llama))
        report = {"scorer": scorer, **report_of(found, share, seconds)}
        with self._lock:
            self._counts.add(found, seconds)
            name = (request.app or "")[:_MOST_SHOWN]
            self._last[name] = report
            self._last.move_to_end(name)
            while len(self._last) > _MOST_APPS:
                self._last.popitem(last=False)
        if request.notes is not None:
            request.notes[_NAME] = {**report, "left_out": text_left_out(found)}


def _as_evaluated(request: Request, scorer: Scorer, name: str) -> str:
    """Return a scorer's name, with the app's call that changed the model in its own context only.

    The context in which the scorer evaluates prompts knows no adapter that the app sets itself.
    """
    call = request.engine.alteration
    return name if call is None or not scorer.uses_model else f"{name} without {call}"
