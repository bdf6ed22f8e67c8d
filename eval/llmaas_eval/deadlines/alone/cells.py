"""Rows of the study by what they are about, and joined over sets of questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.deadlines.alone.answering import OURS
from llmaas_eval.deadlines.alone.promises import APART
from llmaas_eval.deadlines.loaded.traces import APP_NAMES, SHARES
from llmaas_eval.tables import NoRowsError, Output

__all__ = ["MEASURES", "Case", "Cells", "Values", "models_of"]

MEASURES = ("agrees", "right", "nats")
"""Values of a question."""

Values = Mapping[str, NDArray[np.float64]]
"""Values of each question, by name of the measure."""


class Case(NamedTuple):
    """A promise for a set: kind of limits, and limits of first and further tokens."""

    set: str
    kind: str
    first: float
    further: float


class Cells:
    """Answers of one model by promise, set and method.

    Attributes:
        methods: Names of the methods, ours first.
    """

    def __init__(self, outputs: Iterable[Output], model: str) -> None:
        """Read the rows of a model; of equal rows in several outputs, the last one counts."""
        rows = [row for output in outputs for row in output["rows"] if row["row"] == "promise"]
        self._rows = {
            (Case(*(row[name] for name in Case._fields)), row["by"]): row
            for row in rows
            if row["model"] == model
        }
        self.methods = list(dict.fromkeys([OURS, *(by for _, by in self._rows)]))

    def cases(self, kind: str) -> list[Case]:
        """Return the promises of a kind, for each set."""
        return [case for case in dict.fromkeys(case for case, _ in self._rows) if case.kind == kind]

    def levels(self, case: Case, by: str) -> list[Sequence[float]]:
        """Return the settings that a method uses; empty if they differ by question."""
        return [*self._rows[case, by]["levels"]] if (case, by) in self._rows else []

    def values(self, case: Case, by: str) -> Values | None:
        """Return a method's values under a promise; None if it cannot keep it."""
        row: Mapping[str, Any] = self._rows.get((case, by), {})
        return {name: np.array(row[name]) for name in MEASURES} if "agrees" in row else None

    def kept(self, cases: Sequence[Case], methods: Sequence[str]) -> list[Case]:
        """Return the cases in which all methods keep the promise."""
        return [case for case in cases if all(self.values(case, by) is not None for by in methods)]

    def joined(self, cases: Sequence[Case], methods: Sequence[str]) -> dict[str, Values]:
        """Return the values of methods over the cases in which all of them keep the promise.

        Returns:
            Values by method; empty if there is no such case.
        """
        kept = self.kept(cases, methods)
        found = {by: [one for case in kept if (one := self.values(case, by))] for by in methods}
        return {
            by: {name: np.concatenate([one[name] for one in some]) for name in MEASURES}
            for by, some in found.items()
            if some
        }

    def app_cases(self) -> Mapping[str, Case]:
        """Return each app's promise; where ours cannot keep it, the next wider one that it can."""
        found = {}
        for app in reversed(APP_NAMES):
            first, further = SHARES[app]
            some = [
                case
                for case in sorted(self.cases(APART), key=lambda case: case.first)
                if (case.set, case.further) == (app, further) and case.first >= first
                if self.values(case, OURS) is not None
            ]
            if some:
                found[app] = some[0]
        return found


def models_of(outputs: Sequence[Output], *, has_all_settings: bool = True) -> list[str]:
    """Return the names of the models that have rows of promises.

    Args:
        outputs: Outputs of the study.
        has_all_settings: Whether to leave out models that were not asked at all settings.

    Raises:
        NoRowsError: There are none.
    """
    rows = (row for output in outputs for row in output["rows"] if row["row"] == "promise")
    found = list(
        dict.fromkeys(
            row["model"] for row in rows if row["has_all_settings"] or not has_all_settings
        )
    )
    if not found:
        raise NoRowsError("no rows of promises")
    return found
