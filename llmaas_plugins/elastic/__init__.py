"""One model file at many widths; each request chooses its width (ElastiLM, §3.2).

    from llmaas_plugins import elastic

    with elastic.level(0.6):
        llm("Once upon a time")

``units`` defines which parts of a model can be left out. ``reordering`` puts the most important
parts first. ``prepared_file`` writes the reordered model with the widths of each level; any
llama.cpp can load that file.
"""

from __future__ import annotations

from llmaas_plugins.elastic.levels import level

__all__ = ["level"]
