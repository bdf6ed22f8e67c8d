"""Tables of one promise on whole sets of which a result is kept."""

from __future__ import annotations

from collections.abc import Mapping

from llmaas_eval.deadlines.alone import report
from llmaas_eval.tables import Maker

__all__ = ["TABLES"]

TABLES: Mapping[str, Maker] = {
    name: report.TABLES[name]
    for name in (
        "alone-apps",
        "alone-grid",
        "alone-answer-time",
        "alone-memory",
        "alone-shares",
        "alone-switching",
        "alone-variants",
        "alone-ways",
    )
} | {"alone-octopus": report.TABLES["alone-apps"]}
