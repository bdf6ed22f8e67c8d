"""Everything that was learned about a model's answers, read when a request needs it."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from llmaas_hooks import FileStamp, StoreError, forks
from llmaas_plugins.deadlines.answers import Answers, answers_path
from llmaas_plugins.deadlines.config import Risk
from llmaas_plugins.deadlines.policies import WHOLE, Policy, certified
from llmaas_plugins.deadlines.worth import Worth

__all__ = ["Learned", "Lessons"]

_MOST_FILES = 64

_log = logging.getLogger("llmaas.deadlines")


class Learned(NamedTuple):
    """Knowledge about an app's answers.

    Attributes:
        worth: Probability of the whole model's answer; None if nothing was learned.
        policies: Policies with the certified risk; the whole model is always one.
    """

    worth: Worth | None = None
    policies: tuple[Policy, ...] = (WHOLE,)


class Lessons:
    """Answers of all models that were asked for. A file that is replaced is read again."""

    def __init__(self) -> None:
        """Start without any."""
        self._lock = forks.lock()
        self._read: OrderedDict[Path, tuple[FileStamp | None, Answers | None]] = OrderedDict()
        self._about = functools.lru_cache(_MOST_FILES)(_about)

    def about(
        self, levels_id: str | None, app: str | None, n_tokens: int, risk: Risk | None
    ) -> Learned:
        """Return what is known. An app without answers of its own gets that of general text.

        Args:
            levels_id: Name of what the model's levels compute; None if it is unknown.
            app: Name of the app.
            n_tokens: Tokens of an answer that count.
            risk: Risk to certify; None asks for no certificates.
        """
        if levels_id is None:
            return Learned()
        with self._lock:
            general = self._answers(levels_id, None)
            own = None if app is None else self._answers(levels_id, app)
        return self._about(general, own, n_tokens, risk)

    # -- inside ---------------------------------------------------------------------------------

    def _answers(self, levels_id: str, app: str | None) -> Answers | None:
        path = answers_path(levels_id, app)
        stamp = FileStamp.at(path)
        known = self._read.get(path)
        if known is None or known[0] != stamp:
            try:
                known = stamp, Answers.load(path, levels_id)
            except StoreError as error:
                known = stamp, None
                _log.warning("what was learned about answers is not used: %s", error)
            self._read[path] = known
        self._read.move_to_end(path)
        while len(self._read) > _MOST_FILES:
            self._read.popitem(last=False)
        return known[1]


def _about(
    general: Answers | None, own: Answers | None, n_tokens: int, risk: Risk | None
) -> Learned:
    """Return what answers tell, if they are long enough.

    Half of the general answers estimate risks, and certificates come from the other half. An app's
    own answers are all for certificates, as the general ones estimate its risks.
    """
    general, own = (_long_enough(one, n_tokens) for one in (general, own))
    known = own or general
    if known is None:
        return Learned()
    worth = Worth.of(known, n_tokens)
    if risk is None:
        return Learned(worth)
    if own is None or general is None or own.levels != general.levels:
        fitting, calibration = known.some(slice(0, None, 2)), known.some(slice(1, None, 2))
    else:
        fitting, calibration = general, own
    if not (len(fitting) and len(calibration)):
        return Learned(worth)
    error = 1 - risk.confidence
    return Learned(worth, certified(fitting, calibration, n_tokens, risk.most, error))


def _long_enough(answers: Answers | None, n_tokens: int) -> Answers | None:
    if answers is None or answers.n_answer >= n_tokens:
        return answers
    _log.warning(
        "answers of %d tokens were learned, but answer_tokens is %d, so they are not used. "
        "`llmaas deadlines learn --answer-tokens %d` measures longer ones.",
        answers.n_answer, n_tokens, n_tokens,
    )  # fmt: skip
    return None
