"""Tables of promises of single requests of which a result is kept."""

from __future__ import annotations

from collections.abc import Mapping

from llmaas_eval.deadlines import report
from llmaas_eval.tables import Maker

__all__ = ["TABLES"]

TABLES: Mapping[str, Maker] = {
    **report.TABLES,
    "prompts-unloaded-1b": report.TABLES["prompts-unloaded"],
}
