"""Hooks of the plugin: offer shorter prompts, and choose what a request reads."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from typing import Any, ClassVar

from llmaas_hooks import (
    NativeContext,
    Request,
    RequestCost,
    ShorterPrompt,
    Tokens,
    forks,
    hookimpl,
)
from llmaas_plugins.short_prompts.budget import Shortened, budget, n_read, shorten
from llmaas_plugins.short_prompts.config import ShortPromptsConfig
from llmaas_plugins.short_prompts.patterns import Pattern
from llmaas_plugins.short_prompts.protection import PROTECTION, Protection, prompt_of
from llmaas_plugins.short_prompts.report import Counts, report_of
from llmaas_plugins.short_prompts.scorer import Prompt, Scorer
from llmaas_plugins.short_prompts.scorers import SCORERS
from llmaas_plugins.short_prompts.vocabulary import vocabulary_of

__all__ = ["ShortPrompts"]

_NAME = "short_prompts"
_MOST_APPS = 64


class ShortPrompts:
    """Plugin that leaves out the words of a prompt that its answer needs least."""

    Config: ClassVar[type[ShortPromptsConfig]] = ShortPromptsConfig

    def __init__(self, config: ShortPromptsConfig) -> None:
        """Take the settings; scorers are made when requests need them."""
        self._config = config
        self._protection = Protection(PROTECTION.kinds, tuple(map(Pattern, config.protect)))
        self._lock = forks.lock()
        self._natives: dict[int, NativeContext] = {}
        self._scorers: weakref.WeakKeyDictionary[Any, Scorer] = weakref.WeakKeyDictionary()
        self._prompts: weakref.WeakKeyDictionary[Request, Prompt] = weakref.WeakKeyDictionary()
        self._counts = Counts()
        self._last: OrderedDict[str, dict[str, Any]] = OrderedDict()

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep a context's hook point: scorers set its level and read its attention."""
        self._natives[context.ctx] = context

    @hookimpl
    def llmaas_context_free(self, ctx: int) -> None:
        """Forget a context."""
        self._natives.pop(ctx, None)

    @hookimpl
    def llmaas_cost(self, request: Request) -> RequestCost | None:
        """Offer prompts of the configured shares, unless the app chose a share itself."""
        if not self._config.shares or not self._may_shorten(request):
            return None
        if request.levels.prompt_share is not None:
            return None
        if self._config.share_of(request.app) == 1:
            return None
        prompt = self._prompt(request)
        seconds = self._scorer(request).seconds(len(request.tokens))
        found: list[ShorterPrompt] = []
        for share in sorted(self._config.shares, reverse=True):
            n_tokens = n_read(prompt, budget(prompt, share))
            if n_tokens < (found[-1].n_tokens if found else len(request.tokens)):
                found.append(ShorterPrompt(share, n_tokens, seconds))
        return RequestCost(shorter=tuple(found)) if found else None

    @hookimpl
    def llmaas_shorten(self, request: Request, share: float | None) -> Tokens | None:
        """Return the tokens of the words that the scorer ranks first, and of protected ones."""
        share = self._config.share_of(request.app) if share is None else share
        if share is None or share == 1 or not self._may_shorten(request):
            return None
        began = time.perf_counter()
        prompt = self._prompt(request)
        n_budget = budget(prompt, share)
        if n_read(prompt, n_budget) == len(request.tokens):
            return None  # all of it is protected
        scores = self._scorer(request).scores(prompt, request.engine.llama)
        found = shorten(prompt, scores, n_budget)
        if not found.n_left_out:
            return None
        self._tell(request, found, share, time.perf_counter() - began)
        return found.tokens

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Return counts, and the last shortened prompt of each recent app."""
        with self._lock:
            return {
                "scorer": self._config.scorer,
                **self._counts.report(),
                "last": dict(self._last),
            }

    # -- inside ---------------------------------------------------------------------------------

    def _may_shorten(self, request: Request) -> bool:
        return _NAME not in request.declined and len(request.tokens) >= self._config.least_tokens

    def _prompt(self, request: Request) -> Prompt:
        """Return a request's words; both hooks of a request need them."""
        found = self._prompts.get(request)
        if found is None:
            vocabulary = vocabulary_of(request.engine.llama)
            found = prompt_of(request.tokens, vocabulary, self._protection)
            self._prompts[request] = found
        return found

    def _scorer(self, request: Request) -> Scorer:
        """Return the scorer for a model, whose time it measures."""
        llama = request.engine.llama
        with self._lock:
            found = self._scorers.get(llama)
            if found is None:
                found = self._scorers[llama] = SCORERS[self._config.scorer](self._natives)
            return found

    def _tell(self, request: Request, found: Shortened, share: float, seconds: float) -> None:
        """Count a shortened prompt, and report it to the one who made the request."""
        report = report_of(found, share, seconds)
        with self._lock:
            self._counts.add(found, seconds)
            name = (request.app or "")[:_MOST_APPS]
            self._last[name] = {key: report[key] for key in report if key != "left_out"}
            self._last.move_to_end(name)
            while len(self._last) > _MOST_APPS:
                self._last.popitem(last=False)
        if request.notes is not None:
            request.notes[_NAME] = report
