"""Tables of promises under load of which a result is kept."""

from __future__ import annotations

from collections.abc import Mapping

from llmaas_eval.deadlines.loaded import report
from llmaas_eval.tables import Maker

__all__ = ["TABLES"]

TABLES: Mapping[str, Maker] = {
    name: report.TABLES[name]
    for name in ("deadlines-loaded", "deadlines-rates", "deadlines-quality")
} | {
    "deadlines-loaded-1b": report.TABLES["deadlines-loaded"],
    "deadlines-cold": report.TABLES["deadlines-loaded"],
    "deadlines-loaded-cold": report.TABLES["deadlines-loaded"],
    "deadlines-quality-tuned": report.TABLES["deadlines-quality"],
    "deadlines-quality-cold": report.TABLES["deadlines-quality"],
    "deadlines-shortened": report.TABLES["deadlines-shortened"],
}
