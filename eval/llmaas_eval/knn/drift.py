"""A user whose interests change (appendix B.2): the history covers only some of the new text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from llmaas_eval.knn.keys import Part, UserKeys

__all__ = ["DRIFTS", "drifted", "head"]

DRIFTS: Mapping[str, tuple[str, str, str]] = {
    "turns": ("turns-travel", "turns-leisure", "turns-errands"),
    "topics": ("topic-nature", "topic-health", "topic-business"),
}
"""Users whose conversations are the domains A, B and C."""
_N_TRAIN, _N_TEST = 150, 100


def drifted(a: UserKeys, b: UserKeys, c: UserKeys) -> tuple[UserKeys, Part]:
    """Return a user whose interest moves from A to B, and a test part of B and C.

    The user's history alternates 150 conversations of A with 150 of B; the test part is 100 of B.
    The second test part is the same 100 of B and then 100 of C.
    """
    train = Part.joined([head(a.train, _N_TRAIN), head(b.train, _N_TRAIN)])
    turn = 2 * (train.conv % _N_TRAIN) + train.conv // _N_TRAIN
    order = np.argsort(turn, kind="stable")
    train = replace(train.rows(order), conv=turn[order])
    test = head(b.test, _N_TEST)
    return UserKeys(b.name, train, test), Part.joined([test, head(c.test, _N_TEST)])


def head(part: Part, n: int) -> Part:
    """Return the first ``n`` conversations of ``part``."""
    return part.rows(part.conv < n)
