"""The hooks: count while a request runs, book it when it ended, end replies beyond the budget."""

import logging
import threading
from datetime import date, timedelta
from pathlib import Path
from typing import Any, ClassVar

from llama_cpp import llama_cpp
from llmaas_hooks import DecodeStep, LogitsView, Request, RequestStats, hookimpl
from pydantic import BaseModel, ConfigDict, Field

from llmaas_usage.ledger import Ledger

__all__ = ["Usage", "UsageConfig"]

_log = logging.getLogger("llmaas.usage")


class UsageConfig(BaseModel):
    """Table ``[plugins.usage]`` of ``llmaas.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path = Field(
        default=Path("~/.local/share/llmaas-usage"),
        description="Where usage.sqlite lives; processes that share it share the budget.",
    )
    daily_tokens: int | None = Field(
        default=None, ge=1, description="Tokens to evaluate a day; then replies end at once."
    )
    keep_days: int = Field(default=90, ge=1, description="Days before a sum is deleted.")


class Usage:
    """Token and latency accounting by day and context, for every ``Llama`` of the process."""

    Config: ClassVar[type[UsageConfig]] = UsageConfig

    def __init__(self, config: UsageConfig) -> None:
        """Open nothing yet: the file is opened with the first request."""
        self._config = config
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}  # evaluated by the request that runs, by llama_context
        self._ledger: Ledger | None = None
        self._opening = threading.Lock()
        self._day = ""
        self._used = 0

    @hookimpl
    def llmaas_request_begin(self, request: Request) -> None:
        """Start counting; read what the day's budget has left."""
        self._running[request.engine.ctx] = 0
        self._read_day()

    @hookimpl
    def llmaas_decode(self, step: DecodeStep) -> None:
        """Count what is really evaluated: restored cells cost nothing."""
        if step.ctx in self._running:
            self._running[step.ctx] += step.n_tokens

    @hookimpl
    def llmaas_logits(self, view: LogitsView) -> None:
        """Make the end of the reply the most likely token when the budget is used up.

        The others stay possible: a grammar that allows no end here must not be left with nothing.
        """
        limit = self._config.daily_tokens
        if limit is None or self._used + self._running.get(view.ctx, 0) < limit:
            return
        vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(view.ctx))
        end = llama_cpp.llama_vocab_eos(vocab)
        if end >= 0:
            view.logits[end] = view.logits.max() + 1000

    @hookimpl
    def llmaas_request_end(self, request: Request, stats: RequestStats) -> None:
        """Book the request behind the caller's back."""
        evaluated = self._running.pop(request.engine.ctx, 0)

        def book() -> None:
            self._open().add(
                self._day,
                request.context_id or "(stateless)",
                requests=1,
                prompt=stats.n_prompt,
                reused=stats.n_reused,
                evaluated=evaluated,
                generated=stats.n_generated,
                first_token_s=stats.first_token_s or 0.0,
                total_s=stats.total_s,
            )

        request.engine.defer(book)

    @hookimpl
    def llmaas_status(self) -> dict[str, Any]:
        """Today's sums."""
        self._read_day()
        limit = self._config.daily_tokens
        return {
            "day": self._day,
            "evaluated": self._used,
            "budget_left": None if limit is None else max(0, limit - self._used),
            "contexts": self._open().contexts(self._day),
        }

    @hookimpl
    def llmaas_shutdown(self) -> None:
        """Close the file, if it was opened."""
        if self._ledger is not None:
            self._ledger.close()

    def _open(self) -> Ledger:
        """Return the ledger, whose file is opened at the first use."""
        with self._opening:
            if self._ledger is None:
                self._ledger = Ledger(self._config.state_dir)
            return self._ledger

    def _read_day(self) -> None:
        """Take over what other processes booked, and a new day."""
        with self._lock:  # engines of several threads, and somebody who asks for the status
            today = date.today()
            if self._day != str(today):
                self._day = str(today)
                oldest = today - timedelta(days=self._config.keep_days)
                self._open().forget_before(str(oldest))
            before, self._used = self._used, self._open().evaluated(self._day)
            limit = self._config.daily_tokens
        if limit is not None and before < limit <= self._used:
            _log.warning("today's %d tokens are used up: replies end at once", limit)
