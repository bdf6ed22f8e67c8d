"""Short forms for `make test`, long ones for `make soak`."""

from __future__ import annotations

import os

SOAKING = bool(os.environ.get("LLMAAS_SOAK"))


def scale(short, long):
    """How often or how long, in the form that runs."""
    return long if SOAKING else short
