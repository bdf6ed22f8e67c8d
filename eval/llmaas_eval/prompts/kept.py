"""Tables of what parts of the design give of which a result is kept."""

from __future__ import annotations

from collections.abc import Mapping

from llmaas_eval.prompts import design_tables
from llmaas_eval.tables import Maker

__all__ = ["TABLES"]

TABLES: Mapping[str, Maker] = {
    name: design_tables.TABLES[name] for name in ("prompts-design-parts",)
}
