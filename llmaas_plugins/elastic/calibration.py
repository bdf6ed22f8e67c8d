"""Text to calibrate with: text that the model writes, and packaged text of several kinds.

A model's own text is what it knows well. Text of other kinds shows what a level costs elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import zip_longest
from typing import NamedTuple

from llmaas_hooks import Tokens

__all__ = ["Parts", "packaged_texts", "parts_of"]


class Parts(NamedTuple):
    """Windows of tokens: some to search on, and others to judge the result on.

    Attributes:
        search: Windows to search on.
        judge: Windows to judge on.
    """

    search: tuple[Tokens, ...]
    judge: tuple[Tokens, ...]


def packaged_texts() -> Mapping[str, str]:
    """Return the packaged texts by kind; they were written for this project."""
    folder = files("llmaas_plugins.elastic") / "texts"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".txt"))
    return {name.removesuffix(".txt"): (folder / name).read_text("ascii") for name in names}


def parts_of(texts: Sequence[Sequence[Tokens]], n_tokens: int) -> Parts:
    """Split texts by window: one to search on, the next to judge on, of each text in turn.

    Args:
        texts: Windows of each text.
        n_tokens: Most tokens of each part; at least one window is taken.
    """
    pairs = [zip_longest(windows[::2], windows[1::2]) for windows in texts]
    search, judge = list[Tokens](), list[Tokens]()
    for turn in zip_longest(*pairs, fillvalue=(None, None)):
        for one, other in turn:
            search += [one] if one is not None else []
            judge += [other] if other is not None else []
    return Parts(_first(search, n_tokens), _first(judge or search, n_tokens))


def _first(windows: Sequence[Tokens], n_tokens: int) -> tuple[Tokens, ...]:
    found, n = list[Tokens](), 0
    for window in windows:
        if found and n + len(window) > n_tokens:
            break
        found.append(window)
        n += len(window)
    return tuple(found)
