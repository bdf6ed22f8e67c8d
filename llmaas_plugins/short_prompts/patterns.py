"""Expressions of a user that protect words, on text that nobody can trust.

Python's ``re`` goes back and tries again, for a time that can grow without limit, and nothing can
interrupt it. So an expression must be simple, and it sees only a short piece of a line at a time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from llmaas_hooks import ConfigError

__all__ = ["Pattern"]

_MOST_CHARACTERS = 200
_PIECE = 128
"""Characters that an expression sees at once; it finds whatever has up to half as many."""
_MOST_STEPS = 1 << 24
"""Most attempts in a piece, about a quarter of a second."""
_LEAST_SECONDS = 0.05
_SECONDS_A_CHARACTER = 2e-6
"""Time for a prompt, ten times what most expressions take. Text that is left after that counts as
matched: nothing to be kept gets lost."""
_ATOM = re.compile(
    r"(?P<escape>\\[AbBdDsSwWZntrfv.^$*+?{}\[\]\\|()/#:@&~'\"<>=!%,; -])"
    r"|(?P<set>\[\^?\]?(?:[^\]\\]|\\.)*\])"
    r"|(?P<open>\((?:\?:)?(?!\?))"
    r"|(?P<close>\))"
    r"|(?P<or>\|)"
    r"|(?P<repeat>(?:[*+?]|\{\d*,?\d*\})[?+]?)"
    r"|(?P<other>[^\\\[\]()|*+?{}])"
)


class Pattern:
    """One expression."""

    def __init__(self, text: str) -> None:
        """Compile an expression.

        Raises:
            ConfigError: It is no expression, or may take too long on some text.
        """
        flags, body = (re.IGNORECASE, text[4:]) if text.startswith("(?i)") else (re.NOFLAG, text)
        if len(text) > _MOST_CHARACTERS:
            raise _refused(text, f"it has {len(text)} characters, the limit is {_MOST_CHARACTERS}")
        try:
            self._compiled = re.compile(body, flags | re.MULTILINE)
        except (re.error, OverflowError) as error:
            raise _refused(text, str(error)) from None
        if (steps := _steps(text, body)) > _MOST_STEPS:
            raise _refused(
                text,
                f"it may take {steps} attempts on {_PIECE} characters, the limit is {_MOST_STEPS}; "
                "repeat fewer parts, or give them fixed lengths",
            )
        self.text = text

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the first character and the end of each match, line by line.

        Where a match ends with a piece, it may go on: the rest of its line counts as matched.
        """
        until = time.perf_counter() + _LEAST_SECONDS + len(text) * _SECONDS_A_CHARACTER
        for start, end in _pieces(text):
            if time.perf_counter() > until:
                yield start, len(text)
                return
            for match in self._compiled.finditer(text, start, end):
                if match.end() > match.start():
                    line_end = text.find("\n", end)
                    rest = len(text) if line_end < 0 else line_end
                    yield match.start(), rest if match.end() == end else match.end()


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Yield pieces of lines; pieces of a long line overlap by half."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start)
        stop = len(text) if stop < 0 else stop
        while stop - start > _PIECE:
            yield start, start + _PIECE
            start += _PIECE // 2
        if stop > start:
            yield start, stop
        start = stop + 1


def _steps(text: str, body: str) -> int:
    """Return how often parts of an expression may be tried on a piece of text at most.

    Raises:
        ConfigError: The expression has a part whose time is not known.
    """
    factor, at = _PIECE, 0
    has_choice, closed = [False], False  # of each open group; of the group that was just closed
    n_ways = [1]
    while at < len(body):
        atom = _ATOM.match(body, at)
        if atom is None:
            raise _refused(text, f"{body[at : at + 3]!r} is not allowed here")
        kind, at = atom.lastgroup, atom.end()
        if kind == "repeat":
            if closed and not atom.group().startswith("?"):
                raise _refused(text, "a part with repetitions or choices is repeated")
            ways = _ways(atom.group())
            factor *= ways
            has_choice[-1] |= ways > 1
        closed = False
        if kind == "open":
            has_choice.append(False)
            n_ways.append(1)
        elif kind == "or":
            has_choice[-1] = True
            n_ways[-1] += 1
        elif kind == "close":
            factor *= n_ways.pop()
            closed = has_choice.pop()
            has_choice[-1] |= closed
    return factor * n_ways[0]


def _ways(repeat: str) -> int:
    """Return how many lengths a repetition may have on a piece of text."""
    if repeat.startswith("?"):
        return 2
    if not repeat.startswith("{"):
        return _PIECE
    least, comma, most = repeat[1 : repeat.index("}")].partition(",")
    if not comma:
        return 1
    return min(int(most or _PIECE), _PIECE) - min(int(least or 0), _PIECE) + 1


def _refused(text: str, reason: str) -> ConfigError:
    return ConfigError(f"cannot use the expression {text!r} for words to keep: {reason}")
