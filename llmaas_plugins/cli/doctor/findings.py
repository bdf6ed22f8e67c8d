"""A line of the report of ``llmaas doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        section: Group under which the line is printed.
        name: Name of what was checked.
        value: Value that was found; None if there is only ok or a problem.
        origin: Source of a setting: ``code``, ``env``, the file's name or ``default``.
        problem: Description of the problem, or None.
        next_step: How to fix the problem, or an improvement if there is no problem.
    """

    section: str
    name: str
    value: Any = None
    origin: str | None = None
    problem: str | None = None
    next_step: str | None = None
