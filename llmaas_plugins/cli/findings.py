"""One line of what ``llmaas doctor`` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        section: Group it is printed under.
        name: What was looked at.
        value: What was found; None where there is only ok or a problem.
        origin: Where a setting came from: ``code``, ``env``, the file's name or ``default``.
        problem: What is wrong, or None.
        next_step: What to do about the problem, or what would be better where there is none.
    """

    section: str
    name: str
    value: Any = None
    origin: str | None = None
    problem: str | None = None
    next_step: str | None = None
