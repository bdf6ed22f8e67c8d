"""Time that weights kept in memory save, measured by the waits for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from llmaas_hooks import MemoryClaim
from llmaas_plugins.memory.recent import TIME_S, RecentSums

__all__ = ["Seen", "WeightSavings"]

_STALLED, _MISSED, _PASSED, _PROMPTED = range(4)
_FIRST_S = 1e-9
"""Seconds to wait for a byte that is not kept, until waits were measured."""


class Seen(NamedTuple):
    """Figures of a streamed model since it was loaded.

    Attributes:
        stalled_ns: Time that computing waited for weights.
        n_passes: Number of passes through the weights, also those of contexts that plugins made
            for themselves.
        prompt_bytes: Bytes that these passes used of the weights that only prompts use. Tokens at
            narrow levels use a part of them, too.
    """

    stalled_ns: int = 0
    n_passes: int = 0
    prompt_bytes: int = 0


class WeightSavings:
    """Estimate of the seconds saved a second by each byte of kept weights.

    Nothing is known before the first pass through the weights. A byte that is kept need not be
    waited for in any pass that uses it. The wait for a byte is the recent time of all waits,
    divided by the bytes that were not kept in each pass. If computing takes longer than reading,
    nothing waits, and more memory saves nothing. In the sparse mode, tokens use columns, and the
    weights themselves are used by prompts, and in part by tokens at narrow levels: they save less,
    and come after all others.
    """

    def __init__(self) -> None:
        """Start without measurements."""
        self._sums = RecentSums(4)
        self._byte_s = _FIRST_S
        self._is_known = False

    def saw(self, before: Seen, now: Seen, sizes: Mapping[str, int]) -> None:
        """Record what a model did while it had these ``stats``."""
        n_passes = now.n_passes - before.n_passes
        if n_passes <= 0:
            return
        prompted = now.prompt_bytes - before.prompt_bytes
        left = sizes["prompt_bytes"] - sizes["prompt_kept_bytes"]
        missed: float = n_passes * (sizes["bytes"] - sizes["kept_bytes"])
        missed += prompted * left / max(1, sizes["prompt_bytes"])
        self._is_known = True
        self._sums.add(_STALLED, (now.stalled_ns - before.stalled_ns) / 1e9)
        self._sums.add(_MISSED, missed)
        self._sums.add(_PASSED, n_passes * sizes["bytes"])
        self._sums.add(_PROMPTED, prompted)

    def saved_s(self, n_bytes: int) -> float:
        """Return the seconds saved a second by each byte that tokens use, of ``n_bytes`` in all."""
        passed = self._sums.now()[_PASSED]
        return float(self._wait_s(n_bytes) * passed / max(1, n_bytes) / TIME_S)

    def prompt_saved_s(self, n_bytes: int, prompts: int) -> float:
        """Return the same for each byte that only prompts use, of ``prompts`` beside the others."""
        prompted = self._sums.now()[_PROMPTED]
        return float(self._wait_s(n_bytes) * prompted / max(1, prompts) / TIME_S)

    def _wait_s(self, n_bytes: int) -> float:
        """Return the wait for a byte that is not kept, measured or remembered."""
        stalled_s, missed, *_ = self._sums.now()
        if missed > n_bytes / 100:  # otherwise nearly everything was kept, and says nothing
            self._byte_s = stalled_s / missed
        return self._byte_s

    def claims(
        self, models: Sequence[Mapping[str, int]], lent: int, resize: Callable[[int], None]
    ) -> list[MemoryClaim]:
        """Return the claims of kept weights beyond the least, and of what all weights need.

        Weights of a level that memory keeps first are left to the claim of the plugin that chose
        the level.

        Args:
            models: Figures of each streamed model.
            lent: Bytes of compute buffers and cells that no batch has touched yet. Weights have
                this room until then, and nobody else can: it has no part in the division.
            resize: Function that sets the bytes that may be kept.
        """
        if not models:
            return []

        def total(name: str) -> int:
            return sum(seen[name] for seen in models)

        kept = total("kept_bytes") - total("level_kept_bytes")
        most = max(0, total("bytes") - total("least_bytes") - total("level_bytes") - lent)
        beyond = max(0, kept - total("least_bytes"))
        lent = min(lent, beyond)
        prompts = total("prompt_bytes")
        held = beyond - lent + total("prompt_kept_bytes")
        points: tuple[tuple[int, float], ...] = ((0, 0.0),)
        if self._is_known:
            n_bytes = total("bytes")
            saved = most * self.saved_s(n_bytes)
            points += ((most, saved),)
            if prompts:
                more = prompts * self.prompt_saved_s(n_bytes, prompts)
                points += ((most + prompts, saved + more),)
        most += prompts
        why = "each pass through the weights need not wait for them"
        needed = total("arena_bytes") + total("passing_bytes") + kept - beyond
        return [
            MemoryClaim("weights kept in memory", held, most, points, resize, why=why),
            MemoryClaim.reserved(
                "streaming buffers", needed, "weights from disk pass through them"
            ),
            MemoryClaim.reserved(
                "weights in room of compute buffers", lent, "until a batch needs the room"
            ),
        ]
