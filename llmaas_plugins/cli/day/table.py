"""Figures of the day as a table, as bars, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmaas_plugins.cli.day.figures import Figures, Kept, speed_of
from llmaas_plugins.cli.day.run import Day
from llmaas_plugins.cli.day.systems import STATES, TOGETHER, VANILLA
from llmaas_plugins.cli.output import counted, size_text
from llmaas_plugins.demo.interval import Interval
from llmaas_plugins.demo.report import three_digits

__all__ = ["HEADS", "bars", "cells", "conclusions", "table"]

HEADS = (
    *(("system", ""), ("1st token", "kept"), ("tokens", "kept"), ("1st token", "p50 ms")),
    *(("1st token", "p99 ms"), ("tokens", "per s"), ("work", "s"), ("speed", ""), ("", "95 %")),
    *(("same", "token"), ("perplexity", ""), ("peak", "MiB")),
)
"""Heads of the table's columns, in two lines."""
_WIDTH = 40
_MIB = 1 << 20


def cells(name: str, figures: Figures) -> list[str]:
    """Return a row of the table."""
    return [
        name,
        _share(figures.first_kept),
        _share(figures.further_kept),
        three_digits(figures.first_ms_p50),
        three_digits(figures.first_ms_p99),
        three_digits(figures.tokens_per_s),
        three_digits(figures.waited_s + figures.behind_s),
        f"{figures.speed.value:.2f}×",
        _between(figures.speed),
        f"{figures.agreement.value:.0%}",
        three_digits(figures.perplexity),
        f"{(figures.peak_bytes + figures.cached_bytes) / _MIB:.0f}",
    ]


def table(found: Mapping[str, Figures]) -> Iterator[str]:
    """Yield the lines of the table."""
    heads = [list(line) for line in zip(*HEADS, strict=True)]
    rows = [*heads, *(cells(name, figures) for name, figures in found.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        name, *others = row
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *numbers])
        if i == len(heads) - 1:
            yield "-" * (sum(widths) + 2 * (len(widths) - 1))


def bars(found: Mapping[str, Figures]) -> Iterator[str]:
    """Yield a bar for the work of each system: seconds that callers waited, and work behind."""
    longest = max(one.waited_s + one.behind_s for one in found.values())
    width = max(map(len, found))
    yield "seconds of work for the same calls (█ somebody waits, ░ after the reply)"
    for name, one in found.items():
        n_waited = round(_WIDTH * one.waited_s / longest)
        n_behind = round(_WIDTH * (one.waited_s + one.behind_s) / longest) - n_waited
        yield f"{name.ljust(width)}  {'█' * n_waited}{'░' * n_behind}"


def conclusions(day: Day, found: Mapping[str, Figures]) -> Iterator[str]:
    """Yield sentences that say what was compared, and what came out."""
    yield (
        f"{counted(day.n_contexts, 'app')}, {counted(len(day.calls), 'call')}. Weights "
        f"({size_text(day.model_bytes)}) and contexts ({size_text(day.contexts_bytes)} at the end) "
        f"share {size_text(day.shared_bytes)} in every system, "
        f"{day.options.share:.0%} of what they need; the program itself comes on top (peak)."
    )
    if not day.is_vanilla_limited:
        yield (
            "The model is larger than this memory. Systems without flash_weights had all of the "
            "machine's memory, because only a cgroup can limit them."
        )
    yield from _together(day, found)
    for name, reason in day.files.left_out.items():
        yield f"{name} is left out: {reason}."


# -- inside --------------------------------------------------------------------------------------


def _together(day: Day, found: Mapping[str, Figures]) -> Iterator[str]:
    ours, vanilla = found[TOGETHER], found[VANILLA]
    states = speed_of(day, TOGETHER, STATES)
    yield (
        f"All plugins together do the same work {_compared(ours.speed)} vanilla (95 % interval "
        f"{_between(ours.speed)}), and {_compared(states)} vanilla with state files "
        f"({_between(states)}). They keep {_share(ours.first_kept)} of the promises of a first "
        f"token (vanilla {_share(vanilla.first_kept)}) and {_share(ours.further_kept)} of those of "
        f"further tokens (vanilla {_share(vanilla.further_kept)})."
    )
    yield (
        f"For that, {ours.agreement.value:.0%} of the most likely tokens are the whole model's "
        f"({_percents(ours.agreement)}), and the perplexity of the replies is "
        f"{three_digits(ours.perplexity)} (vanilla {three_digits(vanilla.perplexity)})."
    )


def _compared(speed: Interval) -> str:
    if speed.low <= 1 <= speed.high:
        return f"about as fast as ({speed.value:.2f}×)"
    return f"{speed.value:.2f}× as fast as"


def _share(kept: Kept) -> str:
    return f"{kept.share:.0%}" if kept.n_made else "none made"


def _between(found: Interval) -> str:
    return f"{found.low:.2f}–{found.high:.2f}"


def _percents(found: Interval) -> str:
    return f"{found.low:.0%} to {found.high:.0%}"
