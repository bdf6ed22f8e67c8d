"""Figures of the day as a picture in SVG, which needs no other package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from llmaas_plugins.cli.day.figures import Figures

__all__ = ["picture"]

_ROW, _NAMES, _PANEL, _BAR, _TOP = 34, 170, 240, 150, 46
_DARK, _LIGHT = "#2b6cb0", "#90cdf4"


class _Panel(NamedTuple):
    title: str
    rows: Sequence[Sequence[tuple[float, str, str]]]
    """Bars of each system: length from 0 to 1, color, and text behind it."""


def picture(found: Mapping[str, Figures], title: str) -> str:
    """Return a picture: promises kept, work, and quality of each system."""
    panels = [_promises(found), _work(found), _quality(found)]
    width, height = _NAMES + len(panels) * _PANEL, _TOP + _ROW * len(found) + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(8, 16, title, "bold"),
        *(_text(8, _TOP + _ROW * i + 20, name) for i, name in enumerate(found)),
    ]
    for i, panel in enumerate(panels):
        lines += _drawn(panel, _NAMES + i * _PANEL)
    return "\n".join([*lines, "</svg>", ""])


# -- inside --------------------------------------------------------------------------------------


def _promises(found: Mapping[str, Figures]) -> _Panel:
    return _Panel(
        "promises kept (1st token, tokens)",
        [
            [
                (kept.share, color, f"{kept.share:.0%}")
                for kept, color in ((one.first_kept, _DARK), (one.further_kept, _LIGHT))
            ]
            for one in found.values()
        ],
    )


def _work(found: Mapping[str, Figures]) -> _Panel:
    longest = max(max(one.waited_s, one.behind_s) for one in found.values())
    return _Panel(
        "seconds (waited for, after replies)",
        [
            [
                (seconds / longest, color, f"{seconds:.1f} s")
                for seconds, color in ((one.waited_s, _DARK), (one.behind_s, _LIGHT))
            ]
            for one in found.values()
        ],
    )


def _quality(found: Mapping[str, Figures]) -> _Panel:
    return _Panel(
        "next tokens as the whole model's",
        [[(one.agreement.value, _DARK, f"{one.agreement.value:.0%}")] for one in found.values()],
    )


def _drawn(panel: _Panel, left: int) -> Iterator[str]:
    yield _text(left, _TOP - 10, panel.title)
    for i, row in enumerate(panel.rows):
        for j, (share, color, text) in enumerate(row):
            top = _TOP + _ROW * i + 15 * j + 2
            length = max(_BAR * share, 0.5)
            yield f'<rect x="{left}" y="{top}" width="{length:.1f}" height="12" fill="{color}"/>'
            yield _text(left + length + 4, top + 10, text)


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-weight="{weight}">{escape(text)}</text>'
