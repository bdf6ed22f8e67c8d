"""Test lengths: short for ``make test``, long for ``make soak``."""

from __future__ import annotations

import os

SOAKING = bool(os.environ.get("LLMAAS_SOAK"))


def scale(short, long):
    """Return the count or duration for the current form, short or long."""
    return long if SOAKING else short
